"""What is asked of a search: model, cluster, load, limits; and a candidate that answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.simulation.engines import EngineRow
from phalanx.serving.simulation.outcome import ServingOutcome
from phalanx.serving.simulation.requests import Requests
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.model.spec import ModelSpec

Objective = Literal["throughput", "latency", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency", "cost")


@dataclass(frozen=True)
class ServingQuestion:
    """A model to be served on a cluster, with a load, and limits that `percentile` percent of requests stay under."""

    model: ModelSpec
    cluster: ClusterSpec
    gpus: int
    engine: EngineRow
    input: int
    output: int
    longest: int
    """Tokens of the longest request, prompt and answer."""
    objective: Objective
    ttft_s: float | None
    tpot_s: float | None
    percentile: int
    weights: tuple[str, ...]
    cache: str
    page_tokens: int
    chunks: tuple[int, ...]
    """Token budgets of a step to try."""
    modes: tuple[str, ...]
    """aggregated, disaggregated."""
    variation: float = 0.0
    """Coefficient of variation of the lengths."""
    concurrency: int = 0
    """Closed loop of so many in the whole deployment; 0: as many as the limits allow."""
    rate: float = 0.0
    """Poisson arrivals per second at the whole deployment; 0: closed loop."""
    trace: Requests | None = None
    reuse: float = 0.0
    draft_tokens: int = 0
    acceptance: float = 0.0
    adapters: int = 0
    """LoRA adapters that requests use."""
    adapter_slots: int = 0
    """Of them in one batch."""
    adapter_load_s: float = 0.0
    requests: int = 0
    """How many are simulated; 0: enough for steady quantiles."""
    seed: int = 0
    price: float | None = None
    """Of a GPU-hour."""

    @property
    def open_load(self) -> bool:
        """Whether arrivals do not wait for answers."""
        return self.trace is not None or self.rate > 0

    @property
    def offered(self) -> float:
        """Requests per second that arrive, where they do not wait for answers."""
        if self.trace is None or self.trace.arrival is None:
            return self.rate
        return len(self.trace) / max(float(self.trace.arrival[-1]), 1e-9)


@dataclass(frozen=True)
class WorkerGroup:
    """Equal workers of a candidate."""

    role: Literal["both", "prefill", "decode"]
    layout: ServingLayout
    count: int
    slots: int
    """The most requests at once in one."""
    step_tokens: int
    """The most tokens of one group of attention that go through the model at once: the engine's budget of a step."""
    cache_tokens: int


@dataclass(frozen=True)
class SteadyEstimate:
    """What the steady state promises, without queueing."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    """Of the whole deployment."""


@dataclass(frozen=True)
class ServingCandidate:
    """One way to serve, and what is expected of it."""

    weights: str
    groups: tuple[WorkerGroup, ...]
    users: int
    """Requests under way in the whole deployment, closed loop."""
    steady: SteadyEstimate
    outcome: ServingOutcome | None = None
    """Simulated; None: pruned before."""

    @property
    def gpus(self) -> int:
        """GPUs that it uses."""
        return sum(g.count * g.layout.gpus for g in self.groups)

    @property
    def tokens_per_s(self) -> float:
        """Of the whole deployment."""
        return self.outcome.tokens_per_s if self.outcome else self.steady.tokens_per_s

    def ttft_s(self, percentile: int) -> float:
        """Time to the first token that this percentage of requests stays under."""
        return self.outcome.ttft.at(percentile) if self.outcome else self.steady.ttft_s

    def tpot_s(self, percentile: int) -> float:
        """Time per further token that this percentage of requests stays under."""
        return self.outcome.tpot.at(percentile) if self.outcome else self.steady.tpot_s

    @property
    def family(self) -> tuple[object, ...]:
        """What two candidates share that differ in batch and chunk only."""
        return (self.weights, *((g.role, g.layout, g.count) for g in self.groups))

    @property
    def title(self) -> str:
        """Such as `2 x tp=4, fp8`."""
        parts = []
        for g in self.groups:
            x = g.layout
            text = f"{g.count} x tp={x.tp}"
            text += f",pp={x.pp}" if x.pp > 1 else ""
            text += f",dp={x.attention_dp}" if x.attention_dp > 1 else ""
            text += f",ep={x.moe_ep}" if x.moe_ep > 1 else ""
            parts.append(text + (f" {g.role}" if g.role != "both" else ""))
        return f"{' + '.join(parts)}, {self.weights}"
