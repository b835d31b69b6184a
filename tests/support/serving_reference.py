"""Continuous batching without any shortcut: one step after the other, every page with its number.

What the simulation must equal. A page that is given out twice, or a slot too many, fails here.
"""

from dataclasses import dataclass, field
from typing import Any

from phalanx.schedule.generation import BatchingPolicy
from phalanx.serving.simulation.deployment import StepPrice, WorkerSpec
from phalanx.serving.simulation.requests import Requests


def worker(
    price: StepPrice,
    slots: int,
    pages: int,
    page: int = 16,
    chunk: int = 8192,
    mixed: bool = True,
    reserve: bool = False,
    **others: Any,
) -> WorkerSpec:
    """A worker whose policy is given field by field."""
    policy = BatchingPolicy(slots, chunk, page, mixed=mixed, reserve=reserve)
    return WorkerSpec(price, policy, pages, **others)


@dataclass
class Sequence:
    request: int
    priority: int
    target: int = 0  # tokens of the prompt, and of what was generated before a preemption
    cached: int = 0
    produced: int = 0
    decodes: bool = False
    pages: list[int] = field(default_factory=list)


class Pages:
    def __init__(self, count: int, size: int):
        self.free, self.size, self.count = list(range(count)), size, count

    def needed(self, s: Sequence, tokens: int) -> int:
        return max(0, -(-tokens // self.size) - len(s.pages))

    def give(self, s: Sequence, tokens: int) -> None:
        for _ in range(self.needed(s, tokens)):
            s.pages.append(self.free.pop())

    def take_back(self, s: Sequence) -> None:
        self.free += s.pages
        s.pages = []
        assert len(set(self.free)) == len(self.free) <= self.count


def serve(spec: WorkerSpec, requests: Requests, per_step: int = 1) -> tuple[list[float], list[float], int]:
    """Return (first, done, preemptions) of one worker whose sequences advance `per_step` tokens in a step."""
    n = len(requests)
    priority = [0] * n if requests.priority is None else requests.priority.tolist()
    reused = [0] * n if requests.reused is None else requests.reused.tolist()
    adapter = [0] * n if requests.adapter is None else requests.adapter.tolist()
    first, done, preemptions = [-1.0] * n, [-1.0] * n, 0
    closed = requests.arrival is None
    arrival = [0.0] * n if closed else requests.arrival.tolist()
    coming = min(requests.users, n) if closed else n
    queue = [Sequence(i, priority[i]) for i in range(coming)] if closed else []
    ahead = [] if closed else list(range(n))
    running: list[Sequence] = []
    pages, now, lru = Pages(spec.pages, spec.policy.page), 0.0, []

    def finish(s: Sequence) -> None:
        nonlocal coming
        done[s.request] = now
        pages.take_back(s)
        running.remove(s)
        if closed and coming < n:
            arrival[coming] = now
            queue.append(Sequence(coming, priority[coming]))
            coming += 1

    def output(s: Sequence) -> int:
        return int(requests.output[s.request])

    def length(s: Sequence) -> int:
        return int(requests.input[s.request]) + output(s) - 1

    while queue or running or ahead:
        while ahead and arrival[ahead[0]] <= now + 1e-12:
            queue.append(Sequence(ahead[0], priority[ahead.pop(0)]))
        if not queue and not running:
            now = arrival[ahead[0]]
            continue
        rank = lambda s: (s.priority, s.request)  # noqa: E731
        decoding = [s for s in running if s.decodes]

        def growth() -> int:
            if spec.policy.reserve:
                return 0
            return sum(
                pages.needed(s, s.cached + min(per_step, output(s) - s.produced)) for s in running if s.decodes
            )

        while growth() > len(pages.free):
            victim = max(running, key=rank)
            pages.take_back(victim)
            running.remove(victim)
            queue.append(Sequence(victim.request, victim.priority, produced=victim.produced))
            preemptions += 1
        decoding = [s for s in running if s.decodes]
        budget = spec.policy.chunk - (len(decoding) * per_step if spec.policy.mixed else 0)
        chunks, loading = [], 0.0
        for s in (s for s in running if not s.decodes):
            if budget > 0:
                chunks.append((s, min(budget, s.target - s.cached)))
                budget -= chunks[-1][1]
        passed: list[Sequence] = []
        while budget > 0 and queue and len(running) < spec.policy.slots:
            queue.sort(key=rank)
            s = queue[0]
            in_use = {adapter[r.request] for r in running}
            idle = [a for a in lru if a not in in_use]
            if spec.adapters and adapter[s.request] not in lru and len(lru) >= spec.adapters and not idle:
                passed.append(queue.pop(0))
                continue
            target = int(requests.input[s.request]) + s.produced
            to_hold = length(s) if spec.policy.reserve else target
            if -(-to_hold // spec.policy.page) > len(pages.free) - growth():
                break
            queue.pop(0)
            if spec.adapters:
                mine = adapter[s.request]
                if mine in lru:
                    lru.remove(mine)
                else:
                    if len(lru) >= spec.adapters:
                        lru.remove(idle[0])
                    loading += spec.adapter_load_s
                lru.append(mine)
            pages.give(s, to_hold)
            s.target, s.cached = target, reused[s.request]
            running.append(s)
            chunks.append((s, min(budget, s.target - s.cached)))
            budget -= chunks[-1][1]
        queue += passed
        assert len(running) <= spec.policy.slots
        if not chunks and not decoding:
            now = arrival[ahead[0]]
            continue
        context = sum(s.cached + 1 for s in decoding)
        if chunks:
            tokens = sum(c for _, c in chunks)
            pairs = sum(c * (s.cached + (c + 1) / 2) for s, c in chunks)
            beside = decoding if spec.policy.mixed else []
            now += spec.price.mixed(tokens, pairs, len(beside), context if beside else 0) + loading
        else:
            beside = decoding
            now += spec.price.decode(len(decoding), context)[0] + loading
        for s in beside:
            made = min(per_step, output(s) - s.produced)
            pages.give(s, s.cached + made)
            s.cached += made
            s.produced += made
            if s.produced == output(s):
                finish(s)
        for s, c in chunks:
            s.cached += c
            if s.cached == s.target:
                s.decodes = True
                s.produced += 1
                if first[s.request] < 0:
                    first[s.request] = now
                if s.produced == output(s):
                    finish(s)
    assert len(pages.free) == spec.pages
    return first, done, preemptions
