"""Likely ranges of the predicted figures of serving, by the errors of predictions of published runs.

The ranges are quantiles of measured / predicted, by engine and kind of load, written by
`python -m calibration.serving --likely`: of benchmarks (validation/bursts.py), by whether all requests come at once,
the concurrent ones are limited, or they come at a rate that the engine keeps up with or not; of closed loops
(validation/predictions.py), by mode.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from phalanx.serving.search.question import ServingCandidate, ServingQuestion
from phalanx.serving.simulation.outcome import ServingOutcome
from phalanx.validate.intervals import SHARE

FILE = Path(__file__).with_name("likely.json")
AT_ONCE, LIMITED = "all at once", "a number at once"
KEPT_UP, OUTRUN = "at a rate", "faster than answered"
_KEPT_UP = 0.95
"""Share of arriving requests above which a deployment answers them without a growing queue."""


@dataclass(frozen=True)
class LikelyRange:
    """The range in which a measured figure lies with the probability `SHARE`, as in published runs of its kind."""

    figure: str
    """makespan_s, ttft_s, tpot_s or tokens_per_s; TTFT and TPOT are medians, but means in endless closed loops."""
    low: float
    high: float
    runs: int
    families: int
    """Number of families of runs, by model, GPU and source."""


def figures(o: ServingOutcome, medians: bool = True) -> dict[str, float]:
    """Return the predicted figures that published runs have: `medians`, with the makespan of a benchmark; or means,
    as in closed loops."""
    if not medians:
        return {"ttft_s": o.ttft.mean, "tpot_s": o.tpot.mean}
    whole = {} if o.makespan_s is None else {"makespan_s": o.makespan_s}
    return whole | {"ttft_s": o.ttft.p50, "tpot_s": o.tpot.p50}


def has_medians(q: ServingQuestion) -> bool:
    """Whether published runs of a question's load have medians: of all but closed loops without end."""
    return q.finite or q.open_load


def _unlike(q: ServingQuestion) -> str:
    """Return the part of a question's load that no published run has; empty: none."""
    parts = {
        "a trace": q.trace is not None,
        "drafted tokens": q.draft_tokens > 0,
        "adapters": q.adapters > 0,
        "prompts in its cache": q.reuse > 0,
    }
    return next((part for part, present in parts.items() if present), "")


def kind_of(q: ServingQuestion, c: ServingCandidate) -> str | None:
    """Return the engine and kind of load, the key of a table of ranges; None: no published run is of this kind."""
    o = c.outcome
    if _unlike(q) or o is None:
        return None
    if q.finite:
        grows = o.makespan_s is not None and q.rate * o.makespan_s > o.requests / _KEPT_UP
        limited = LIMITED if 0 < q.concurrency < q.requests else OUTRUN if q.rate else AT_ONCE
        return f"{q.engine.name}, {KEPT_UP if q.rate and not grows else limited}"
    if q.open_load:
        return f"{q.engine.name}, {KEPT_UP if o.requests_per_s > _KEPT_UP * q.rate else OUTRUN}"
    return f"{q.engine.name}, {'disaggregated' if len(c.groups) > 1 else 'aggregated'}"


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    table: dict[str, dict[str, dict[str, float]]] = json.loads(FILE.read_text())
    return table


def likely(q: ServingQuestion, c: ServingCandidate) -> tuple[tuple[LikelyRange, ...], str]:
    """Return the ranges of a candidate's figures, and the runs behind them, or why there are no ranges."""
    kind = kind_of(q, c)
    if kind is None or c.outcome is None:
        return (), f"missing: no published run has {_unlike(q)}"
    known = _table().get(kind, {})
    predicted, ranges = figures(c.outcome, has_medians(q)), []
    for figure in (f for f in predicted if f in known):
        counts = int(known[figure]["runs"]), int(known[figure]["families"])
        low, high = known[figure]["low"], known[figure]["high"]
        ranges.append(LikelyRange(figure, predicted[figure] * low, predicted[figure] * high, *counts))
        if figure == "makespan_s":
            rate = c.outcome.tokens_per_s
            ranges.append(LikelyRange("tokens_per_s", rate / high, rate / low, *counts))
    if not ranges:
        return (), f"missing: too few runs are published of {kind}"
    return tuple(ranges), f"{SHARE:.0%} of {max(r.runs for r in ranges):,} published runs ({kind})"


_WORDS = {"makespan_s": "makespan", "ttft_s": "TTFT", "tpot_s": "TPOT"}


def words(ranges: tuple[LikelyRange, ...], basis: str, medians: bool, time: Callable[[float], str]) -> str:
    """Return a sentence on the ranges; `time` formats seconds."""
    if not ranges:
        return f"how far off these figures may be is {basis}"
    parts = []
    for r in ranges:
        if r.figure == "tokens_per_s":
            parts.append(f"{r.low:,.0f} to {r.high:,.0f} tokens/s")
        else:
            statistic = "" if r.figure == "makespan_s" else "median " if medians else "mean "
            parts.append(f"{statistic}{_WORDS[r.figure]} {time(r.low)} to {time(r.high)}")
    return f"likely: {', '.join(parts)}, as {basis} lay"
