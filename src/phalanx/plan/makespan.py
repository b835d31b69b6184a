"""The second pass of a search: a candidate's pipeline as it really runs, cut and timed action by action.

The first pass prices bubbles by a formula for equal chunks. Here the blocks are cut into chunks
(schedule/partition.py), every action of the schedule has its chunk's seconds, and the makespan is that of running it
(cost/pipeline.py). Once it is filled a pipeline repeats itself, so of many micro-batches a few rounds are run, and
the rest is added at the pace of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phalanx.cost.pipeline import Costs, price
from phalanx.cost.stack.columns import Column
from phalanx.cost.stack.step import Step
from phalanx.plan.pricing import Pricing
from phalanx.plan.space import of
from phalanx.schedule import stages
from phalanx.schedule.partition import Units, explain, partition
from phalanx.schedule.pipeline import build
from phalanx.spec.strategy import Strategy

_ROUNDS = 4
"""Micro-batches per rank that are run: by then every schedule here repeats itself."""


_PIPELINED = ("matmul", "attention", "memory", "tp", "cp", "ep", "recompute", "launch", "head", "bubble")
"""The terms of a step that a pipeline's makespan stands for."""


@dataclass(frozen=True)
class Run:
    """`blocks` of each chunk; `imbalance`: of the slowest rank over the mean, as a share of it; `bubble`: seconds in
    which the slowest rank waits."""

    makespan: float
    blocks: tuple[int, ...]
    imbalance: float
    bubble: float

    def seconds(self, terms: Mapping[str, float]) -> float:
        """Of a step with these terms, its pipeline as it runs."""
        return self.makespan + sum(value for name, value in terms.items() if name not in _PIPELINED)


def run(pricing: Pricing, s: Strategy) -> Run:
    """The pipeline of one strategy; of one rank its work."""
    step = pricing.step(of([s]))
    if s.pp == 1:
        work = sum(number(step.terms[name]) for name in _PIPELINED)
        return Run(work, (pricing.model.layers,), 0.0, 0.0)
    passes, head = _passes(pricing, step)
    whole = Units(0.0, tuple(f + b for f, b in passes), sum(head))
    ranks = stages.rank_of(s)
    blocks = partition(whole, ranks).blocks
    found = explain(whole, ranks, blocks)
    slowest = max(share.seconds for share in found.ranks)
    m = s.accumulation(pricing.job)
    makespan = _makespan(s, m, _costs(passes, head, blocks), slowest)
    return Run(makespan, blocks, found.imbalance, makespan - m * slowest)


def number(value: Column) -> float:
    """The only row of a column."""
    return float(np.asarray(value).reshape(-1)[0])


def _passes(pricing: Pricing, step: Step) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Seconds of every block's forward and backward pass, and of the head's."""
    kinds = [(number(own.forward), number(own.backward)) for _, own in step.blocks]
    experts = pricing.model.experts
    plain = [experts is None or i in experts.dense_layers for i in range(pricing.model.layers)]
    passes = [kinds[0] if dense else kinds[-1] for dense in plain]
    return passes, (number(step.head.forward), number(step.head.backward))


def _costs(passes: list[tuple[float, float]], head: tuple[float, float], blocks: tuple[int, ...]) -> Costs:
    """Of every chunk; gradients of weights are half of a backward pass."""
    forward, backward, at = [], [], 0
    for count in blocks:
        own = passes[at : at + count]
        at += count
        forward.append(sum(f for f, _ in own))
        backward.append(sum(b for _, b in own))
    forward[-1] += head[0]
    backward[-1] += head[1]
    half = [b / 2 for b in backward]
    return Costs(forward, half, half)


def _makespan(s: Strategy, m: int, costs: Costs, slowest: float) -> float:
    few = m if m <= _ROUNDS * s.pp else _ROUNDS * s.pp
    virtual = s.virtual if s.virtual > 1 else None
    # Of naive, a micro-batch goes all the way before the next one starts.
    pace = sum(costs.forward) + sum(costs.input_grad) + sum(costs.weight_grad) if s.schedule == "naive" else slowest
    return price(build(s.schedule, s.pp, few, virtual), costs).makespan + (m - few) * pace
