"""Our own continuous batching: the tokens, pages and block tables of one replica under a BatchingPolicy (policy.py).

Requests are admitted in order of arrival, with the pages of their longest context, so that none is ever preempted.
Pages are handed out as tokens come. A scheduler is a deterministic function of the tokens it receives: every rank
runs one for each replica, and all agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phalanx.schedule.generation.batch import Batch, Slot
from phalanx.schedule.generation.policy import BatchingPolicy
from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class Request:
    """Prompt token ids, to continue by at most `most` tokens or until one of `stops`; may start from step `arrives`
    on."""

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
    """Return the number of pages in the cache: the policy's, or enough for any `slots` of these requests.

    Raises InputError if a single request needs more."""
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
    cached: int = 0
    pages: list[int] = field(default_factory=list)


class Scheduler:
    """Waiting and running requests of one replica, and the pages of each."""

    def __init__(self, requests: Iterable[Request], policy: BatchingPolicy) -> None:
        by_arrival = sorted(requests, key=lambda r: (r.arrives, r.number))
        self.policy, self.pages = policy, enough_pages(by_arrival, policy)
        self._waiting, self._running = deque(by_arrival), dict[int, _Running]()
        self._free = list(range(self.pages - 1, -1, -1))
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
            self._running[request.number] = _Running(request, list(request.prompt))
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
                r.pages.append(self._free.pop())
        return Batch.of(slots)

    def tokens(self, slot: Slot) -> list[int]:
        """Return the tokens that a slot of the current batch computes."""
        return self._running[slot.request].tokens[slot.past : slot.context]

    def table(self, slot: Slot) -> tuple[int, ...]:
        """Return the pages of a slot of the current batch, in the order of its tokens: its row of the block table."""
        return tuple(self._running[slot.request].pages)

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
                self._promised -= pages_of(r.request, self.policy)
        return finished
