"""A step whose ranks are not equally fast: who waits for whom, and how far a delay travels.

Ranks meet in three places, and at each the fastest wait for the slowest:

    inside layers    tp, cp, ep; and the ranks of a shard, where the stack gathers parameters or reduces gradients for
                     every micro-batch: such a group is one stage of one pipeline, as slow as its slowest rank
    between stages   the schedule is run with the stages' own seconds
    between replicas gradients are reduced when the last pipeline has ended

A factor multiplies all that a rank does in its passes and in the update. Pipelines with equal factors are run once. A
rank's wait is then a sum of parts, which add up over all ranks to world x (slower step - undisturbed step).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.cost.ledger.pipeline_formulas import ROUNDS, makespans
from phalanx.cost.ledger.policy import sharding as stack_sharding
from phalanx.cost.pipeline_time import Costs
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.refine import chunk_costs, refined
from phalanx.planning.search.strategy_columns import of
from phalanx.schedule.gradients.sharding import Sharding
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.strategy.mesh import Mesh, mesh
from phalanx.spec.strategy.spec import Strategy

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


_UNEVEN_ROUNDS = 64
"""Micro-batches a rank that are run where stages differ: it may take that many until the slowest sets the pace."""


@dataclass(frozen=True)
class Lockstep:
    """Which ranks go at one pace: of each rank its pipeline, its stage and its replica, (world,)."""

    pipeline: Ints
    stage: Ints
    replica: Ints

    @property
    def pipelines(self) -> int:
        """Number of pipelines that wait for each other once a step only."""
        return int(self.pipeline.max()) + 1


def lockstep(s: Strategy, sharding: Sharding) -> Lockstep:
    """Return the pipelines of a strategy: replicas that meet inside layers, or after every micro-batch, are one."""
    m = mesh(s)
    place = dict(
        zip((n for n, _ in m.axes), np.unravel_index(np.arange(m.world), [k for _, k in m.axes]), strict=True)
    )
    sizes = dict(m.axes)
    replica = place["dp_replicate"] * sizes["dp_shard"] + place["dp_shard"]
    label = np.arange(sizes["dp_replicate"] * sizes["dp_shard"])
    for axis in _meeting_axes(m, sharding):
        rows = np.unique(replica[m.groups(axis)], axis=0)
        while True:  # until every group has one label
            least = label[rows].min(axis=1)
            before = label.copy()
            np.minimum.at(label, rows, least[:, None])
            if (before == label).all():
                break
    pipeline, stage = np.unique(label, return_inverse=True)[1][replica], place["pp"]
    return Lockstep(pipeline.astype(np.int64), stage.astype(np.int64), replica.astype(np.int64))


def _meeting_axes(m: Mesh, sharding: Sharding) -> list[str]:
    """The axes over which replicas meet before the end of a step; tp and cp never leave a replica."""
    axes = ["ep+etp"] if m.ep * m.etp > 1 else []
    axes += ["dp_shard"] if np.any(sharding.gathers_each) or np.any(sharding.reduces_each) else []
    return axes + (["dp_shard+dp_replicate"] if np.any(sharding.replicates_each) else [])


@dataclass(frozen=True)
class DelayedStep:
    """A step with the factors of its ranks. Waits are GPU-seconds of all ranks, by where they wait."""

    undisturbed_s: float
    step_s: float
    own_s: float
    """What slow ranks take longer themselves."""
    inside_s: float
    """Inside layers, for the slowest rank of a group."""
    stages_s: float
    """For other stages of the pipeline, beyond the bubble."""
    replicas_s: float
    """For other pipelines, before gradients are reduced."""
    update_s: float
    """For the slowest update."""
    ends_s: Floats
    """When each pipeline ends its last backward pass, (pipelines,)."""


class PricedPipelines:
    """A strategy's priced step, taken apart so that it can be run with other factors."""

    def __init__(self, pricing: Pricing, s: Strategy) -> None:
        """Price the strategy. Raises InputError where it cannot be priced."""
        ((self.priced, self.run),) = refined(pricing, [s])
        self.strategy = s
        self.lockstep = lockstep(s, stack_sharding(pricing.layout(of([s])), pricing.profile.policy))
        self.micro_batches = s.accumulation(pricing.job)
        self.beside_s = self.priced.seconds - self.run.makespan
        self.update_s = float(self.priced.terms.get("optimizer", 0.0))
        self.costs = chunk_costs(pricing, s, self.run.blocks) if s.pp > 1 else None
        self._stage_of_chunk = np.array(rank_of(s)) if s.pp > 1 else np.zeros(1, dtype=np.int64)
        self.busy_s = self._busy()

    @staticmethod
    def _passes(costs: Costs) -> Floats:
        """Seconds of F, I and W, (3, chunks)."""
        return np.array([costs.forward, costs.input_grad, costs.weight_grad])

    def _busy(self) -> Floats:
        """Seconds of passes of each stage in a step, (pp,)."""
        if self.costs is None:
            return np.array([self.run.makespan])
        each = self._passes(self.costs).sum(axis=0)
        by_stage = np.bincount(self._stage_of_chunk, weights=each, minlength=self.strategy.pp)
        return np.asarray(self.micro_batches * by_stage, dtype=float)

    def ends(self, factors: Floats) -> Floats:
        """Return when pipelines end whose stages have these factors, (pipelines, pp) -> (pipelines,)."""
        if self.costs is None:
            return np.asarray(self.run.makespan * factors[:, 0], dtype=float)
        rows, place = np.unique(factors, axis=0, return_inverse=True)
        equal = self._makespans(np.ones((1, self.strategy.pp)), ROUNDS)[0] * rows.min(axis=1)
        uneven = rows.min(axis=1) < rows.max(axis=1)
        ends = equal.copy()
        if uneven.any():
            ends[uneven] = np.maximum(self._makespans(rows[uneven], _UNEVEN_ROUNDS), equal[uneven])
        return np.asarray(ends[place.reshape(-1)], dtype=float)

    def _makespans(self, rows: Floats, most: int) -> Floats:
        """Return when pipelines with these factors of their stages end, (pipelines, pp) -> (pipelines,)."""
        assert self.costs is not None
        s, scaled, slowest = self.strategy, [], []
        for row in rows:
            scaled.append(Costs(*(self._passes(self.costs) * row[self._stage_of_chunk]).tolist()))
            slowest.append(float((self.busy_s * row).max()) / self.micro_batches)
        m = [self.micro_batches] * len(rows)
        return np.array(makespans(s.schedule, s.pp, s.virtual, m, scaled, slowest, most))

    def delayed(self, factor: Floats) -> DelayedStep:
        """Return the step whose ranks take `factor` times as long, (world,)."""
        at, world = self.lockstep, len(factor)
        of_stage = np.ones((at.pipelines, self.strategy.pp))
        slowest = np.full_like(of_stage, -np.inf)
        np.maximum.at(slowest, (at.pipeline, at.stage), factor)
        of_stage = np.where(np.isfinite(slowest), slowest, 1.0)
        ends, (alone,) = self.ends(of_stage), self.ends(np.ones((1, self.strategy.pp)))
        last, busy = float(ends.max()), self.busy_s[at.stage]
        paced = of_stage[at.pipeline, at.stage] * busy
        updates = self.update_s * (float(factor.max()) - 1)
        return DelayedStep(
            undisturbed_s=alone + self.beside_s,
            step_s=last + self.beside_s + updates,
            own_s=float(((factor - 1) * busy).sum()),
            inside_s=float((paced - factor * busy).sum()),
            stages_s=float(((ends[at.pipeline] - paced) - (alone - busy)).sum()),
            replicas_s=float((last - ends[at.pipeline]).sum()),
            update_s=world * updates,
            ends_s=ends,
        )
