"""Pipeline schedules in the price of a step: their bubble relative to 1f1b, and the activations that ranks hold. Each
schedule's formulas, for equal chunks, are in its row of schedule/pipeline/schedules.py; here they are evaluated on
columns of strategies. One strategy whose schedule splits the backward pass is run action by action: once it is filled
a pipeline repeats itself, so of many micro-batches a few rounds are run, and the rest is added at the pace of the
slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from phalanx.cost.hardware.columns import Column
from phalanx.cost.pipeline_time import Costs
from phalanx.schedule.pipeline.rounds import KINDS, rounds
from phalanx.schedule.pipeline.schedules import SCHEDULES
from phalanx.spec.strategy.spec import Strategy

NAMES = tuple(SCHEDULES)
"""Schedules by their number in columns."""

_V_SHAPED = np.array([float(facts.v_shaped) for facts in SCHEDULES.values()])
_SPLITS = np.array([float(facts.split_backward) for facts in SCHEDULES.values()])
ROUNDS = 3
"""Micro-batches per rank to simulate: by then every schedule repeats itself."""


def v_shaped(schedule: Column) -> Column:
    """Return the mask of rows whose chunks lie in a V."""
    return _V_SHAPED[np.asarray(schedule, dtype=int)]


def splits(schedule: Column) -> Column:
    """Return the mask of rows whose backward passes are split in two."""
    return _SPLITS[np.asarray(schedule, dtype=int)]


def chunks_per_rank(schedule: Column, virtual: Column) -> Column:
    """Return the chunks per rank: 2 where they lie in a V."""
    return np.where(v_shaped(schedule) > 0, 2.0, virtual)


def by_schedule(schedule: Column, fact: Literal["bubble", "least_wait"], m: Column, p: Column, v: Column) -> Column:
    """Evaluate a formula of the table on columns, each row by its schedule: m micro-batches, p ranks, v chunks."""
    usual = getattr(SCHEDULES[Strategy.schedule], fact)
    column: Column = np.asarray(usual(m, p, v), dtype=float)
    for number, facts in enumerate(SCHEDULES.values()):
        formula = getattr(facts, fact)
        if formula is not usual:  # whose values are in the column already
            column = np.where(schedule == number, formula(m, p, v), column)
    return column


def bubble(schedule: Column, m: Column, p: Column, v: Column) -> Column:
    """Return the bubble with equal chunks over the bubble of 1f1b with equally many per rank: m micro-batches, p
    ranks, v chunks each."""
    return by_schedule(schedule, "bubble", m, p, v)


def in_flight(schedule: Column, m: Column, p: Column) -> tuple[Column, Column]:
    """Return the micro-batches whose activations the first and the last pipeline rank hold at once; 0 means 1f1b's
    formula."""
    usual = SCHEDULES[Strategy.schedule].in_flight
    first, last = (np.full(np.shape(np.minimum(p, m)), of_rank) for of_rank in usual(m, p))
    for number, facts in enumerate(SCHEDULES.values()):
        if facts.in_flight is usual:
            continue
        own = (schedule == number) & (p > 1)
        if not np.any(own):
            continue
        of_first, of_last = facts.in_flight(m, p)
        first, last = np.where(own, of_first, first), np.where(own, of_last, last)
    return first, last


def makespan(name: str, ranks: int, m: int, virtual: int, costs: Costs, slowest: float) -> float:
    """Return the seconds of a simulated pipeline with these costs of its chunks; `slowest`: of a micro-batch on the
    slowest rank."""
    return makespans(name, ranks, virtual, [m], [costs], [slowest])[0]


def makespans(
    name: str, ranks: int, virtual: int, m: Sequence[int], costs: Sequence[Costs], slowest: Sequence[float]
) -> list[float]:
    """Return the seconds of pipelines that differ in their micro-batches and their chunks' costs; those with equal
    actions run together."""
    seconds = [0.0] * len(m)
    few = [min(n, ROUNDS * ranks) for n in m]
    for count in sorted(set(few)):
        alike = [i for i, n in enumerate(few) if n == count]
        ended = rounds(name, ranks, count, virtual if virtual > 1 else None).makespans(
            np.stack([_actions(costs[i]) for i in alike], axis=-1), np.array([costs[i].transfer for i in alike])
        )
        for i, end in zip(alike, ended.tolist(), strict=True):
            c = costs[i]
            # Without overlap a micro-batch goes all the way before the next one starts.
            through = sum(c.forward) + sum(c.input_grad) + sum(c.weight_grad)
            pace = slowest[i] if SCHEDULES[name].overlaps else through
            seconds[i] = end + (m[i] - count) * pace
    return seconds


def _actions(costs: Costs) -> npt.NDArray[np.float64]:
    """Return the seconds of each action of a chunk, (kinds, chunks)."""
    of_kind = {"F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad}
    of_kind["B"] = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
    return np.array([of_kind[kind] for kind in KINDS], dtype=float)
