"""What to change in a configuration: settings with what each brings."""

from __future__ import annotations

from phalanx.answers.improve import Improvement, PricedState
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.predict import heading
from phalanx.report.style import seconds, size
from phalanx.report.view import View

_LONG = 40
_LEGEND = "alone: the file with this change only; together: with all changes above; phalanx export writes the whole"


def view(x: Improvement) -> View:
    """Show the configuration's price, the better one's, and each change alone and together with those above it."""
    lines = [heading(x.question), state("now", x.now)]
    if x.refused:
        lines.append(f"{x.question.stack} refuses it: {x.refused}")
    if x.better is None:
        count = f"{x.strategies_evaluated:,} strategies of {x.question.stack}"
        return View((*lines, f"nothing to change: none of {count} is faster by 0.2 % or more"))
    lines.append(state("better", x.better))
    reasons = [f"{n} alone: {c.alone_refused}" for n, c in enumerate(x.changes, 1) if c.alone is None]
    return View([*lines, _changes(x), *reasons, _LEGEND])


def state(title: str, s: PricedState) -> str:
    """Say what a step takes."""
    room = "" if s.fits else ", which does not fit"
    figures = f"{seconds(s.step_time_s)} a step, MFU {s.mfu:.1%}, {size(s.memory_bytes)} a GPU{room}"
    return f"{title}: {s.strategy}: {figures}"


def _changes(x: Improvement) -> Sheet:
    """Tabulate settings, old and new, with what each change brings to step and memory."""
    rows = []
    for number, c in enumerate(x.changes, 1):
        alone = _difference(x.now, c.alone) if c.alone is not None else "not alone"
        settings = [(e.key, e.old, e.new) for e in c.settings] or [(n, *values) for n, values in c.fields.items()]
        for place, (key, old, new) in enumerate(settings):
            effect = (alone, _difference(x.now, c.together)) if place == 0 else ("", "")
            first = str(number) if place == 0 else ""
            rows.append((first, key, _short(old) or "not set", _short(new) or "leave out", *effect))
    return Sheet("what to change", columns("", "setting", "now", "better", "alone", "together"), rows, keys=2)


def _short(text: str) -> str:
    return text if len(text) <= _LONG else text[: _LONG - 3] + "..."


def _difference(now: PricedState, s: PricedState) -> str:
    """Write the change in step and memory."""
    more = s.memory_bytes - now.memory_bytes
    sign = "-" if more < 0 else "+"
    room = "" if s.fits else "\ndoes not fit"
    return f"{s.step_time_s / now.step_time_s - 1:+.1%}\n{sign}{size(abs(more))}{room}"
