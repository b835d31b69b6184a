"""A plan of our own runtime on a machine that was measured, explained and examined by the exact price of its step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from phalanx.cost.collectives import measured
from phalanx.cost.step.expand import expand
from phalanx.plan.auto import stage_split
from phalanx.plan.search import neighbours
from phalanx.plan.search.best_first import STACK, Candidate, price
from phalanx.plan.search.column_pricing import Pricing
from phalanx.schedule.event import INSIDE, Event
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Own:
    """`neighbours`: what a single other decision would make of it, the fastest that fit first."""

    chosen: Candidate
    neighbours: tuple[tuple[str, Candidate], ...]
    usable: int

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of the step; of a pipeline those of the rank that computes longest, which waits for the others."""
        p = self.chosen.prediction
        found = {
            "forward passes": float(p.forward_s),
            "backward passes": float(p.backward_s),
            "the update": float(p.optimizer_s),
        }
        seen = float(p.exposed_communication_s)
        found["communication that nothing hides"] = seen
        found["waiting for other stages"] = max(0.0, self.chosen.seconds - sum(found.values()))
        return {name: seconds for name, seconds in found.items() if seconds}

    @property
    def held(self) -> dict[str, float]:
        p = self.chosen.prediction
        return {"model state": float(p.state_bytes), "activations": float(p.activation_bytes)}


@dataclass(frozen=True)
class Tried:
    """One strategy's exact price."""

    strategy: Strategy
    seconds: float
    bytes_: float
    usable: int


@dataclass(frozen=True)
class Examined:
    """One strategy for `lint`, by exact prices."""

    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    strategy: Strategy
    gpus: int

    def __post_init__(self) -> None:
        check(self.strategy, self.model, self.job, None)

    @cached_property
    def chosen(self) -> Candidate:
        return price(self.model, self.cluster, self.job, self.strategy)

    @property
    def quick(self) -> float:
        return self.chosen.seconds

    @property
    def tensor_parallel(self) -> float:
        grid = mesh(self.strategy)
        found = (measured.seconds(self.cluster, grid, e.op, "tp", 1, e.bytes) for e in self._events if e.axis == "tp")
        return float(sum(found)) / self.quick

    @property
    def bubble(self) -> float:
        return float(self.chosen.prediction.bubble_fraction)

    @property
    def imbalance(self) -> float:
        found = stage_split.explained(self.model, self.cluster, self.job, self.chosen.strategy, "")
        return float(found["imbalance"]) if found else 0.0

    @property
    def gradients_sent(self) -> float:
        """As rings send them."""
        found = 0.0
        for e in self._events:
            if e.axis not in INSIDE and e.op in ("all_reduce", "reduce_scatter"):
                found += (2 if e.op == "all_reduce" else 1) * (e.group_size - 1) / e.group_size * e.bytes
        return found

    @property
    def _events(self) -> list[Event]:
        events = expand(self.model, self.job, self.chosen.strategy, 0).events
        return [e for e in events if e.kind == "collective"]

    def tried(self, s: Strategy) -> Tried | None:
        try:
            check(s, self.model, self.job, None)
            require_runnable(s, self.job)
            found = price(self.model, self.cluster, self.job, s)
        except InputError:
            return None
        size = float(found.prediction.memory_bytes)
        return None if found.reason else Tried(s, found.seconds, size, self.cluster.device.usable_bytes)


def examined(plan: Plan, strategy: Strategy | None, gpus: int | None) -> Examined:
    """A strategy of a plan's job on its cluster; its own as it was asked for. Raises InputError."""
    if strategy is None:
        strategy = plan.strategy
        if (plan.choices.get("bucket") or {}).get("reason"):
            strategy = replace(strategy, bucket="auto")
        if (plan.choices.get("chunks") or {}).get("reason"):
            strategy = replace(strategy, layers="auto")
    return Examined(plan.model, plan.cluster, plan.job, strategy, gpus or strategy.world)


def own(x: Examined) -> Own:
    """With the prices of all strategies next to it."""
    found = []
    for what, other in neighbours.neighbours(x.chosen.asked, Pricing(x.model, x.cluster, x.job, STACK)):
        try:
            require_runnable(other, x.job)
        except InputError:
            continue
        found.append((what, price(x.model, x.cluster, x.job, other)))
    found.sort(key=lambda item: (bool(item[1].reason), item[1].seconds))
    return Own(x.chosen, tuple(found), x.cluster.device.usable_bytes)


def as_json(x: Own) -> dict[str, Any]:
    """As `phalanx explain --json` prints it."""
    c = x.chosen
    return {
        "strategy": str(c.asked),
        "step_time_s": c.seconds,
        "fits": not c.reason,
        "memory_bytes": int(c.prediction.memory_bytes),
        "usable_bytes": x.usable,
        "terms_s": x.terms,
        "memory_terms": x.held,
        "bytes_per_axis": {axis: int(n) for axis, n in c.prediction.bytes_per_axis.items()},
        "neighbours": [
            {
                "change": what,
                "strategy": str(other.asked),
                "step_time_s": other.seconds,
                "memory_bytes": int(other.prediction.memory_bytes),
                "rejected": other.reason,
            }
            for what, other in x.neighbours
        ],
    }
