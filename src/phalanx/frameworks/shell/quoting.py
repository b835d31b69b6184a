"""Quotations, brackets and braces of a word as it is written."""

import re
from collections.abc import Iterator, Sequence

from phalanx.frameworks.shell.scope import WORD, Budget
from phalanx.frameworks.shell.source import ScriptText
from phalanx.spec.errors import InputError

_BRACES = re.compile(
    r"(?P<before>[^\s'\"`${]*)\{(?P<inside>[^\s{}'\"`$]*(?:,|\.\.)[^\s{}'\"`$]*)\}(?P<after>.*)\Z", re.S
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "e": "\x1b", "a": "\a", "b": "\b"}


def closing(raw: str, start: int) -> int:
    """Return the place behind the bracket or quotation that begins at `start`; the end of the text where it does not
    close, as in a here-document."""
    text = ScriptText(raw)
    closes = {"(": ")", "{": "}"}.get(raw[start])
    try:
        return text.nested(start, raw[start], closes) if closes else text.piece(start)
    except InputError:
        return len(raw)


def escaped(text: str) -> str:
    """Return a text in `$'...'` with what its backslashes mean."""
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), text, flags=re.S)


def braces(raw: str, budget: Budget) -> Iterator[str]:
    """Yield the words that braces make: `{a,b}`, `{1..4}`."""
    match = _BRACES.match(raw) if "{" in raw else None
    if not match:
        yield raw
        return
    inside = match["inside"]
    numbers = re.fullmatch(r"(-?\d{1,6})\.\.(-?\d{1,6})", inside)
    if numbers:
        first, last = int(numbers[1]), int(numbers[2])
        step = 1 if last >= first else -1
        parts: Sequence[object] = range(first, last + step, step)
    elif "," in inside:
        parts = inside.split(",")
    else:
        yield raw
        return
    for part in parts:
        for after in braces(match["after"], budget):
            budget.spend(WORD + len(raw))
            yield f"{match['before']}{part}{after}"
