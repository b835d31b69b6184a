"""Lower bounds on the seconds and bytes of a step, whatever its level of ZeRO.

T is the time of all passes of one micro-batch on the ranks that share its layers (tp, cp, ep), with the communication
inside layers. With m micro-batches over p pipeline ranks and equal chunks, each rank computes m T/p and waits

    1f1b, gpipe  (p-1) T/p     interleaved  (p-1) T/(p v)     naive           m (p-1) T/p
    zb-h1        (p-1) T/(3p)  zb-v, dualpipe-v               (p-1) T/(6p)

which chunks of whole blocks hardly undercut: the bound leaves them a few hundredths, which `expected` takes out again
so that a pipeline is not priced before strategies likely to be as fast. Without a pipeline T is exact. Communication
of gradients and parameters and the update are left out: they depend on ZeRO.

T is timed with all ranks at work. Where they share cores, n of p go on at c(n) times that speed while the others wait
(schedule/pipeline/shared_cores.py). Then the step is at least the above over max c(n), and at least all work, m T,
over the most that the cores do, max n c(n).

For memory only the model state is counted, spread evenly (Rajbhandari et al. 2020, figure 1): N parameters with
weights of e bytes, gradients of g and optimizer state of o, over S shards, take N times

    zero 0   e + g + o      1   e + g + o/S      2   e + (g + o)/S      3   (e + g + o)/S
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from phalanx.cost.ledger.pipeline_formulas import NAMES, by_schedule
from phalanx.cost.step.pass_terms import pass_terms
from phalanx.cost.step.predict_pipeline import pace, unit_seconds
from phalanx.plan.search.column_pricing import Floats
from phalanx.plan.search.strategy_columns import Ints, Strategies
from phalanx.schedule.layout import Layout, RankView
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.strategy.spec import Strategy

_KEY = ("tp", "sp", "cp", "ulysses", "ep", "etp", "micro_batch")
_ROUNDING, _UNEQUAL = 1 - 1e-9, 0.97
"""Factors of the bound: against rounding without a pipeline, and for chunks that undercut equal ones."""


class Bounds:
    """Lower bounds on the strategies of a job on a cluster."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job) -> None:
        self._model, self._cluster, self._job = model, cluster, job
        self._passes = cache(self._alone_seconds)

    def of_rows(self, rows: Strategies) -> Floats:
        """Least seconds of each row, with any recomputation."""
        key = np.stack([rows.dp * rows.pp, rows.pp, *(getattr(rows, name) for name in _KEY)], axis=1)
        _, first, own = np.unique(key, axis=0, return_index=True, return_inverse=True)
        alone = [_alone(replace(rows.strategy(int(row)), recompute="none")) for row in first]
        timed = [self._timed(one, stages) for one, stages in zip(alone, rows.pp[first].tolist(), strict=True)]
        passes = np.array(timed).reshape(-1, 3)[own.reshape(-1)].T
        return _least(passes, rows.micro_batches(self._job), rows.pp, rows.virtual, rows.schedule)

    def of(self, s: Strategy) -> float:
        """Least seconds of one strategy, its recomputation included."""
        own = (s.accumulation(self._job), s.pp, s.virtual, NAMES.index(s.schedule))
        passes = np.array([self._timed(_alone(s), s.pp)]).T
        return float(_least(passes, *(np.array([n]) for n in own))[0])

    def bytes_of_rows(self, rows: Strategies) -> Floats:
        """Least bytes of each row: the model state, spread evenly over the ranks."""
        routed = sum(p.numel for p in parameters(self._model) if p.of_experts)
        inside = rows.ep * rows.etp
        dense = (self._model.parameter_count - routed) / (rows.tp * rows.pp) * self._per_parameter(rows, rows.shards)
        over = np.maximum(rows.shards * rows.tp / inside, 1)
        least_bytes: Floats = dense + routed / (inside * rows.pp) * self._per_parameter(rows, over)
        return least_bytes

    def _per_parameter(self, rows: Strategies, shards: Floats | Ints) -> Floats:
        p, adam = self._job.precision, self._job.optimizer.name == "adamw"
        e, g, own = (DTYPE_BYTES[dtype] for dtype in (p.compute, p.accumulate_dtype, p.master_dtype))
        o = own * (1 + adam) + (own if p.master_dtype != p.compute else 0)
        zero = np.where(rows.shards > 1, rows.zero, 0)
        whole = np.full(len(rows), float(e + g + o))
        ways = [whole, e + g + o / shards, e + (g + o) / shards, whole / shards]
        bytes_each: Floats = np.select([zero == level for level in range(4)], ways)
        return bytes_each

    def _timed(self, alone: Strategy, stages: int) -> tuple[float, float, float]:
        """T, seconds, of a strategy without pipeline; over so many pipeline ranks, max c(n) and max n c(n) / p."""
        passes, view = self._passes(alone)
        speeds = pace(view.layout, [pass_terms(view)], self._cluster, stages) or (1.0,)
        return passes, max(speeds), max(n * speed for n, speed in enumerate(speeds, 1)) / len(speeds)

    def _alone_seconds(self, alone: Strategy) -> tuple[float, RankView]:
        one = replace(self._job, global_batch=alone.micro_batch * alone.dp)
        view = Layout(self._model, one, alone).stage_view()
        seconds = unit_seconds(view, self._cluster)
        return sum(seconds[name] * len(units) for name, units in view.unit_classes.items()), view


def expected(least: Floats, p: Ints) -> Floats:
    """The likely seconds for the lower bounds `least`: `p` pipeline ranks have equal chunks."""
    likely: Floats = least / np.where(p > 1, _UNEQUAL, 1.0)
    return likely


def _alone(s: Strategy) -> Strategy:
    """On as many ranks, without pipeline and ZeRO: rates are those of all ranks at work."""
    return replace(s, dp=s.dp * s.pp, pp=1, virtual=1, schedule=Strategy.schedule, zero=0, shard=None)


def _least(passes: Floats, m: Ints, p: Ints, virtual: Ints, schedule: Ints) -> Floats:
    """`passes`: rows of T, max c(n), max n c(n) / p (`Bounds._timed`)."""
    t, one, together = passes
    bubble = by_schedule(schedule, "least_wait", m, p, virtual)
    waits = np.maximum((m + bubble) / one, m / together)
    seconds: Floats = t * waits / p * np.where(p > 1, _UNEQUAL, _ROUNDING)
    return seconds
