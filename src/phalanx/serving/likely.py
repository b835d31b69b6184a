"""Likely ranges of the predicted figures of serving, by the errors of predictions of published runs.

The ranges are quantiles of slowness, by engine and kind of load, written by `python -m calibration.serving --likely`:
of benchmarks (validation/bursts.py), by whether all requests come at once, the concurrent ones are limited, or they
come at a rate; of closed loops (validation/predictions.py), by mode.

Slowness is the factor on all predicted times of an engine with which its prediction meets what was measured. Where
requests come by themselves, at r a second, a figure X of an engine f times as slow is f X(f r): the same queue, seen
f times as slowly. So near capacity a small error of a step becomes a large one of the queue. Elsewhere it is f X, and
slowness is measured / predicted.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from phalanx.cost.analytic.chips import chip_name
from phalanx.serving.search.question import ServingCandidate, ServingQuestion
from phalanx.serving.search.queued import CopyOf, with_outcome
from phalanx.serving.simulation.outcome import ServingOutcome
from phalanx.validate.intervals import SHARE

FILE = Path(__file__).with_name("likely.json")
BURST, CAPPED = "all at once", "a number at once"
ARRIVAL_RATE = "at a rate"
MEASURED = frozenset(("A100", "H100", "H200", "B200", "GB200", "GB300", "RTX-PRO-6000", "GB10"))
"""Chips of the published runs."""
_KEPT_UP = 0.95
"""Share of arriving requests above which a deployment answers them without a growing queue."""
Slowed = Callable[[float], Mapping[str, float]]
"""Factor on all times of an engine -> figure -> seconds, infinite where the queue grows without end."""


@dataclass(frozen=True)
class LikelyRange:
    """The range in which a measured figure lies with the probability `SHARE`, as in published runs of its kind."""

    figure: str
    """makespan_s, ttft_s, tpot_s or tokens_per_s; TTFT and TPOT are medians, but means in endless closed loops."""
    low: float
    high: float | None
    """None: without bound."""
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


def _unlike(q: ServingQuestion, c: ServingCandidate) -> str:
    """Return the part of a question or its candidate that no published run of its kind has; empty: none."""
    parts = {
        "a number of requests for workers that prefill and decode apart": has_medians(q) and len(c.groups) > 1,
        "a trace": q.trace is not None,
        "drafted tokens": q.draft_tokens > 0,
        "adapters": q.adapters > 0,
        "prompts in its cache": q.reuse > 0,
    }
    return next((part for part, present in parts.items() if present), "")


def kind_of(q: ServingQuestion, c: ServingCandidate) -> str | None:
    """Return the engine and kind of load, the key of a table of ranges; None: no published run is of this kind."""
    o = c.outcome
    if _unlike(q, c) or o is None:
        return None
    if not has_medians(q):
        return f"{q.engine.name}, {'disaggregated' if len(c.groups) > 1 else 'aggregated'}"
    # At a rate above what the concurrent ones allow, their number is what limits.
    full = o.makespan_s is not None and q.rate * o.makespan_s > o.requests / _KEPT_UP
    limited = 0 < q.concurrency < q.requests and (full or not q.rate)
    return f"{q.engine.name}, {CAPPED if limited else ARRIVAL_RATE if q.rate else BURST}"


def slowed(q: ServingQuestion, c: ServingCandidate, copy_of: CopyOf) -> Slowed:
    """Return the figures of a simulated candidate as a function of its slowness."""
    assert c.outcome is not None
    predicted = figures(c.outcome, has_medians(q))

    @cache
    def of(factor: float) -> Mapping[str, float]:
        if not q.rate or factor == 1:
            return {figure: factor * seconds for figure, seconds in predicted.items()}
        o = with_outcome(replace(q, rate=factor * q.rate), replace(c, outcome=None), copy_of).outcome
        assert o is not None
        result = {figure: factor * seconds for figure, seconds in figures(o).items()}
        if q.sustained and o.requests_per_s < _KEPT_UP * factor * q.rate:
            result["ttft_s"] = math.inf
        return result

    return of


_OCTAVE = 4
"""Factors at which `slowness` simulates, in an octave."""
_WIDEST = 12


def slowness(of: Slowed, figure: str, measured: float) -> float:
    """Return the factor on all times of an engine with which its prediction of a figure is the measured one, between
    1/8 and 8; between simulated factors, by interpolation of logarithms."""

    def ratio(step: int) -> float:
        return math.log(of(2 ** (step / _OCTAVE))[figure] / measured)

    step = 0
    while ratio(step) > 0 and step > -_WIDEST:
        step -= 1
    while ratio(step + 1) < 0 and step + 1 < _WIDEST:
        step += 1
    low, high = ratio(step), ratio(step + 1)
    return 2 ** ((step - low / (high - low) if high > low else step) / _OCTAVE)


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    table: dict[str, dict[str, dict[str, float]]] = json.loads(FILE.read_text())
    return table


def likely(q: ServingQuestion, c: ServingCandidate, of: Slowed) -> tuple[tuple[LikelyRange, ...], str]:
    """Return the ranges of a candidate's figures, and the runs behind them, or why there are no ranges. `of`: its
    figures by slowness."""
    kind = kind_of(q, c)
    if kind is None or c.outcome is None:
        return (), f"missing: no published run has {_unlike(q, c)}"
    known, ranges = _table().get(kind, {}), []
    for figure in (f for f in figures(c.outcome, has_medians(q)) if f in known):
        counts = int(known[figure]["runs"]), int(known[figure]["families"])
        low, high = (of(known[figure][end])[figure] for end in ("low", "high"))
        ranges.append(LikelyRange(figure, low, high if math.isfinite(high) else None, *counts))
        if figure == "makespan_s":
            tokens = c.outcome.tokens_per_s * figures(c.outcome)[figure]
            ranges.append(LikelyRange("tokens_per_s", tokens / high, tokens / low, *counts))
    if not ranges:
        return (), f"missing: too few runs are published of {kind}"
    chip = chip_name(q.cluster.device.name)
    other = "" if chip in MEASURED else f", none of them on {chip},"
    return tuple(ranges), f"{SHARE:.0%} of {max(r.runs for r in ranges):,} published runs ({kind}){other}"


def capacity_range(q: ServingQuestion, requests_per_s: float) -> tuple[float, float]:
    """Return the likely range of a predicted capacity: slowness of its engine in bursts, which are as long as it
    takes to answer them."""
    known = _table()[f"{q.engine.name}, {BURST}"]["makespan_s"]
    return requests_per_s / known["high"], requests_per_s / known["low"]


def edge(q: ServingQuestion, requests_per_s: float) -> list[str]:
    """Return what is uncertain where requests come at a rate within the likely range of the predicted capacity."""
    low, high = capacity_range(q, requests_per_s)
    if not low < q.offered < high:
        return []
    share = f"{q.offered / requests_per_s:.0%} of the {requests_per_s:,.3g} that can be answered"
    where = f"{q.offered:,.3g} requests/s are {share}, likely {low:,.3g} to {high:,.3g}"
    return [f"uncertain: {where}: with less, the queue and the time to the first token grow as long as requests come"]


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
            end = "without bound" if r.high is None else f"to {time(r.high)}"
            parts.append(f"{statistic}{_WORDS[r.figure]} {time(r.low)} {end}")
    return f"likely: {', '.join(parts)}, as {basis} lay"
