"""Plans and strategies side by side: figures, time by term, memory by part, settings that differ; and the best
strategy of every stack.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.answers.compare import ComparedPlan, Comparison
from phalanx.answers.search.stack_comparison import StackComparison
from phalanx.cost.analytic.step import TERM_NAMES
from phalanx.planning.expense.rates import ExpenseRates
from phalanx.planning.tables.table import Column, Sheet, Unit, columns
from phalanx.report.expense import in_words, origins
from phalanx.report.html.page import Section, page, section
from phalanx.report.html.plan import memory
from phalanx.report.pictures.figure import Bar, Bars
from phalanx.report.style import seconds, size
from phalanx.report.view import View

_SMALL = 0.001
"""Terms below this share of every side are left out."""
LETTERS = "ABC"


def view(c: Comparison, expense: bool = False) -> View:
    """Show two or three sides; each difference is from the first. `expense`: whether the cost of tokens is shown."""
    closing = [] if c.settings_that_differ else ["no setting differs"]
    sheets = [_figures(c.sides), *_terms_of(c), *_settings(c)]
    costs = _expenses(c.sides) if expense else ()
    return View([*legend(c.sides), *_against_first(c.sides), *costs, *sheets, *closing], html=lambda: _page(c))


def _expenses(sides: Sequence[ComparedPlan]) -> Iterator[str | Sheet]:
    """Yield the cost of tokens on each side, and the sources of each chip's prices once."""
    shown: list[ExpenseRates] = []
    for letter, side in zip(LETTERS, sides, strict=False):
        if side.expense is not None and side.rates is not None:
            yield f"{letter}, {side.expense.of}: {in_words(side.expense, side.rates)}"
            if side.rates not in shown:
                shown.append(side.rates)
    yield from map(origins, shown)


def _terms_of(c: Comparison) -> Iterator[Sheet]:
    terms, times = [s.terms_s for s in c.sides], [s.step_time_s for s in c.sides]
    yield _terms("time by term, predicted", "s", terms, times, "step")
    terms, sizes = [s.memory_terms for s in c.sides], [s.memory_bytes for s in c.sides]
    note = "; ".join(f"{letter}: {s.state.line}" for letter, s in zip(LETTERS, c.sides, strict=False))
    yield replace(_terms("memory by part, predicted", "bytes", terms, sizes, "in all"), note=note)


def _settings(c: Comparison) -> Iterator[Sheet]:
    rows = [(name, *(v or "-" for v in values)) for name, values in c.settings_that_differ.items()]
    if rows:
        yield Sheet("settings that differ", columns("", *LETTERS[: len(c.sides)]), rows, charted=False)


def _against_first(sides: Sequence[ComparedPlan]) -> list[str]:
    """Return lines that say which sides do not fit, and how each side's step compares with the first's: as measured
    where both are runs that recorded their steps, else as predicted."""
    first, *others = sides
    over = [f"{letter}: {size(x.memory_bytes)}" for letter, x in zip(LETTERS, sides, strict=False) if not x.fits]
    lines = [f"does not fit in memory: {', '.join(over)}"] if over else []
    for letter, side in zip(LETTERS[1:], others, strict=False):
        how, old, new = "predicted", first.step_time_s, side.step_time_s
        if first.measured_step_s and side.measured_step_s:
            how, old, new = "measured", first.measured_step_s, side.measured_step_s
        line = f"{letter}, {how}: a step of {seconds(new)}, A's takes {seconds(old)}"
        if first.tokens == side.tokens and first.gpus == side.gpus:
            change = f"saves {1 - new / old:.1%}" if new < old else f"takes {new / old - 1:.1%} more"
            line += f": {letter} {change}"
        lines.append(line)
    return lines


def legend(sides: Sequence[ComparedPlan]) -> list[str]:
    """Return a line per side: its letter, name and stack."""
    return [f"{letter}: {side.name} ({side.stack})" for letter, side in zip(LETTERS, sides, strict=False)]


