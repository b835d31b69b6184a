"""The view of a training with its failures, and of the scores of such predictions."""

from collections.abc import Iterator

from phalanx.planning.budget import short_number
from phalanx.planning.tables.table import Sheet, columns
from phalanx.reliability.answer import Goodput
from phalanx.reliability.conditions import SHARED_SAVES
from phalanx.reliability.scored import GoodputScores, ScoredFigure
from phalanx.report.expense import carbon, energy, number
from phalanx.report.predict import heading
from phalanx.report.style import count_words, seconds, size
from phalanx.report.view import View

_WORDS = {
    "useful": "work",
    "saving": "stopped by saves",
    "lost": "work done again",
    "detection": "until a failure is known",
    "restart": "restarting and loading",
    "waiting": "waiting for a node",
    "planned": "stops for maintenance",
}


def long(value: float) -> str:
    """Write a duration in s, min, h or d."""
    for unit, scale in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * scale:
            return f"{value / scale:.1f} {unit}" if value < 1e15 else "never"
    return seconds(value)


def view(a: Goodput) -> View:
    """Show the answer: figures, where the time goes, intervals, spares, what helps, and what was taken."""
    q = a.question
    title = f"{q.about} on {q.gpus:,} GPUs of {q.cluster}: {q.strategy}"
    parts: list[str | Sheet] = [
        heading(q),
        Sheet(title, columns("", "value", "how it came about"), list(_figures(a))),
    ]
    times = [(_WORDS[name], value) for name, value in a.shares.items() if value > 5e-5]
    parts += [
        Sheet("where the time goes", columns("", "of the time [share]"), times, bars=True),
        Sheet(
            "saving at other intervals, by the closed form",
            columns("work between saves", "effective [share]", "loses [share]"),
            [(long(i.interval_s), i.effective_share, i.loss) for i in a.intervals],
        ),
        Sheet(
            "spare nodes, by the closed form",
            columns("spares [count]", "effective [share]", "GPU-hours paid per one of work [number]"),
            [(s.spares, s.effective_share, s.gpu_hours_per_useful) for s in a.spare_losses],
        ),
        Sheet(
            "what would help most, each alone",
            columns("change", "effective [share]", "faster [share]"),
            [(h.change, h.effective_share, h.gain) for h in a.helps],
        ),
        Sheet(
            "not given, and taken from",
            columns("what", "value", "source"),
            [(t.what, t.value, t.source) for t in (*a.taken, *a.rates.taken)],
        ),
    ]
    return View([part for part in parts if isinstance(part, str) or part.rows])


def _figures(a: Goodput) -> Iterator[tuple[str, str, str]]:
    ends = f"{a.effective_low_share:.1%} to {a.effective_high_share:.1%} in four of five of {a.trials:,} trials"
    ends += _skew(a.effective_low_share, a.effective_share, a.effective_high_share)
    yield "effective time", f"{a.effective_share:.1%}", f"{ends}; closed form {a.effective_closed_form_share:.1%}"
    young, daly, recovery = map(long, (a.young_interval_s, a.daly_interval_s, a.recovery_interval_s))
    forms = f"Young {young}, Daly {daly}, with recovery {recovery}"
    forms += ", of saves that no failure takes" if any(t.what == SHARED_SAVES for t in a.taken) else ""
    best = "the best, as none is given" if any(t.what == "interval" for t in a.taken) else "the best"
    loss = f"loses {a.interval_loss:.2%} against {long(a.best_interval_s)}" if a.interval_loss > 1e-6 else best
    yield "work between saves", long(a.interval_s), f"{loss}; {forms}"
    digits = 1 if a.days >= 10 else 2
    skew = _skew(a.days_low, a.days, a.days_high)
    spread = f"{a.days_low:,.{digits}f} to {a.days_high:,.{digits}f}{skew}"
    spread = spread if skew or a.days_low != a.days_high else "as asked"
    yield "days", f"{a.days:,.{digits}f}", f"{spread}; {seconds(a.step_time_s)} a step without failures"
    ends = (
        f"{short_number(a.tokens_low)} to {short_number(a.tokens_high)}{_skew(a.tokens_low, a.tokens, a.tokens_high)}"
    )
    yield "tokens", short_number(a.tokens), f"{ends}; {short_number(a.tokens_per_day)} a day"
    yield "GPU-hours", f"{a.gpu_hours:,.0f}", f"{count_words(a.spares, 'spare node')} included"
    if a.expense.money is not None:
        yield "money", number(a.expense.money), f"at {a.rates.price:g} a GPU-hour"
    if a.expense.energy_kwh is not None:
        yield "energy", energy(a.expense), f"power drawn in training and idle, PUE {a.rates.pue:g}"
        yield "carbon", carbon(a.expense), f"at {a.rates.g_per_kwh:g} g a kWh"
    ends = f"{a.interruptions_low:,.0f} to {a.interruptions_high:,.0f}; one every {long(a.mttf_s)}"
    yield "unexpected failures", f"{a.interruptions:,.0f}", ends
    how = f"durable after {long(a.save_s)}, stops {long(a.stall_s)}, loads in {long(a.load_s)}"
    yield "a checkpoint", size(a.checkpoint_bytes), how


def _skew(low: float, mean: float, high: float) -> str:
    """Return the words for a mean outside the interval of four of five trials; "" if it is inside."""
    side = "below" if mean < low * (1 - 1e-9) else "above" if mean > high * (1 + 1e-9) else ""
    return f", and the mean {side} by a few trials" if side else ""


def scores(a: GoodputScores) -> View:
    """Show figures with their predictions, the pairs, and errors by quantity."""
    names = columns("row", "about", "quantity", "published [number]", "predicted [number]", "error", "taken, or why")
    rows = [(f.row, f.about, f.quantity, f.published, f.predicted, _error(f), f.why) for f in a.figures]
    pairs = [
        (
            p.slow,
            *(f"{x:.1%}" for x in (p.published[0], p.predicted[0])),
            p.fast,
            *(f"{x:.1%}" for x in (p.published[1], p.predicted[1])),
        )
        for p in a.pairs
    ]
    by = [
        (q, e["n"], e["bounds"], _share(e["median"]), _share(e["bias"]), e["within_25_percent"])
        for q, e in a.errors.items()
    ]
    sheets = [
        Sheet("published and predicted", names, rows, keys=3),
        Sheet(
            "one input changed: how a job restarts",
            columns("slower", "published", "predicted", "faster", "published ", "predicted "),
            pairs,
        ),
        Sheet(
            "errors by quantity",
            columns(
                "quantity",
                "figures [count]",
                "bounds [count]",
                "median error [share]",
                "mean error [change]",
                "within 25 % [count]",
            ),
            by,
        ),
        Sheet("rows without a figure that is predicted", columns("why", "rows [count]"), list(a.left_out.items())),
    ]
    return View([sheet for sheet in sheets if sheet.rows], "goodput")


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _error(f: ScoredFigure) -> str:
    if f.bound:
        return "holds" if not f.error else f"{100 * f.error:+.1f} points"
    return f"{100 * f.error:+.1f} points" if f.quantity in ("effective time", "uptime") else f"{f.error:+.0%}"
