"""Predicted and measured on this machine: the order of strategies (`truth`), what a slowed rank costs (`slowed`).

Rounds in which others had the machine's processors do not count; a case without enough quiet rounds is not judged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from benchmarks.result import Result
from phalanx.measure.steal_time import NOTABLE_SHARE

DENSE, EXPERTS = "examples/quickstart.toml", "examples/experts.toml"
TRUTH = {
    (DENSE, 1): ("micro_batch=16", "micro_batch=4", "micro_batch=1", "micro_batch=4,recompute=full"),
    (DENSE, 2): (
        *("dp=2", "dp=2,micro_batch=8", "dp=2,zero=2,grad_sync=micro", "dp=2,zero=3", "dp=2,recompute=full"),
        *("tp=2", "tp=2,sp=1", "tp=2,micro_batch=8", "cp=2", "cp=2,micro_batch=8"),
        *("pp=2", "pp=2,micro_batch=4", "pp=2,schedule=naive,micro_batch=4", "pp=2,schedule=gpipe,micro_batch=2"),
    ),
    (DENSE, 4): (
        *("dp=4", "dp=4,micro_batch=4", "dp=4,zero=3", "dp=4,zero=3,shard=2", "dp=2,tp=2", "dp=2,pp=2", "dp=2,cp=2"),
        *("tp=2,pp=2", "pp=4", "pp=4,micro_batch=4", "dp=2,pp=2,schedule=interleaved,virtual=2", "cp=2,tp=2"),
    ),
    (EXPERTS, 4): ("dp=4", "dp=4,ep=2", "dp=4,ep=4", "dp=2,ep=2,pp=2"),
}
"""Strategies of a job on 1, 2 and 4 ranks: every family, the slowest at least 30 % slower than the fastest."""
SLOWED = {
    "dp=2": (1, 1.5),
    "dp=2,zero=3": (1, 1.5),
    "tp=2": (0, 1.5),
    "pp=2,micro_batch=2": (0, 1.5),
    "pp=2,micro_batch=2,recompute=full": (1, 1.5),
}
"""The rank that is slowed, and by how much."""
_QUIET = 4
Run = Callable[..., Any]
"""Starts benchmarks.strategies on a number of ranks: (name, ranks, **arguments)."""


def quiet(case: dict[str, Any]) -> float | None:
    """Return the median seconds of a case's quiet rounds; None if they are too few."""
    rounds = [s for s, stolen in zip(case["seconds"], case["stolen"], strict=True) if stolen < NOTABLE_SHARE]
    return median(rounds) if len(rounds) >= _QUIET else None


def _load() -> Result:
    """Return how busy the machine was at the start: figures of a busy one say nothing."""
    busy = os.getloadavg()[0]
    return Result("load average before", f"{busy:.1f}", "at most 1, else all below is of a busy machine", busy <= 1)


def truth(run: Run, measure: Callable[[], object] = lambda: None) -> Iterator[Result]:
    """Train small jobs under every family of strategies: rank correlation, regret and error of the predictions.
    `measure`: measures the machine."""
    yield _load()
    measure()
    predicted, measured, regrets = list[float](), list[float](), list[float]()
    for (job, ranks), lines in TRUTH.items():
        figures = run("strategies", ranks, job=job, most=4, cases={line: [line, []] for line in lines})
        known = {line: seconds for line, case in figures.items() if (seconds := quiet(case)) is not None}
        if len(known) < len(lines):
            yield Result(f"{job} on {ranks} ranks", f"{len(known)} of {len(lines)} had quiet rounds", "all", False)
        if not known:
            continue
        for line, seconds in sorted(known.items(), key=lambda item: item[1]):
            expected = figures[line]["predicted"]
            shown = f"measured {seconds * 1e3:.1f} ms, predicted {expected * 1e3:.1f}, {expected / seconds - 1:+.0%}"
            yield Result(f"  {ranks} ranks, {line}", shown)
        best, chosen = min(known.values()), min(known, key=lambda line: figures[line]["predicted"])
        regrets.append(known[chosen] / best - 1)
        spread = max(known.values()) / best - 1
        shown = f"slowest {spread:+.0%}; chosen {chosen}, {regrets[-1]:+.1%}"
        yield Result(f"regret, {job} on {ranks} ranks", shown, "5 %", regrets[-1] <= 0.05 and spread >= 0.3)
        predicted += [figures[line]["predicted"] for line in known]
        measured += list(known.values())
    if len(measured) > 1:
        order = rank_correlation(np.array(predicted), np.array(measured))
        yield Result(f"rank correlation of {len(measured)} strategies", f"{order:.3f}", "at least 0.9", order >= 0.9)
        errors = np.abs(np.array(predicted) / np.array(measured) - 1)
        middle = float(np.median(errors))
        yield Result("median error", f"{middle:.1%} (at most {errors.max():.0%})", "10 %", middle <= 0.1)


def slowed(run: Run, measure: Callable[[], object] = lambda: None) -> Iterator[Result]:
    """Slow one of two ranks and compare how much longer the step takes with `phalanx simulate`. `measure`: measures
    the machine."""
    yield _load()
    measure()
    cases = {line: [line, []] for line in SLOWED} | {f"{line}, slowed": [line, how] for line, how in SLOWED.items()}
    figures = run("strategies", 2, job=DENSE, most=2, cases=cases)
    for line, (rank, factor) in SLOWED.items():
        plain, slow = figures[line], figures[f"{line}, slowed"]
        name = f"{line}, rank {rank} takes {factor} times as long"
        both = quiet(plain), quiet(slow)
        if both[0] is None or both[1] is None:
            yield Result(name, "too few quiet rounds", "10 %", False)
            continue
        measured, predicted = both[1] / both[0], slow["predicted"] / plain["predicted"]
        shown = f"{measured:.3f} times as long, predicted {predicted:.3f}, {predicted / measured - 1:+.1%}"
        yield Result(name, shown, "10 %", abs(predicted / measured - 1) <= 0.1)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation of two columns without ties."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])
