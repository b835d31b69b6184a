"""The report of a comparison: time by term, memory by part, settings that differ, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.answers.compare import ComparedPlan
from phalanx.planning.search.why_not import TERM_NAMES
from phalanx.report.html.page import Section, page
from phalanx.report.html.plan import memory
from phalanx.report.pictures.figure import Bar, Bars
from phalanx.report.style import seconds


def report(sides: Mapping[str, ComparedPlan], legend: Sequence[str], differing: Mapping[str, Sequence[str]]) -> str:
    """Return the page of two or three sides, by letter, and the settings that differ between them."""
    letters, sides_in_order = tuple(sides), list(sides.values())
    names = list(dict.fromkeys(name for side in sides_in_order for name in side.terms_s))
    bars = [
        Bar(
            letter,
            [(TERM_NAMES.get(name, name), t) for name, t in side.terms_s.items() if t > 1e-3 * side.step_time_s],
            seconds(side.step_time_s),
        )
        for letter, side in sides.items()
    ]
    rows = [
        (TERM_NAMES.get(name, name), *(seconds(side.terms_s.get(name, 0.0)) for side in sides_in_order))
        for name in names
    ] + [("the step", *(seconds(side.step_time_s) for side in sides_in_order))]
    memory_terms = {letter: dict(side.memory_terms) for letter, side in sides.items()}
    usable = min(side.usable_bytes for side in sides_in_order)
    sections = [
        Section("What is compared", text=(*legend, *map(_rate, letters, sides_in_order))),
        Section("Time by term", columns=("", *letters), rows=rows, panels=(Bars("seconds", tuple(bars)),)),
        memory("Memory by part", memory_terms, ("usable", usable), "of the fullest rank"),
        Section(
            "Settings that differ",
            columns=("setting", *letters),
            rows=[(name, *values) for name, values in differing.items()],
            text=() if differing else ("None.",),
        ),
    ]
    return page(" against ".join(side.name for side in sides_in_order), "comparison", sections)


def _rate(letter: str, side: ComparedPlan) -> str:
    rate = side.tokens / side.step_time_s
    return f"{letter}: {rate:,.0f} tokens/s on {side.gpus:,} GPUs, a step of {seconds(side.step_time_s)}"
