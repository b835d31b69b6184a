"""Continuous batching: its policy, the batch of a step, and our own scheduler, which has the tokens, pages and block
tables of one replica.

Requests are admitted in order of arrival, with the pages of their longest context, so that none is ever preempted.
Pages are handed out as tokens come, and each has a seat while it runs. A scheduler is a deterministic function of the
tokens it receives: every rank runs one for each replica, and all agree.

The batch of one step of generation is the tokens that a replica computes, by request:

    prefill   tokens of a prompt, all of it or a chunk; the last chunk gives the request's first token
    decode    one token, the latest, of a request whose prompt is cached

Slots that decode come first, so that they attend together; tokens are flat, slot after slot: (1, tokens).

The policy says which requests run, and what a step computes, after Yu et al. 2022, "Orca", and Kwon et al. 2023,
"PagedAttention":

    admission   The first waiting request starts when a slot and enough pages are free: for its longest
                context (`reserve`: nothing is ever preempted), or for its prompt.
    step        One token of every request that decodes. The rest of `chunk` goes to prompts, in order,
                cut to fit (Agrawal et al. 2023, "Sarathi"); without `mixed`, prompts have steps of their own.

Our generation (Scheduler, with tokens and page tables) and the simulation of serving engines (which advances many
steps at once) are two executions of it; a drawn test compares them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class BatchingPolicy:
    """Limits on what one replica or engine computes and caches. Raises InputError for numbers below 1."""

    slots: int = 16
    """Maximum number of concurrent requests."""
    chunk: int = 512
    """Maximum tokens in a step, prompts and decoding together; every decoding request has one regardless."""
    page: int = 16
    """Tokens in one page of the KV cache."""
    pages: int | None = None
    """Pages in the cache; None: enough for all concurrent requests."""
    mixed: bool = True
    """Whether prompts share a step with requests that decode; otherwise decoding waits while prompts are computed."""
    reserve: bool = True
    """Whether a request starts only when pages for its longest context are free; otherwise a full cache preempts the
    youngest request of the lowest priority, which is recomputed later."""

    def __post_init__(self) -> None:
        for name in ("slots", "chunk", "page", "pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(name, value, "must be at least 1")

    def pages_of(self, tokens: int) -> int:
        """Number of pages needed for this many tokens."""
        return -(-tokens // self.page)

    def pages_to_begin(self, prompt: int, output: int, cached: int) -> int:
        """Number of pages allocated when a request of `prompt` and `output` tokens is admitted, with `cached` tokens
        to compute or receive before it decodes. The last sampled token is never computed."""
        return self.pages_of(prompt + output - 1 if self.reserve else cached)

    def admits(self, running: int, wanted: int, free: int) -> bool:
        """Whether a request that needs `wanted` of the `free` pages can start while `running` others run."""
        return running < self.slots and wanted <= free

    def prompt_budget(self, decoding: int) -> int:
        """Token budget left for prompts in a step that decodes `decoding` tokens."""
        return self.chunk - decoding if self.mixed else self.chunk


IDLE = -1
"""Placeholder request of an idle replica that must still take part in a step; nothing of it is cached."""


@dataclass(frozen=True)
class Slot:
    """A running request's part of a step: it computes `new` tokens after `past` cached ones. `samples`: whether the
    last of them yields the next token, which is false while more of the prompt follows."""

    request: int
    past: int
    new: int
    samples: bool

    @property
    def decodes(self) -> bool:
        """Whether the slot decodes: one new token after cached ones."""
        return self.new == 1 and self.past > 0

    @property
    def context(self) -> int:
        """Tokens of the request in the cache after the step."""
        return self.past + self.new


@dataclass(frozen=True)
class Batch:
    """Slots of one replica in one step; decoding slots come first."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Batch:
        """Build a batch of these slots, decoding ones first."""
        return cls(tuple(sorted(slots, key=lambda s: not s.decodes)))

    @cached_property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(s.new for s in self.slots)

    @cached_property
    def samples(self) -> int:
        """Number of requests that receive a token."""
        return sum(s.samples for s in self.slots)

    @cached_property
    def decoding(self) -> tuple[Slot, ...]:
        """The slots that decode."""
        return tuple(s for s in self.slots if s.decodes)

    @cached_property
    def prefilling(self) -> tuple[Slot, ...]:
        """The other slots."""
        return self.slots[len(self.decoding) :]


IDLING = Batch((Slot(IDLE, 0, 1, False),))
"""The batch of an idle replica whose ranks hold experts that other replicas need."""


def reads(batch: Batch, window: int | None) -> tuple[tuple[tuple[Slot, ...], int], ...]:
    """Return the groups of slots that attend together in a layer with this window, each with the number of keys per
    query: all decoding slots as one group, padded to the longest context; every prefill separately."""
    groups = []
    if batch.decoding:
        groups.append((batch.decoding, max(s.context - first_key(s, window) for s in batch.decoding)))
    return (*groups, *(((s,), s.context - first_key(s, window)) for s in batch.prefilling))


def first_key(slot: Slot, window: int | None) -> int:
    """Return the first position visible to the new tokens of a slot."""
    return 0 if window is None else max(0, slot.past + 1 - window)


