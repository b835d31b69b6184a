"""Lower bounds on the seconds and bytes of a step, whatever its level of ZeRO.

T is the time of all passes of one micro-batch on the ranks that share its layers (tp, cp, ep), with the communication
inside layers. With m micro-batches over p pipeline ranks and equal chunks, each rank computes m T/p and waits

    1f1b, gpipe  (p-1) T/p     interleaved  (p-1) T/(p v)     naive           m (p-1) T/p
    zb-h1        (p-1) T/(3p)  zb-v, dualpipe-v               (p-1) T/(6p)

which chunks of whole blocks hardly undercut: the bound allows for a few per cent, which `expected` removes again so
that a pipeline is not priced before strategies that are likely as fast. Without a pipeline T is exact. Communication
of gradients and parameters and the update are left out: they depend on ZeRO.

T is timed with all ranks at work. Where they share cores, n of p go on at c(n) times that speed while the others wait
(schedule/pipeline/shared_cores.py). If n are at work for a(n) T/p seconds, the step is no shorter than the least sum
of a(n) with

    sum n c(n) a(n) = p m            all work is done
    sum (p - n) a(n) >= p b / max c  ranks wait at least as long as above (b T/p), or as that takes at the best speed

whose dual has two variables: the bound is the largest m p y + b p z / max c over the corners (y, z) of n c(n) y +
(p - n) z <= 1. With cores of their own, c = 1, there is one corner, 1/p and 1/p: m + b.

For memory only the model state is counted, spread evenly (Rajbhandari et al. 2020, figure 1): N parameters with
weights of e bytes, gradients of g and optimizer state of o, over S shards, take N times

    zero 0   e + g + o      1   e + g + o/S      2   e + (g + o)/S      3   (e + g + o)/S
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np

from phalanx.cost.ledger.pipeline_formulas import NAMES, by_schedule
from phalanx.cost.step.pass_terms import pass_terms
from phalanx.cost.step.predict_pipeline import pace, unit_seconds
from phalanx.planning.search.column_pricing import Floats
from phalanx.planning.search.strategy_columns import Ints, Strategies
from phalanx.schedule.layout import Layout, RankView
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

_KEY = ("tp", "sp", "cp", "ulysses", "ep", "etp", "micro_batch")
_ROUNDING, _UNEQUAL = 1 - 1e-9, 0.97
"""Factors of the bound: against rounding without a pipeline, and for chunks that undercut equal ones."""


class Bounds:
    """Lower bounds on the strategies of a job on a cluster."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job) -> None:
        self._model, self._cluster, self._job = model, cluster, job
        self._passes = cache(self._alone_seconds)

    def of_rows(self, rows: Strategies) -> Floats:
        """Lower bound on the seconds of each row, for any recomputation."""
        key = np.stack([rows.dp * rows.pp, rows.pp, *(getattr(rows, name) for name in _KEY)], axis=1)
        _, first, own = np.unique(key, axis=0, return_index=True, return_inverse=True)
        alone = [_alone(replace(rows.strategy(int(row)), recompute="none")) for row in first]
        timed = [self._timed(one, stages) for one, stages in zip(alone, rows.pp[first].tolist(), strict=True)]
        passes, corners = _padded(timed)
        own = own.reshape(-1)
        return _least(passes[own], corners[own], rows.micro_batches(self._job), rows.pp, rows.virtual, rows.schedule)

    def of(self, s: Strategy) -> float:
        """Lower bound on the seconds of one strategy, including its recomputation."""
        own = (s.accumulation(self._job), s.pp, s.virtual, NAMES.index(s.schedule))
        return float(_least(*_padded([self._timed(_alone(s), s.pp)]), *(np.array([n]) for n in own))[0])

    def bytes_of_rows(self, rows: Strategies) -> Floats:
        """Lower bound on the bytes of each row: the model state, spread evenly over the ranks."""
        routed = sum(p.numel for p in parameters(self._model) if p.of_experts)
        inside = rows.ep * rows.etp
        dense = (self._model.parameter_count - routed) / (rows.tp * rows.pp) * self._per_parameter(rows, rows.shards)
        over = np.maximum(rows.shards * rows.tp / inside, 1)
        least_bytes: Floats = dense + routed / (inside * rows.pp) * self._per_parameter(rows, over)
        return least_bytes

    def _per_parameter(self, rows: Strategies, shards: Floats | Ints) -> Floats:
        p, optimizer = self._job.precision, self._job.optimizer
        moments = len(optimizer.row.matrices.held(optimizer.first_decay))
        e, g, own = (DTYPE_BYTES[dtype] for dtype in (p.compute, p.accumulate_dtype, p.master_dtype))
        o = own * moments + (own if p.master_dtype != p.compute else 0)
        zero = np.where(rows.shards > 1, rows.zero, 0)
        ways = [np.asarray(level.bytes_kept(o, g, e, shards)) * np.ones(len(rows)) for level in ZERO_LEVELS]
        bytes_each: Floats = np.choose(zero, ways)
        return bytes_each

    def _timed(self, alone: Strategy, stages: int) -> tuple[float, Floats]:
        """Return T, seconds, of a strategy without pipeline, and the corners for `stages` pipeline ranks."""
        passes, view = self._passes(alone)
        return passes, _corners(pace(view.layout, [pass_terms(view)], self._cluster, stages) or (1.0,) * stages)

    def _alone_seconds(self, alone: Strategy) -> tuple[float, RankView]:
        one = replace(self._job, global_batch=alone.micro_batch * alone.dp)
        view = Layout(self._model, one, alone).stage_view()
        seconds = unit_seconds(view, self._cluster)
        return sum(seconds[name] * len(units) for name, units in view.unit_classes.items()), view


