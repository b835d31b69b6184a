"""Pipeline schedules as a step meets them: their bubble against that of 1f1b, and the activations that ranks hold.

The schedules themselves stand in schedule/pipeline.py. Columns of strategies take formulas for equal chunks; one
strategy whose schedule runs gradients of inputs and of weights apart is run action by action. Once it is filled a
pipeline repeats itself, so of many micro-batches a few rounds are run, and the rest is added at the pace of the
slowest rank.
"""

from __future__ import annotations

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.pipeline_time import Costs
from phalanx.schedule.pipeline.schedules import SCHEDULES, V_SHAPED, build
from phalanx.schedule.pipeline.simulate import run

NAMES = tuple(SCHEDULES)
"""A column's number of a schedule is its place here."""

ROUNDS = 3
"""Micro-batches per rank that are run: by then every schedule here repeats itself."""

# Where F, I and W take the same time.
_BUBBLE = {"zb-h1": 1 / 3, "zb-v": 1 / 3, "dualpipe-v": 1 / 3}


def chunks_per_rank(schedule: Column, virtual: Column) -> Column:
    """2 where they lie in a V."""
    return np.where(np.isin(schedule, [NAMES.index(name) for name in V_SHAPED]), 2.0, virtual)


def bubble(schedule: Column, m: Column, p: Column, v: Column) -> Column:
    """Of equal chunks, over that of 1f1b with as many per rank: m micro-batches, p ranks, v chunks each. naive:
    nobody else works while one does. interleaved with fewer micro-batches than ranks: a rank waits for the first of
    them to come round before each of its chunks."""
    factor = np.where(schedule == NAMES.index("naive"), m, 1.0)
    short = (schedule == NAMES.index("interleaved")) & (m < p)
    factor = np.where(short, (v * (p - m) + m - 1) / np.maximum(p - 1, 1), factor)
    for name, share in _BUBBLE.items():
        factor = np.where(schedule == NAMES.index(name), share, factor)
    return factor


def in_flight(schedule: Column, m: Column, p: Column) -> tuple[Column, Column]:
    """Micro-batches whose activations the first and the last pipeline rank hold at once; 0 where 1f1b's formula says
    so. Where chunks lie in a V, the first rank is the last one too."""
    at_once = np.minimum(p, m)
    by_name: dict[str, tuple[Column, Column]] = {
        "naive": (1.0, 1.0),
        "gpipe": (m, m),
        "zb-h1": (at_once, at_once),
        "zb-v": (at_once, at_once),
    }
    by_name["dualpipe-v"] = (np.minimum(p + 0.5, m),) * 2
    first: Column = np.zeros_like(at_once, dtype=float)
    last: Column = np.ones_like(at_once, dtype=float)
    for name, (of_first, of_last) in by_name.items():
        own = (schedule == NAMES.index(name)) & (p > 1)
        first, last = np.where(own, of_first, first), np.where(own, of_last, last)
    return first, last


def makespan(name: str, ranks: int, m: int, virtual: int, costs: Costs, slowest: float) -> float:
    """Seconds of a pipeline as it runs, with these costs of its chunks; `slowest`: of a micro-batch on the slowest
    rank."""
    few = min(m, ROUNDS * ranks)
    # Of naive, a micro-batch goes all the way before the next one starts.
    pace = sum(costs.forward) + sum(costs.input_grad) + sum(costs.weight_grad) if name == "naive" else slowest
    whole = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
    seconds = {"F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad, "B": whole}
    times = run(build(name, ranks, few, virtual if virtual > 1 else None), seconds, costs.transfer)
    return max(own[-1][1] for own in times) + (m - few) * pace
