"""A strategy of our own runtime on a measured machine, explained and linted by the exact price of its step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.cost.collectives import measured
from phalanx.cost.step.expand import expand
from phalanx.planning.auto import stage_split
from phalanx.planning.explain.lint import changed_fields
from phalanx.planning.search import neighbours
from phalanx.planning.search.best_first import STACK, Candidate, price
from phalanx.planning.search.column_pricing import Pricing
from phalanx.schedule.event import INSIDE, Event
from phalanx.schedule.layout import Layout
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import FIELDS, Strategy


@dataclass(frozen=True)
class ExactExplanation:
    """A strategy and its neighbours, priced exactly."""

    chosen: Candidate
    neighbours: tuple[tuple[str, Candidate], ...]
    """(change, candidate) of every strategy that differs in one decision, the fastest that fits first."""
    usable: int
    """Usable bytes of a device."""

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of the step by cause; in a pipeline, on the rank that computes longest."""
        p = self.chosen.prediction
        terms = {
            "forward passes": float(p.forward_s),
            "backward passes": float(p.backward_s),
            "the update": float(p.optimizer_s),
        }
        exposed = float(p.exposed_communication_s)
        terms["communication that nothing hides"] = exposed
        terms["waiting for other stages"] = max(0.0, self.chosen.seconds - sum(terms.values()))
        return {name: seconds for name, seconds in terms.items() if seconds}

    @property
    def memory_terms(self) -> dict[str, float]:
        """Bytes of model state and of activations."""
        p = self.chosen.prediction
        return {"model state": float(p.state_bytes), "activations": float(p.activation_bytes)}


@dataclass(frozen=True)
class ExactPrice:
    """A strategy with its exact step time in seconds, its memory and the device's usable memory in bytes."""

    strategy: Strategy
    seconds: float
    bytes_: float
    usable: int


@dataclass(frozen=True)
class ExactSubject:
    """A strategy for `lint`, priced exactly. Raises InputError if it is not legal for the model and job."""

    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    strategy: Strategy
    gpus: int

    def __post_init__(self) -> None:
        check(self.strategy, self.model, self.job, None)

    @cached_property
    def chosen(self) -> Candidate:
        """The strategy with its exact price."""
        return price(self.model, self.cluster, self.job, self.strategy)

    @property
    def comparable_seconds(self) -> float:
        """Step time, seconds."""
        return self.chosen.seconds

    @property
    def host_bytes(self) -> float:
        """0: our own runtime offloads no state."""
        return 0.0

    @property
    def headroom(self) -> float:
        """0: the memory of our own runtime is known to the byte, so its search needs no headroom."""
        return 0.0

    @property
    def memory(self) -> tuple[float, int]:
        """Bytes needed by the fullest rank, and bytes available to it."""
        return float(self.chosen.prediction.memory_bytes), self.cluster.device.usable_bytes

    def exposed_seconds(self, axis: str) -> float:
        """Return the seconds of an axis's collectives in a step, taken to be exposed, which is right for tp."""
        grid = mesh(self.strategy)
        times = (measured.seconds(self.cluster, grid, e.op, axis, 1, e.bytes) for e in self._events if e.axis == axis)
        return float(sum(times))

    @property
    def tensor_parallel(self) -> float:
        """Tensor-parallel communication as a share of the step."""
        return self.exposed_seconds("tp") / self.comparable_seconds

    @property
    def bubble(self) -> float:
        """Bubble as a share of the step."""
        return float(self.chosen.prediction.bubble_fraction)

    @property
    def imbalance(self) -> float:
        """Excess of the slowest pipeline rank over the mean, as a share of the mean."""
        split = stage_split.explanation(self.model, self.cluster, self.job, self.chosen.strategy, "")
        return float(split["imbalance"]) if split else 0.0

    @property
    def gradients_sent(self) -> float:
        """Bytes of gradients that a rank sends in a step, by ring algorithms."""
        sent = 0.0
        for e in self._events:
            if e.axis not in INSIDE and e.op in ("all_reduce", "reduce_scatter"):
                sent += (2 if e.op == "all_reduce" else 1) * (e.group_size - 1) / e.group_size * e.bytes
        return sent

    @property
    def _events(self) -> list[Event]:
        events = expand(Layout(self.model, self.job, self.chosen.strategy).rank_view(0)).events
        return [e for e in events if e.kind == "collective"]

    def sets(self, field: str) -> bool:
        """Whether a job file sets a field of the strategy: all of them."""
        return field in FIELDS

    def offloaded(self) -> Iterator[tuple[str, ExactPrice]]:
        """Yield nothing: our runtime keeps everything on the device."""
        yield from ()

    def gains(self) -> Iterator[tuple[str, str, ExactPrice]]:
        """Yield (field, the settings that change it, the price with them) of every neighbour that fits."""
        usable = self.cluster.device.usable_bytes
        for what, c in explain_exactly(self).neighbours:
            if not c.reason:
                price = ExactPrice(c.as_requested, c.seconds, float(c.prediction.memory_bytes), usable)
                yield what.split(" ")[0], changed_fields(self.strategy, c.as_requested), price

    def alternative(self, s: Strategy) -> ExactPrice | None:
        """Price another strategy exactly; None if it is not legal, cannot run or does not fit."""
        try:
            check(s, self.model, self.job, None)
            require_runnable(s, self.job)
            candidate = price(self.model, self.cluster, self.job, s)
        except InputError:
            return None
        size = float(candidate.prediction.memory_bytes)
        return None if candidate.reason else ExactPrice(s, candidate.seconds, size, self.cluster.device.usable_bytes)


def subject_of_plan(plan: Plan, strategy: Strategy | None, gpus: int | None) -> ExactSubject:
    """Return the subject for a strategy of a plan's job on its cluster, by default the plan's own strategy as the
    user wrote it. Raises InputError if it is not legal for the job."""
    if strategy is None:
        strategy = plan.strategy
        if (plan.choices.get("bucket") or {}).get("reason"):
            strategy = replace(strategy, bucket="auto")
        if (plan.choices.get("chunks") or {}).get("reason"):
            strategy = replace(strategy, layers="auto")
    return ExactSubject(plan.model, plan.cluster, plan.job, strategy, gpus or strategy.world)


def explain_exactly(x: ExactSubject) -> ExactExplanation:
    """Price the strategy and all of its neighbours that our runtime can run."""
    neighbours_priced = []
    for what, other in neighbours.neighbours(x.chosen.as_requested, Pricing(x.model, x.cluster, x.job, STACK)):
        try:
            require_runnable(other, x.job)
        except InputError:
            continue
        neighbours_priced.append((what, price(x.model, x.cluster, x.job, other)))
    neighbours_priced.sort(key=lambda item: (bool(item[1].reason), item[1].seconds))
    return ExactExplanation(x.chosen, tuple(neighbours_priced), x.cluster.device.usable_bytes)
