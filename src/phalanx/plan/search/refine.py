"""The second pass of a search: a candidate's pipeline as it really runs, cut and timed action by action.

The first pass prices bubbles by a formula for equal chunks. Here the blocks are cut into chunks
(schedule/partition.py), every action of the schedule has its chunk's seconds, and the makespan is that of running it
(cost/stack/schedules.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.analytic.flops import model_flops
from phalanx.cost.analytic.kernels import Passes
from phalanx.cost.analytic.pipeline_formulas import makespan
from phalanx.cost.pipeline_time import Costs
from phalanx.plan.search import branch_and_bound, space
from phalanx.plan.search.branch_and_bound import FAMILIES, Found
from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.neighbours import neighbours
from phalanx.plan.search.priced import Priced, price
from phalanx.plan.search.space import ORDERS, of
from phalanx.schedule.partition.balance import Units, explain, partition
from phalanx.schedule.pipeline import stages
from phalanx.spec.strategy.spec import Strategy

_PIPELINED = ("matmul", "attention", "memory", "tp", "cp", "ep", "recompute", "launch", "head", "bubble")
"""The terms of a step that a pipeline's makespan stands for."""


@dataclass(frozen=True)
class Run:
    """`blocks` of each chunk; `imbalance`: of the slowest rank over the mean, as a share of it; `bubble`: seconds in
    which the slowest rank waits; `mean`: what all blocks of a step take, over the ranks (None where there is one)."""

    makespan: float
    blocks: tuple[int, ...]
    imbalance: float
    bubble: float
    mean: float | None = None

    def seconds(self, terms: Mapping[str, float]) -> float:
        """Of a step with these terms, its pipeline as it runs."""
        return self.makespan + sum(value for name, value in terms.items() if name not in _PIPELINED)

    def terms(self, formula: Mapping[str, float]) -> dict[str, float]:
        """Those of the formula as it runs: blocks as a mean rank has them, what the slowest has more of, and the
        bubble. They sum to `seconds`."""
        if self.mean is None:
            return dict(formula)
        own = {name: formula.get(name, 0.0) for name in _PIPELINED if name not in ("head", "bubble")}
        share = self.mean / sum(own.values())
        waits = {"head": self.makespan - self.bubble - self.mean, "bubble": self.bubble}
        return dict(formula) | {name: share * value for name, value in own.items()} | waits


def refined(pricing: Pricing, given: Sequence[Strategy]) -> list[tuple[Priced, Run]]:
    """Each strategy, term by term, its pipeline as it runs; those that differ in sharding alone have the same one."""
    like = [replace(s, zero=0, shard=None, order=ORDERS[0]) for s in given]
    alike = list(dict.fromkeys(like))
    runs = dict(zip(alike, run(pricing, alike), strict=True))
    found = []
    for p, s in zip(price(pricing, given), like, strict=True):
        own = runs[s]
        found.append((replace(p, seconds=own.seconds(p.terms), terms=own.terms(p.terms)), own))
    return found


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
    took = makespan(s.schedule, s.pp, m, s.virtual, _costs(passes, head, blocks), slowest)
    return Run(took, blocks, found.imbalance, took - m * slowest, m * sum(whole.blocks) / s.pp)


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


@dataclass(frozen=True)
class Ranked:
    """A strategy, its pipeline as it runs; `mfu` of the peak in bf16."""

    family: str
    priced: Priced
    run: Run
    mfu: float

    @property
    def strategy(self) -> Strategy:
        return self.priced.strategy

    @property
    def seconds(self) -> float:
        return self.priced.seconds


class Second:
    """Prices each strategy of a question once."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._known: dict[Strategy, Ranked] = {}

    def of(self, given: Sequence[Strategy]) -> list[Ranked]:
        """Each of them."""
        new = [s for s in dict.fromkeys(given) if s not in self._known]
        if new:
            rows, peak = space.of(new), float(self.pricing.system.peak_bf16)
            flops = float(np.max(model_flops(self.pricing.shape, self.pricing.layout(rows))))  # of all the same
            for kind, (p, run) in zip(branch_and_bound.family(rows), refined(self.pricing, new), strict=True):
                mfu = flops / (p.seconds * p.strategy.world * peak)
                self._known[p.strategy] = Ranked(FAMILIES[kind], p, run, mfu)
        return [self._known[s] for s in given]

    def descended(self, given: Sequence[Strategy]) -> list[Ranked]:
        """Those that fit of these, and of the neighbours of the fastest for as long as one of them is faster: fastest
        first."""
        every = {s: r for s, r in zip(given, self.of(given), strict=True) if r.priced.fits}
        looked: Strategy | None = None
        while (best := min(every, key=lambda s: every[s].seconds)) != looked:
            looked = best
            near = [s for _, s in neighbours(best, self.pricing)]
            every |= {s: r for s, r in zip(near, self.of(near), strict=True) if r.priced.fits}
        return sorted(every.values(), key=lambda r: r.seconds)


def best_of_each(found: Found) -> list[int]:
    """By the first pass: the row of each family that has any."""
    first: dict[int, int] = {}
    kinds = found.family[found.order]
    for kind in range(len(FAMILIES)):
        if np.any(kinds == kind):
            first[kind] = int(found.order[np.argmax(kinds == kind)])
    return list(first.values())
