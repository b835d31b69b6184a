"""The report of a comparison: time by term, memory by part, settings that differ, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.planning.search.why_not import TERM_NAMES
from phalanx.report.compare import LETTERS, Compared, legend
from phalanx.report.html.page import Section, page
from phalanx.report.html.plan import memory
from phalanx.report.style import seconds


def report(sides: Sequence[Compared], differing: Sequence[tuple[str, list[str]]]) -> str:
    """Return the page of two or three sides and the settings that differ between them."""
    letters = LETTERS[: len(sides)]
    names = list(dict.fromkeys(name for side in sides for name in side.terms))
    bars = [
        {
            "bar": letter,
            "part": TERM_NAMES.get(name, name),
            "value": side.terms.get(name, 0.0),
            "text": seconds(side.terms.get(name, 0.0)),
        }
        for letter, side in zip(letters, sides, strict=True)
        for name in names
        if side.terms.get(name, 0.0) > 1e-3 * side.seconds
    ]
    rows = [
        (TERM_NAMES.get(name, name), *(seconds(side.terms.get(name, 0.0)) for side in sides)) for name in names
    ] + [("the step", *(seconds(side.seconds) for side in sides))]
    held = {letter: side.memory_terms for letter, side in zip(letters, sides, strict=True)}
    usable = min(side.usable for side in sides)
    sections = [
        Section("What is compared", "text", text=(*legend(sides), *map(_rate, letters, sides))),
        Section("Time by term", "stack", columns=("", *letters), rows=rows, chart={"unit": "seconds", "bars": bars}),
        memory("Memory by part", held, ("usable", usable), "of the fullest rank"),
        Section(
            "Settings that differ",
            "table",
            columns=("setting", *letters),
            rows=[(name, *values) for name, values in differing],
            text=() if differing else ("None.",),
        ),
    ]
    return page(" against ".join(side.name for side in sides), "comparison", sections)


def _rate(letter: str, side: Compared) -> str:
    rate = side.tokens / side.seconds
    return f"{letter}: {rate:,.0f} tokens/s on {side.gpus:,} GPUs, a step of {seconds(side.seconds)}"
