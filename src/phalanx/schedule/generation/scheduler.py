"""Continuous batching (Yu et al. 2022, "Orca") over a KV cache in pages (Kwon et al. 2023, "PagedAttention").

Requests come and go between steps. A waiting one gets a slot, in order of arrival, when a slot is free and the pages
of its longest context are: so that none is ever thrown out. Each step computes a token of every request whose prompt
is cached, and up to `chunk` tokens in all: what that leaves goes to prompts, in order (Agrawal et al. 2023,
"Sarathi": chunked prefill). Pages are handed out as tokens come.

A scheduler is a function of the tokens that it is told: every rank runs one for each replica, and all agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phalanx.schedule.generation.batch import Batch, Slot
from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class Request:
    """A prompt, token ids, to continue by at most `most` tokens, until one of `stops`. It can start at step
    `arrives`."""

    number: int
    prompt: tuple[int, ...]
    most: int
    stops: tuple[int, ...] = ()
    arrives: int = 0

    @property
    def longest(self) -> int:
        """Tokens of its longest context: the last one that is sampled is never computed."""
        return len(self.prompt) + self.most - 1


@dataclass(frozen=True)
class Limits:
    """What one replica computes and caches at most. Raises InputError for numbers below 1."""

    slots: int = 16
    """Requests that run at once."""
    chunk: int = 512
    """Tokens of a step, prompts and decoding together; every request that decodes has one in any case."""
    page: int = 16
    """Tokens of a page of the KV cache."""
    pages: int | None = None
    """Pages of the cache; None: as many as the requests need that run at once."""

    def __post_init__(self) -> None:
        for name in ("slots", "chunk", "page", "pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name}", value, "must be at least 1")

    def pages_of(self, request: Request) -> int:
        """Pages of a request's longest context."""
        return -(-request.longest // self.page)

    def enough(self, requests: Iterable[Request]) -> int:
        """Return the pages of the cache: `pages`, or as many as any `slots` of these requests need. Raises InputError
        where one of them alone needs more."""
        needs = sorted((self.pages_of(r) for r in requests), reverse=True)
        most = needs[0] if needs else 1
        if self.pages is None:
            return max(1, sum(needs[: self.slots]))
        if most > self.pages:
            reason = f"hold {self.pages * self.page} tokens, and a request's prompt and text need {most} pages"
            raise InputError(
                "--pages", self.pages, reason, f"use {most} or more of {self.page} tokens, or shorter texts"
            )
        return self.pages


@dataclass
class _Running:
    request: Request
    tokens: list[int]  # prompt and text
    cached: int = 0
    pages: list[int] = field(default_factory=list)


class Scheduler:
    """The requests of one replica: those that wait, those that run, and whose pages are whose."""

    def __init__(self, requests: Iterable[Request], limits: Limits) -> None:
        mine = sorted(requests, key=lambda r: (r.arrives, r.number))
        self.limits, self.pages = limits, limits.enough(mine)
        self._waiting, self._running = deque(mine), dict[int, _Running]()
        self._free = list(range(self.pages - 1, -1, -1))
        self._promised = 0  # pages of the longest contexts of all that run

    @property
    def done(self) -> bool:
        """Whether every request has its text."""
        return not self._waiting and not self._running

    def batch(self, step: int) -> Batch:
        """Admit requests and return what step number `step` computes; without slots if there is nothing yet."""
        while self._waiting and self._waiting[0].arrives <= step and len(self._running) < self.limits.slots:
            needed = self.limits.pages_of(self._waiting[0])
            if self._promised + needed > self.pages:
                break
            request = self._waiting.popleft()
            self._promised += needed
            self._running[request.number] = _Running(request, list(request.prompt))
        decoding: list[_Running] = []
        prompts: list[_Running] = []
        for r in self._running.values():
            (decoding if len(r.tokens) - r.cached == 1 and r.cached else prompts).append(r)
        slots = [Slot(r.request.number, r.cached, 1, True) for r in decoding]
        room = self.limits.chunk - len(slots)
        for r in prompts:
            new = min(room, len(r.tokens) - r.cached)
            if new < 1:
                break
            room -= new
            slots.append(Slot(r.request.number, r.cached, new, r.cached + new == len(r.tokens)))
        if not slots:
            return Batch(())
        for slot in slots:
            r = self._running[slot.request]
            while len(r.pages) * self.limits.page < slot.context:
                r.pages.append(self._free.pop())
        return Batch.of(slots)

    def tokens(self, slot: Slot) -> list[int]:
        """Return the tokens that a slot of the current batch computes."""
        return self._running[slot.request].tokens[slot.past : slot.context]

    def table(self, slot: Slot) -> tuple[int, ...]:
        """Return the pages of a slot of the current batch, in the order of its tokens: its row of the block table."""
        return tuple(self._running[slot.request].pages)

    def advance(self, batch: Batch, sampled: Mapping[int, int]) -> list[int]:
        """Take the tokens that the current batch sampled, by request; return the requests that are finished."""
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
                self._promised -= self.limits.pages_of(r.request)
        return finished
