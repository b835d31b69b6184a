"""The second pass of a search: a candidate's pipeline as it really runs, cut and timed action by action.

The first pass prices bubbles by a formula for equal chunks. Here the blocks are cut into chunks
(schedule/partition.py), every action of the schedule has its chunk's seconds, and the makespan is that of running it
(cost/pipeline.py). Once it is filled a pipeline repeats itself, so of many micro-batches a few rounds are run, and
the rest is added at the pace of the slowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.pipeline import Costs, price
from phalanx.cost.stack.step import Step
from phalanx.plan.pricing import Pricing
from phalanx.plan.space import Strategies
from phalanx.schedule import stages
from phalanx.schedule.partition import Units, explain, partition
from phalanx.schedule.pipeline import build
from phalanx.spec.strategy import Strategy

_ROUNDS = 4
"""Micro-batches per rank that are run: by then every schedule here repeats itself."""


@dataclass(frozen=True)
class Run:
    """`seconds` of the whole step. `blocks` of each chunk; `imbalance`: of the slowest rank over the mean, as a share
    of it; `bubble`: seconds in which the slowest rank waits."""

    seconds: float
    blocks: tuple[int, ...]
    imbalance: float
    bubble: float


def run(pricing: Pricing, rows: Strategies, row: int) -> Run:
    """One strategy with its real makespan; of one rank the price as it is."""
    s = rows.strategy(row)
    step = pricing.step(rows.take([row]))
    terms = {name: float(np.broadcast_to(term, (1,))[0]) for name, term in step.terms.items()}
    if s.pp == 1:
        return Run(sum(terms.values()), (pricing.model.layers,), 0.0, 0.0)
    passes, head = _passes(pricing, step)
    whole = Units(0.0, tuple(f + b for f, b in passes), sum(head))
    ranks = stages.rank_of(s)
    blocks = partition(whole, ranks).blocks
    found = explain(whole, ranks, blocks)
    slowest = max(share.seconds for share in found.ranks)
    m = s.accumulation(pricing.job)
    makespan = _makespan(s, m, _costs(passes, head, blocks), slowest)
    pipelined = sum(terms[name] for name in ("matmul", "attention", "memory", "tp", "cp", "ep") if name in terms)
    pipelined += sum(terms[name] for name in ("recompute", "launch", "head", "bubble"))
    seconds = sum(terms.values()) - pipelined + makespan
    return Run(seconds, blocks, found.imbalance, makespan - m * slowest)


def _passes(pricing: Pricing, step: Step) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Seconds of every block's forward and backward pass, and of the head's."""
    kinds = [tuple(float(np.broadcast_to(p, (1,))[0]) for p in (k.forward, k.backward)) for _, k in step.blocks]
    experts = pricing.model.experts
    plain = [experts is None or i in experts.dense_layers for i in range(pricing.model.layers)]
    passes = [(kinds[0][0], kinds[0][1]) if dense else (kinds[-1][0], kinds[-1][1]) for dense in plain]
    forward, backward = (float(np.broadcast_to(p, (1,))[0]) for p in (step.head.forward, step.head.backward))
    return passes, (forward, backward)


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
