"""The question of a search (model, cluster, load, limits), and its candidates."""

from dataclasses import dataclass
from typing import Literal, get_args

from phalanx.planning.expense.expense import Expense, expense_of
from phalanx.planning.expense.rates import ExpenseRates
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import LargeEp
from phalanx.serving.simulation.engines import EngineRow
from phalanx.serving.simulation.outcome import ServingOutcome
from phalanx.serving.simulation.requests import Requests
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.model.spec import ModelSpec

Objective = Literal["throughput", "latency", "cost", "energy", "carbon"]
MOST_GPUS = 1024
"""The most GPUs of a search."""
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
SPARING = ("cost", "energy", "carbon")
"""Objectives for which a deployment may use fewer GPUs than there are."""


@dataclass(frozen=True)
class ServingQuestion:
    """A model to serve on a cluster, with a load, and limits for `percentile` percent of the requests."""

    model: ModelSpec
    cluster: ClusterSpec
    gpus: int
    engine: EngineRow
    input: int
    output: int
    longest: int
    """Tokens of the longest request, prompt and answer."""
    objective: Objective
    rates: ExpenseRates
    ttft_s: float | None
    tpot_s: float | None
    percentile: int
    weights: tuple[str, ...]
    cache: str
    page_tokens: int
    chunks: tuple[int, ...]
    """Token budgets of a step to try."""
    modes: tuple[str, ...]
    """Modes to try: aggregated, disaggregated."""
    scale_block: int = 0
    """Rows of a block of fp8 weights that share a scale; 0: no blocks."""
    slots: int = 0
    """The most concurrent requests of an attention group; 0: the engine's limit."""
    graphs: int | None = None
    """The largest batch of CUDA graphs of decoding; None: the engine's default."""
    memory_share: float | None = None
    """The engine's option for its share of a GPU's memory; None: its default."""
    step_tokens: int | None = None
    """The engine's option for the tokens of a step; None: its default."""
    variation: float = 0.0
    """Coefficient of variation of the lengths."""
    ranges: tuple[tuple[int, int], tuple[int, int]] | None = None
    """(fewest, most) tokens of prompts and of answers with uniform lengths."""
    concurrency: int = 0
    """Concurrent requests of a closed loop on the whole deployment; 0: as many as the limits allow."""
    rate: float = 0.0
    """Requests per second that arrive at the whole deployment; 0: closed loop. `concurrency` limits the concurrent
    ones."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of times between requests: 1 is a Poisson process."""
    trace: Requests | None = None
    reuse: float = 0.0
    draft_tokens: int = 0
    acceptance: float = 0.0
    adapters: int = 0
    """LoRA adapters that requests use."""
    adapter_slots: int = 0
    """The most LoRA adapters of a batch."""
    adapter_load_s: float = 0.0
    accept_s: float | None = None
    """Seconds of the server's single process for a request of a benchmark; None: as in the engine's present
    release."""
    requests: int = 0
    """Requests of a benchmark, or to simulate if there is no load; 0: enough for stable quantiles."""
    seed: int = 0
    deadline_s: float | None = None
    """Limit of a whole request."""
    lost: tuple[int, str] = (0, "node")
    """(number, kind) of nodes, GPUs or copies without which the others keep the limits."""
    large_ep: LargeEp = "auto"
    pair: tuple[tuple[int, ServingLayout], ...] = ()
    """(workers, layout) that prefill, and that decode, where both are given; empty: they are searched."""

    @property
    def limits(self) -> dict[str, float]:
        """Name of a limit -> seconds."""
        stated = {"ttft": self.ttft_s, "tpot": self.tpot_s, "deadline": self.deadline_s}
        return {name: most for name, most in stated.items() if most is not None}

    def workers_lost(self, gpus: int) -> int:
        """Return the most workers of `gpus` GPUs that are lost."""
        count, kind = self.lost
        return count * max(1, self.cluster.ranks_per_node // gpus) if kind == "node" else count

    @property
    def open_load(self) -> bool:
        """Whether requests arrive independently of answers."""
        return self.trace is not None or self.rate > 0

    @property
    def finite(self) -> bool:
        """Whether the load is a benchmark: a number of requests, all of which count."""
        return self.requests > 0 and self.trace is None and (self.rate > 0 or self.concurrency > 0)

    @property
    def sustained(self) -> bool:
        """Whether requests arrive at a rate without end, so that the deployment must keep up."""
        return self.rate > 0 and not self.finite

    def block_of(self, weights: str) -> int:
        """Return the rows of a block of weights of a type that share a scale; 0: no blocks."""
        return self.scale_block if weights == "fp8" else 0

    @property
    def sized(self) -> bool:
        """Whether the search is for the fewest GPUs of a load."""
        return self.open_load and not self.finite and self.objective in SPARING and not self.pair

    @property
    def offered(self) -> float:
        """Requests per second that arrive, in an open load."""
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
    """The most concurrent requests of one worker."""
    step_tokens: int
    """The token budget of a step of an attention group."""
    cache_tokens: int


@dataclass(frozen=True)
class SteadyEstimate:
    """The predicted steady state, without queueing."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    """Tokens generated per second by all workers."""


@dataclass(frozen=True)
class ServingCandidate:
    """A deployment with its predicted performance."""

    weights: str
    groups: tuple[WorkerGroup, ...]
    users: int
    """Concurrent requests of the whole deployment in a closed loop."""
    steady: SteadyEstimate
    outcome: ServingOutcome | None = None
    """Simulated results; None: not simulated."""

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return sum(g.count * g.layout.gpus for g in self.groups)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second by the whole deployment."""
        return self.outcome.tokens_per_s if self.outcome else self.steady.tokens_per_s

    def ttft_s(self, percentile: int) -> float:
        """The percentile of the time to the first token; of a candidate that is not simulated, the steady state."""
        return self.outcome.ttft.at(percentile) if self.outcome else self.steady.ttft_s

    def tpot_s(self, percentile: int) -> float:
        """The percentile of the time per further token; of a candidate that is not simulated, the steady state."""
        return self.outcome.tpot.at(percentile) if self.outcome else self.steady.tpot_s

    def phases(self) -> dict[str, float]:
        """Return phase -> GPUs, for their power: decode workers draw less."""
        gpus = {"serving": 0.0, "decode": 0.0}
        for g in self.groups:
            gpus["decode" if g.role == "decode" else "serving"] += g.count * g.layout.gpus
        return gpus

    def expense(self, q: ServingQuestion) -> Expense:
        """Return the cost of an hour."""
        apart = len(self.groups) > 1 or any(g.layout.gpus > q.cluster.ranks_per_node for g in self.groups)
        return expense_of("an hour", self.gpus, q.rates, self.phases(), apart)

    def spent(self, q: ServingQuestion) -> float:
        """Return the expense that the objective minimises: kWh an hour for energy and carbon, else GPUs."""
        energy = self.expense(q).energy_kwh if q.objective in ("energy", "carbon") else None
        return self.gpus if energy is None else energy

    @property
    def family(self) -> tuple[object, ...]:
        """A key shared by candidates that differ only in batch and chunk."""
        return (self.weights, *((g.role, g.layout, g.count) for g in self.groups))

    @property
    def title(self) -> str:
        """The deployment in a few words, such as `2 x tp=4, fp8`."""
        parts = []
        for g in self.groups:
            x = g.layout
            text = f"{g.count} x tp={x.tp}"
            text += f",pp={x.pp}" if x.pp > 1 else ""
            text += f",dp={x.attention_dp}" if x.attention_dp > 1 else ""
            text += f",ep={x.moe_ep}" if x.moe_ep > 1 else ""
            parts.append(text + (f" {g.role}" if g.role != "both" else ""))
        return f"{' + '.join(parts)}, {self.weights}"


def load_words(q: ServingQuestion, users: int) -> str:
    """Describe how requests come; `users`: requests at once of a closed loop."""
    if not q.open_load:
        return f"{users:,} request{'s' * (users != 1)} at once"
    load = f"{q.rate:,.4g} requests/s" if q.trace is None else f"{len(q.trace):,} requests of the trace"
    return load + (f", {q.concurrency:,} at once at most" if q.concurrency else "")