def expected(least: Floats, p: Ints) -> Floats:
    """Return the likely seconds for the lower bounds `least`, if `p` pipeline ranks have equal chunks."""
    likely: Floats = least / np.where(p > 1, _UNEQUAL, 1.0)
    return likely


def _alone(s: Strategy) -> Strategy:
    """Return the strategy on the same number of ranks without pipeline and ZeRO: rates are for all ranks at work."""
    return replace(s, dp=s.dp * s.pp, pp=1, virtual=1, schedule=Strategy.schedule, zero=0, shard=None)


def _corners(speeds: Sequence[float]) -> Floats:
    """Return rows of p y, p z / max c, the corners of n c(n) y + (p - n) z <= 1 for `speeds` c(1) to c(p)."""
    p, c = len(speeds), np.array(speeds)
    if (c == 1).all():
        return np.ones((1, 2))
    n = np.arange(1, p + 1)
    sides = np.stack([n * c, p - n], axis=1)
    corners = [(1 / sides[:, 0].max(), 0.0)]
    for i, j in combinations(range(p), 2):
        pair = sides[[i, j]]
        if abs(np.linalg.det(pair)) > 1e-12:
            y, z = np.linalg.solve(pair, np.ones(2))
            if y >= 0 and z >= 0 and (sides @ (y, z) <= 1 + 1e-9).all():
                corners.append((y, z))
    scaled: Floats = np.array(corners) * (p, p / c.max())
    return scaled


def _padded(timed: Sequence[tuple[float, Floats]]) -> tuple[Floats, Floats]:
    """Return T and corners of several rows as arrays; rows of few corners are filled up with zeros."""
    most = max((len(corners) for _, corners in timed), default=1)
    filled = [np.pad(corners, ((0, most - len(corners)), (0, 0))) for _, corners in timed]
    return np.array([passes for passes, _ in timed]), np.array(filled).reshape(-1, most, 2)


def _least(passes: Floats, corners: Floats, m: Ints, p: Ints, virtual: Ints, schedule: Ints) -> Floats:
    bubble = by_schedule(schedule, "least_wait", m, p, virtual)
    waits = np.max(m[:, None] * corners[..., 0] + bubble[:, None] * corners[..., 1], axis=1)
    seconds: Floats = passes * waits / p * np.where(p > 1, _UNEQUAL, _ROUNDING)
    return seconds
