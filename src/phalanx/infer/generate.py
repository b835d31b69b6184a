"""The loop of steps that continues prompts: every rank runs it, alone or in a world.

Prompts are dealt over the replicas of dp in turn. Every rank tracks the requests of all replicas and receives their
tokens after each step, so that all know what each computes next: an idle replica still computes a token if its ranks
hold experts of other replicas, and otherwise waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from phalanx.cost.step.generation import generation_layout
from phalanx.infer.replica import Replica
from phalanx.infer.sampling import Sampling
from phalanx.nn.weight_source import Weights
from phalanx.runtime.comm.communicator import Comm
from phalanx.schedule.generation import IDLE, IDLING, Batch, BatchingPolicy, CacheSeat, Request, Room, Scheduler
from phalanx.spec.errors import InputError
from phalanx.spec.job import DType
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import Mesh
from phalanx.spec.strategy.spec import Strategy

OnToken = Callable[[int, int, bool], None]
"""(request, token, whether it is the last); called on every rank as tokens arrive."""


@dataclass
class GenerationStep:
    """Record of one step: the batches of all replicas; this rank's logits, or None; the sampled tokens of all
    replicas."""

    batches: tuple[Batch, ...]
    logits: Tensor | None = None
    sampled: list[int] = field(default_factory=list)


def experts_span_replicas(model: ModelSpec, grid: Mesh) -> bool:
    """Whether ranks of several replicas share experts, so that all replicas step together."""
    groups = grid.groups("ep+etp") if model.experts is not None else ()
    return any(len({grid.replica(int(rank)) for rank in group}) > 1 for group in groups)


def room_of(schedulers: Sequence[Scheduler], policy: BatchingPolicy, together: bool) -> Room:
    """Return the size of every replica's cache, the same for all. `together`: whether replicas step together; then
    there is an extra page and seat for the token of an idle one."""
    sizes = zip(*((s.pages, s.seats, s.longest) for s in schedulers), strict=True)
    pages, seats, longest = map(max, sizes)
    return Room(pages + together, policy.page, seats + together, min(policy.chunk, longest))


class BatchedGeneration:
    """The requests of all replicas of a world, and this rank's part of the model. All ranks construct it together,
    and call `step` until `done`. Raises InputError."""

    def __init__(
        self,
        model: ModelSpec,
        strategy: Strategy,
        comm: Comm,
        weights: Weights,
        dtype: DType,
        requests: Sequence[Request],
        how: Sampling,
        policy: BatchingPolicy,
    ) -> None:
        layout = generation_layout(model, strategy, dtype)
        self.comm, self.how, self.number = comm, how, 0
        self.view = layout.rank_view(comm.world.rank)
        self.replica_index = layout.mesh.replica(comm.world.rank)
        self.together = experts_span_replicas(model, layout.mesh)
        self.schedulers = [Scheduler(requests[i :: strategy.dp], policy) for i in range(strategy.dp)]
        self.room = room_of(self.schedulers, policy, self.together)
        self.replica = Replica(self.view, comm, weights, self.room)

    @property
    def done(self) -> bool:
        """Whether every request is finished."""
        return all(s.done for s in self.schedulers)

    def batches(self) -> tuple[Batch, ...]:
        """Admit requests and return what every replica computes in the next step."""
        batches = tuple(s.batch(self.number) for s in self.schedulers)
        if self.together and any(b.slots for b in batches):
            batches = tuple(b if b.slots else IDLING for b in batches)
        return batches

    def step(self, receive: OnToken = lambda request, token, last: None) -> GenerationStep:
        """Take one step, all ranks together; `receive` is called with every replica's tokens."""
        step = GenerationStep(self.batches())
        mine = self.replica_index
        batch, scheduler = step.batches[mine], self.schedulers[mine]
        if batch is IDLING:
            last = CacheSeat((self.room.pages - 1,), self.room.seats - 1)
            step.logits = self.replica.step(batch, [0], {IDLE: last})
        else:
            tokens = [t for slot in batch.slots for t in scheduler.tokens(slot)]
            step.logits = self.replica.step(batch, tokens, {s.request: scheduler.cache_seat(s) for s in batch.slots})
        counts = [b.samples for b in step.batches]
        first, total = sum(counts[:mine]), sum(counts)
        step.sampled = self.replica.share(self.replica.choose(step.logits, batch, self.how), first, total)
        rest = iter(step.sampled)
        for batch, scheduler in zip(step.batches, self.schedulers, strict=True):
            if batch is IDLING:
                continue
            sampled = {slot.request: next(rest) for slot in batch.slots if slot.samples}
            finished = scheduler.advance(batch, sampled)
            for request, token in sampled.items():
                receive(request, token, request in finished)
        self.number += 1
        return step


def require_context(model: ModelSpec, requests: Sequence[Request]) -> None:
    """Require that every request has a prompt, and that its prompt and text fit the model. Raises InputError."""
    for r in requests:
        if not r.prompt:
            raise InputError(_prompt_name("prompt", r, requests), "", "is empty", "give it at least one character")
        if len(r.prompt) + r.most > model.max_seq:
            reason = f"is {len(r.prompt)} tokens, and {r.most} more are {len(r.prompt) + r.most}: model.max_seq is"
            remedy = "shorten it, or ask for fewer tokens"
            raise InputError(_prompt_name("prompt", r, requests), None, f"{reason} {model.max_seq}", remedy)


def _prompt_name(option: str, r: Request, requests: Sequence[Request]) -> str:
    return option if len(requests) == 1 else f"{option} {r.number + 1}"
