"""The second pass of a search: a candidate's pipeline as it really runs, cut and timed action by action.

The first pass prices bubbles by a formula for equal chunks. Here the blocks are cut into chunks
(schedule/partition.py), every action of the schedule has its chunk's seconds, and the makespan is that of running it
(cost/pipeline.py). Once it is filled a pipeline repeats itself, so of many micro-batches a few rounds are run, and
the rest is added at the pace of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.cost.pipeline import Costs
from phalanx.cost.stack.compute import Passes
from phalanx.plan.pricing import Pricing
from phalanx.plan.space import of
from phalanx.schedule import stages
from phalanx.schedule.partition import Units, explain, partition
from phalanx.schedule.pipeline import build
from phalanx.schedule.pipeline_run import run as run_schedule
from phalanx.spec.strategy import Strategy

_ROUNDS = 3
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


def run(pricing: Pricing, strategies: Sequence[Strategy]) -> list[Run]:
    """The pipeline of each strategy; of one rank its work."""
    if not strategies:
        return []
    step, count = pricing.step(of(strategies)), len(strategies)
    work = np.broadcast_to(sum(step.terms[name] for name in _PIPELINED), count)
    kinds = [_rows(own, count) for _, own in step.blocks]
    heads = _rows(step.head, count)
    experts = pricing.model.experts
    plain = [experts is None or i in experts.dense_layers for i in range(pricing.model.layers)]
    found = []
    for i, s in enumerate(strategies):
        if s.pp == 1:
            found.append(Run(float(work[i]), (pricing.model.layers,), 0.0, 0.0))
            continue
        passes = [kinds[0][i] if dense else kinds[-1][i] for dense in plain]
        found.append(_run(s, s.accumulation(pricing.job), passes, heads[i]))
    return found


def _rows(own: Passes, count: int) -> list[tuple[float, float]]:
    forward, backward = (np.broadcast_to(part, count) for part in (own.forward, own.backward))
    return [(float(f), float(b)) for f, b in zip(forward, backward, strict=True)]


def _run(s: Strategy, m: int, passes: list[tuple[float, float]], head: tuple[float, float]) -> Run:
    """`passes`: seconds of every block's forward and backward pass; `head`: of the head's."""
    whole = Units(0.0, tuple(f + b for f, b in passes), sum(head))
    ranks = stages.rank_of(s)
    blocks = partition(whole, ranks).blocks
    found = explain(whole, ranks, blocks)
    slowest = max(share.seconds for share in found.ranks)
    makespan = _makespan(s, m, _costs(passes, head, blocks), slowest)
    return Run(makespan, blocks, found.imbalance, makespan - m * slowest)


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
    whole = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
    seconds = {"F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad, "B": whole}
    times = run_schedule(build(s.schedule, s.pp, few, virtual), seconds, costs.transfer)
    return max(own[-1][1] for own in times) + (m - few) * pace
