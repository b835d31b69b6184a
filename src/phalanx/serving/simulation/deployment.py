"""A deployment: workers with their slots, cache and scheduling, and the link that transfers caches between them."""

from dataclasses import dataclass
from typing import Literal, Protocol

from phalanx.schedule.generation import BatchingPolicy
from phalanx.serving.simulation.requests import Requests
from phalanx.spec.errors import InputError

UNBOUNDED = 1 << 60


class StepPrice(Protocol):
    """Seconds of a step of an engine, by the contents of its batch, on the GPUs of one copy of the model.

        step(prompt tokens, attended pairs, sequences, context)

    `prompt tokens` are computed in this step, and each attends to earlier ones: `pairs` counts all (query, key),
    n (past + (n + 1) / 2) for n tokens of a prompt with `past` in the cache. Each of the `sequences` generates a
    token, and `context` is the sum of their cached tokens. Between two changes of the batch only the context grows,
    by a token per sequence and step; if the price is linear in the context, a run of such steps needs no loop:

        sum over i < k of (t + q i) = k t + q k (k - 1) / 2
    """

    def decode(self, sequences: int, context: int) -> tuple[float, float, int]:
        """Return (seconds of a decoding step, seconds per further token of context, context up to which this line
        holds)."""
        ...

    def mixed(self, tokens: int, pairs: float, sequences: int, context: int, uneven: float = 1.0) -> float:
        """Return the seconds of a step with `tokens` of prompts, and `sequences` that decode, if any.

        `uneven`: prompt tokens in the busiest attention group, over the mean of all groups."""
        ...


Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding (Leviathan et al. 2023): a step verifies `tokens` drafted tokens of each sequence, and
    each is accepted with probability `acceptance` if the one before it was. A step yields 1 to tokens + 1 tokens,
    with a mean of (1 - acceptance^(tokens + 1)) / (1 - acceptance). The price includes drafting and verifying."""

    tokens: int
    acceptance: float

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError("speculation.tokens", self.tokens, "must be at least 1")
        if not 0 <= self.acceptance <= 1:
            raise InputError("speculation.acceptance", self.acceptance, "must be in [0, 1]")

    @property
    def mean(self) -> float:
        """Mean tokens of a step."""
        a, k = self.acceptance, self.tokens
        return k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)


@dataclass(frozen=True)
class WorkerSpec:
    """One worker: a copy of the model, and the scheduling of its engine."""

    price: StepPrice
    policy: BatchingPolicy
    pages: int
    """Pages of its KV cache."""
    stages: int = 1
    """Pipeline stages. The prompt tokens of a step pass through them in up to `stages` chunks, one after another. The
    price of a step is of one chunk through all stages; the last of m chunks leaves (m - 1) / stages of that later."""
    groups: int = 1
    """Groups of GPUs, each of which computes attention for its own requests (attention data parallelism). Prompts are
    dealt to them in turn, and each computes at most its share of the policy's `chunk`; slots and pages are of all
    groups."""
    role: Role = "both"
    """prefill: passes each request on after its first token. decode: receives requests with their cache."""
    speculation: Speculation | None = None
    adapters: int = 0
    """The most LoRA adapters of a batch; 0: requests use none."""
    adapter_load_s: float = 0.0
    """Seconds to load an adapter that is not on the GPU."""

    def __post_init__(self) -> None:
        if self.pages < 1:
            raise InputError("worker.pages", self.pages, "must be at least 1")
        slots, chunk = self.policy.slots, self.policy.chunk
        if chunk < self.groups:
            raise InputError("worker.policy.chunk", chunk, f"is less than one for each of {self.groups} groups")
        if self.policy.mixed and self.role != "prefill" and chunk <= self.tokens_per_sequence * slots:
            each = self.tokens_per_sequence
            reason = f"leaves no tokens for prompts when {slots} sequences decode {each} each"
            raise InputError("worker.policy.chunk", chunk, reason, "raise it, or lower the slots")

    @property
    def tokens_per_sequence(self) -> int:
        """Tokens that a step computes of a decoding sequence: the latest one, and drafted ones."""
        return 1 + (self.speculation.tokens if self.speculation else 0)


@dataclass(frozen=True)
class Transfer:
    """The link over which a prefill worker sends caches, one after the other."""

    bytes_per_token: float
    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Return the seconds to transfer the cache of a prompt."""
        return self.latency_s + tokens * self.bytes_per_token / self.bytes_per_s


@dataclass(frozen=True)
class Deployment:
    """All workers. Raises InputError for a combination of roles that cannot serve."""

    workers: tuple[WorkerSpec, ...]
    transfer: Transfer | None = None
    """The link between prefill and decode workers; None: every worker does both."""
    accept_s: float = 0.0
    """Seconds of the server's single process for a request before a worker can begin it: HTTP and the chat
    template."""
    accept_token_s: float = 0.0
    """The same, for each token of its prompt."""

    def __post_init__(self) -> None:
        roles = {w.role for w in self.workers}
        if roles not in ({"both"}, {"prefill", "decode"}):
            raise InputError(
                "deployment", ", ".join(sorted(roles)), "needs workers of role both, or prefill and decode"
            )
        if (self.transfer is None) != (roles == {"both"}):
            raise InputError("deployment.transfer", None, "is for workers that prefill and others that decode")


def require_fits(deployment: Deployment, requests: Requests) -> None:
    """Require that every worker's cache holds the longest request alone. Raises InputError."""
    longest = int((requests.input + requests.output - 1).max())
    prompt = int(requests.input.max())
    for w in deployment.workers:
        tokens = prompt if w.role == "prefill" else longest
        if w.policy.pages_of(tokens) > w.pages:
            room = w.pages * w.policy.page
            reason = f"the longest request needs {tokens:,} tokens, and a {w.role} worker's cache holds {room:,}"
            raise InputError("cache", None, reason, "more tensor parallelism, or a smaller type of cache")
