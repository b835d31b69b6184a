"""One strategy under examination: its price, its pipeline as it runs, what it sends, and better neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from phalanx.cost.analytic.flops import hardware_flops, model_flops
from phalanx.plan.explain.targets import BUBBLE, EXPOSED, IMBALANCE, MFU, OVERLAP, Target
from phalanx.plan.explain.traffic import Flow, flows
from phalanx.plan.search import neighbours, priced, refine, space
from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.priced import PricedStrategy
from phalanx.plan.search.refine import PipelineRun
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Subject:
    """`larger`: the same question on so many GPUs."""

    larger: Callable[[int], Pricing]
    strategy: Strategy
    gpus: int

    def __post_init__(self) -> None:
        check(self.strategy, self.pricing.model, self.pricing.job, None)

    @cached_property
    def pricing(self) -> Pricing:
        return self.larger(self.gpus)

    @property
    def model(self) -> ModelSpec:
        return self.pricing.model

    @property
    def cluster(self) -> ClusterSpec:
        return self.pricing.cluster

    @property
    def job(self) -> Job:
        return self.pricing.job

    @cached_property
    def _priced(self) -> tuple[PricedStrategy, PipelineRun]:
        return refine.refined(self.pricing, [self.strategy])[0]

    @property
    def priced(self) -> PricedStrategy:
        """Its pipeline as it runs."""
        return self._priced[0]

    @property
    def run(self) -> PipelineRun:
        return self._priced[1]

    @cached_property
    def flows(self) -> list[Flow]:
        return flows(self.pricing, self.strategy)

    @property
    def quick(self) -> float:
        """Seconds by the terms alone."""
        return self.priced.seconds

    @property
    def tensor_parallel(self) -> float:
        return self.priced.terms.get("tp", 0.0) / self.priced.seconds

    @property
    def imbalance(self) -> float:
        return self.run.imbalance

    @property
    def gradients_sent(self) -> float:
        return sum(f.sent for f in self.flows if f.axis in ("dp", "edp") and f.what == "gradients")

    def tried(self, s: Strategy) -> PricedStrategy | None:
        try:
            check(s, self.model, self.job, None)
        except InputError:
            return None
        p = priced.price(self.pricing, [s])[0]
        return p if p.fits else None

    @property
    def seconds(self) -> float:
        return self.priced.seconds

    @cached_property
    def model_flops(self) -> float:
        return float(model_flops(self.pricing.shape, self.pricing.layout(space.of([self.strategy])))[0])

    @cached_property
    def hardware_flops(self) -> float:
        return float(hardware_flops(self.pricing.shape, self.pricing.layout(space.of([self.strategy])))[0])

    @property
    def mfu(self) -> float:
        return self.model_flops / (self.seconds * self.strategy.world * float(self.pricing.system.peak_bf16))

    @property
    def bubble(self) -> float:
        """Its share of the step."""
        return self.run.bubble / self.seconds

    @property
    def overlap(self) -> float:
        """The share of what gradients and parameters take to travel that something hides; 1 where none do."""
        whole = sum(flow.seconds for flow in self.flows if flow.axis in ("dp", "edp"))
        return 1 - min(self.priced.terms.get("dp", 0.0) / whole, 1.0) if whole else 1.0

    @property
    def marks(self) -> list[tuple[Target, float]]:
        """Its figures beside the table of targets."""
        return [
            (MFU, self.mfu),
            (BUBBLE, self.bubble),
            (EXPOSED, self.priced.communication),
            (OVERLAP, self.overlap),
            (IMBALANCE, self.run.imbalance),
        ]

    @cached_property
    def neighbours(self) -> list[tuple[str, PricedStrategy]]:
        """Strategies that differ in one decision, the fastest that fit first."""
        near = neighbours.neighbours(self.strategy, self.pricing)
        found = refine.refined(self.pricing, [s for _, s in near])
        named = [(what, p) for (what, _), (p, _) in zip(near, found, strict=True)]
        return sorted(named, key=lambda item: (not item[1].fits, item[1].seconds))

    def better(self, *words: str) -> PricedStrategy | None:
        """The fastest neighbour that fits, is faster, and changes one of these."""
        for what, p in self.neighbours:
            if p.fits and p.seconds < self.priced.seconds and (not words or what.split(" ")[0] in words):
                return p
        return None