@dataclass(frozen=True)
class Room:
    """Size of a replica's cache."""

    pages: int
    page: int
    """Tokens of a page."""
    seats: int
    """Requests at a time; each has its own state of every recurrence, and its last tokens for every window."""
    new: int
    """Most tokens of a request in one step."""

    @property
    def tokens(self) -> int:
        """Tokens of all pages."""
        return self.pages * self.page

    def last_tokens(self, window: int | None) -> int | None:
        """Return how many tokens a seat keeps in a layer with this window: those that the first new token of a step
        sees, and the new ones, which overwrite the tokens that no later one sees. None: the layer's tokens are in
        pages, which take less memory."""
        if window is None or self.seats * (rolling := window - 1 + self.new) >= self.tokens:
            return None
        return rolling


@dataclass(frozen=True)
class CacheSeat:
    """The pages and the seat of a running request in the cache."""

    pages: tuple[int, ...]
    """In the order of its tokens: its row of the block table."""
    seat: int


@dataclass(frozen=True)
class Request:
    """A prompt (token ids) to continue by at most `most` tokens, or until one of the tokens `stops`; it may start at
    step `arrives` or later."""

    number: int
    prompt: tuple[int, ...]
    most: int
    stops: tuple[int, ...] = ()
    arrives: int = 0


def pages_of(request: Request, policy: BatchingPolicy) -> int:
    """Number of pages allocated when a request is admitted."""
    prompt = len(request.prompt)
    return policy.pages_to_begin(prompt, request.most, prompt)


def enough_pages(requests: Iterable[Request], policy: BatchingPolicy) -> int:
    """Return the number of pages in the cache: the policy's, or enough for any `slots` of these requests. Raises
    InputError if a single request needs more."""
    needs = sorted((pages_of(r, policy) for r in requests), reverse=True)
    most = needs[0] if needs else 1
    if policy.pages is None:
        return max(1, sum(needs[: policy.slots]))
    if most > policy.pages:
        reason = f"hold {policy.pages * policy.page} tokens, and a request's prompt and text need {most} pages"
        remedy = f"use {most} or more of {policy.page} tokens, or shorter texts"
        raise InputError("pages", policy.pages, reason, remedy)
    return policy.pages


@dataclass
class _Running:
    request: Request
    tokens: list[int]  # prompt and text
    seat: int
    cached: int = 0
    pages: list[int] = field(default_factory=list)


class Scheduler:
    """Waiting and running requests of one replica, and the pages and the seat of each."""

    def __init__(self, requests: Iterable[Request], policy: BatchingPolicy) -> None:
        by_arrival = sorted(requests, key=lambda r: (r.arrives, r.number))
        self.policy, self.pages = policy, enough_pages(by_arrival, policy)
        self._waiting, self._running = deque(by_arrival), dict[int, _Running]()
        self.seats = min(policy.slots, len(by_arrival))
        self.longest = max((len(r.prompt) for r in by_arrival), default=1)
        self._free, self._fresh = list[int](), iter(range(self.pages))
        self._seats = list(range(self.seats - 1, -1, -1))
        self._promised = 0  # pages reserved for the longest contexts of running requests

    @property
    def done(self) -> bool:
        """Whether every request is finished."""
        return not self._waiting and not self._running

    def batch(self, step: int) -> Batch:
        """Admit requests and return what step number `step` computes; a batch without slots if there is nothing to do
        yet."""
        # Admit waiting requests.
        while self._waiting and self._waiting[0].arrives <= step:
            needed = pages_of(self._waiting[0], self.policy)
            if not self.policy.admits(len(self._running), needed, self.pages - self._promised):
                break
            request = self._waiting.popleft()
            self._promised += needed
            self._running[request.number] = _Running(request, list(request.prompt), self._seats.pop())
        # Decode one token each; the rest of the budget goes to prompts.
        decoding: list[_Running] = []
        prompts: list[_Running] = []
        for r in self._running.values():
            (decoding if len(r.tokens) - r.cached == 1 and r.cached else prompts).append(r)
        slots = [Slot(r.request.number, r.cached, 1, True) for r in decoding]
        room = self.policy.prompt_budget(len(slots))
        for r in prompts:
            new = min(room, len(r.tokens) - r.cached)
            if new < 1:
                break
            room -= new
            slots.append(Slot(r.request.number, r.cached, new, r.cached + new == len(r.tokens)))
        if not slots:
            return Batch(())
        # Allocate pages for the new tokens.
        for slot in slots:
            r = self._running[slot.request]
            while len(r.pages) * self.policy.page < slot.context:
                r.pages.append(self._free.pop() if self._free else next(self._fresh))
        return Batch.of(slots)

    def tokens(self, slot: Slot) -> list[int]:
        """Return the tokens that a slot of the current batch computes."""
        return self._running[slot.request].tokens[slot.past : slot.context]

    def cache_seat(self, slot: Slot) -> CacheSeat:
        """Return the pages and the seat of the request of a slot of the current batch."""
        r = self._running[slot.request]
        return CacheSeat(tuple(r.pages), r.seat)

    def advance(self, batch: Batch, sampled: Mapping[int, int]) -> list[int]:
        """Record the tokens sampled by the current batch, by request; return the finished requests."""
        finished = []
        for slot in batch.slots:
            r = self._running[slot.request]
            r.cached = slot.context
            if not slot.samples:
                continue
            token = sampled[slot.request]
            r.tokens.append(token)
            if len(r.tokens) - len(r.request.prompt) == r.request.most or token in r.request.stops:
                finished.append(slot.request)
                del self._running[slot.request]
                self._free += reversed(r.pages)
                self._seats.append(r.seat)
                self._promised -= pages_of(r.request, self.policy)
        return finished