def _figures(sides: Sequence[ComparedPlan]) -> Sheet:
    rows: list[tuple[str, ...]] = [("GPUs", *(f"{s.gpus:,}" for s in sides))]
    for how, times in (
        ("measured", [s.measured_step_s for s in sides]),
        ("predicted", [s.step_time_s for s in sides]),
    ):
        if any(times):
            rates = [t and s.tokens / t for s, t in zip(sides, times, strict=True)]
            rows += [
                (f"step, {how}", *("-" if not t else seconds(t) for t in times)),
                (f"tokens/s, {how}", *("-" if not r else f"{r:,.0f}" for r in rates)),
                (
                    f"tokens/s per GPU, {how}",
                    *("-" if not r else f"{r / s.gpus:,.0f}" for s, r in zip(sides, rates, strict=True)),
                ),
            ]
    peaks = [s.measured_memory_bytes for s in sides]
    if any(peaks):
        rows.append(("memory, measured", *("-" if not p else size(p) for p in peaks)))
    rows.append(("fits", *("yes" if s.fits else "no" for s in sides)))
    return Sheet("figures", columns("", *LETTERS[: len(sides)]), rows, charted=False)


def _terms(title: str, unit: Unit, terms: Sequence[Mapping[str, float]], totals: Sequence[float], name: str) -> Sheet:
    """Tabulate the terms of all sides that are not small on each, with the differences from the first side."""
    letters = LETTERS[: len(terms)]
    signed: Unit = "signed_s" if unit == "s" else "signed_bytes"
    names = [Column(""), Column("A", unit)]
    for letter in letters[1:]:
        names += [Column(letter, unit), Column(f"{letter} - A", signed)]

    def row(label: str, values: Sequence[float]) -> tuple[Any, ...]:
        cells: list[Any] = [values[0]]
        for value in values[1:]:
            same = abs(value - values[0]) <= 1e-9 * max(value, values[0])
            cells += [value, None if same else value - values[0]]
        return (label, *cells)

    rows = []
    for term in dict.fromkeys(t for side in terms for t in side):
        values = [side.get(term, 0.0) for side in terms]
        if any(v > _SMALL * total for v, total in zip(values, totals, strict=True)):
            rows.append(row(term, values))
    return Sheet(title, tuple(names), [*rows, row(name, totals)], charted=False)


def _page(c: Comparison) -> str:
    """Return the page of two or three sides, by letter, and the settings that differ between them."""
    sides = dict(zip(LETTERS, c.sides, strict=False))
    bars = []
    for letter, s in sides.items():
        parts = [(TERM_NAMES.get(name, name), t) for name, t in s.terms_s.items() if t > 1e-3 * s.step_time_s]
        bars.append(Bar(letter, parts, seconds(s.step_time_s)))
    usable = min(s.usable_bytes for s in c.sides)
    times, bytes_ = _terms_of(c)
    note = f"predicted, of the fullest rank; {bytes_.note}"
    memory_parts = {letter: dict(s.memory_terms) for letter, s in sides.items()}
    sections = [
        Section("What is compared", text=(*legend(c.sides), *map(_rate, sides, c.sides), *_against_first(c.sides))),
        section(times, Bars("seconds", tuple(bars))),
        memory("Memory by part", memory_parts, ("usable", usable), note),
        *map(section, _settings(c)),
    ]
    return page(" against ".join(s.name for s in c.sides), "comparison", sections)


def _rate(letter: str, side: ComparedPlan) -> str:
    how = "measured" if side.measured_step_s else "predicted"
    step_s = side.measured_step_s or side.step_time_s
    rate = side.tokens / step_s
    return f"{letter}, {how}: {rate:,.0f} tokens/s on {side.gpus:,} GPUs, a step of {seconds(step_s)}"


def stacks(c: StackComparison) -> View:
    """Show the best strategy of each stack, its step time, and how much longer that is than the fastest's."""
    least = c.stacks[0].step_time_s or 1.0
    rows = []
    for s in c.stacks:
        over = None if s.step_time_s is None or s.step_time_s <= least else s.step_time_s / least - 1
        rows.append((s.stack, s.strategy or s.reason, s.step_time_s, over, s.mfu, s.memory_bytes))
    names = columns("stack | strategy [strategy] | step [s] | over the best [change] | MFU [share] | memory [bytes]")
    note = "each by its own constants; phalanx plan --stack NAME has the rest"
    return View([Sheet("stacks", names, rows, note)])
