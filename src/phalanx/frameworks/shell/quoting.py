"""Quotations, brackets and braces of a word as it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from phalanx.frameworks.shell.scope import WORD, Budget

_BRACES = re.compile(
    r"(?P<before>[^\s'\"`${]*)\{(?P<inside>[^\s{}'\"`$]*(?:,|\.\.)[^\s{}'\"`$]*)\}(?P<after>.*)\Z", re.S
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "e": "\x1b", "a": "\a", "b": "\b"}


def closing_quote(raw: str, at: int) -> int:
    """Return where the double quotes that are open at `at` close."""
    while at < len(raw) and raw[at] != '"':
        if raw[at] == "\\":
            at += 2
        elif raw.startswith(("$(", "${"), at):
            at = closing(raw, at + 1)
        elif raw[at] == "`":
            at = raw.index("`", at + 1) + 1
        else:
            at += 1
    return at


def closing(raw: str, start: int) -> int:
    """Return the place behind the bracket that closes the one at `start`."""
    opens = raw[start]
    closes = ")" if opens == "(" else "}"
    at, level = start + 1, 1
    while at < len(raw):
        c = raw[at]
        if c == "\\":
            at += 1
        elif c == "'" and (end := raw.find("'", at + 1)) > 0:
            at = end
        elif c == '"':
            at = closing_quote(raw, at + 1)
        elif c == opens:
            level += 1
        elif c == closes:
            level -= 1
            if not level:
                return at + 1
        at += 1
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
