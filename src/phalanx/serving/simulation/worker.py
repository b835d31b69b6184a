"""A worker under a BatchingPolicy (schedule/generation.py), advanced in events.

    plan     decides the next work: a step that computes chunks of prompts, or a run of steps that only decode
    cut      ends a run early, at the first step boundary after an arrival
    finish   applies the work: tokens, pages, finished requests

Decoding steps are numbered. The steps that need new pages are known when a sequence joins, so a calendar by step
number gives the length of a run; there is no work per token.

    cache after prefill:  T tokens.  After its step i:  T + a_i, where a_i = i + 1, or the tokens accepted so far.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

import numpy as np

from phalanx.serving.simulation.adapters import Adapters, Entry
from phalanx.serving.simulation.deployment import WorkerSpec

_POOL = 1 << 18  # the fewest draws of speculation, which requests read from different places


class Requested:
    """The state that the workers of one simulation share: the requests as lists, and their progress."""

    def __init__(
        self, input: list[int], output: list[int], reused: list[int], priority: list[int], adapter: list[int]
    ):
        n = len(input)
        self.input, self.output, self.reused, self.priority, self.adapter = input, output, reused, priority, adapter
        self.produced = [0] * n
        """Tokens sent before the request was last admitted."""
        self.admitted = [-1.0] * n
        self.first = [-1.0] * n
        self.after = [0.0] * n
        """Seconds of its worker's step after its first token."""
        self.done = [-1.0] * n
        self.preemptions = 0


class Worker:
    """One worker's queue, batch and cache. `on_first` and `on_done` are called with (request, time)."""

    def __init__(
        self,
        spec: WorkerSpec,
        shared: Requested,
        seed: int,
        on_first: Callable[[int, float], None],
        on_done: Callable[[int, float], None],
    ):
        self.spec, self.shared, self.on_first, self.on_done = spec, shared, on_first, on_done
        # A worker that only prefills generates nothing to reserve pages for.
        self.policy = spec.policy if spec.role != "prefill" else replace(spec.policy, reserve=False)
        self.waiting: list[Entry] = []  # a heap
        self.prefilling: deque[list[int]] = deque()  # [request, tokens in the cache, tokens of the prompt, group]
        self.admissions = 0
        self.decoding: dict[int, tuple[int, int, int, Any]] = {}  # request: (first step, T, steps, a or None)
        self.finishing: list[tuple[int, int]] = []  # heap of (step, request); may name requests that were preempted
        self.step = 0
        self.context = 0
        self.free = spec.pages
        self.need: np.ndarray[Any, Any] = np.zeros(1 << 14, np.int64)
        self.grow: np.ndarray[Any, Any] = np.zeros(1 << 14 if spec.speculation else 0, np.int64)
        self.adapters = Adapters(spec.adapters, spec.adapter_load_s) if spec.adapters else None
        self.stalls: list[tuple[float, int]] = []  # (seconds, sequences) that waited for steps of prompts alone
        self.fresh: list[int] = []  # requests whose first token the last step computed
        self.busy = False
        self.version = 0
        self.run = 0  # steps of the run under way; 0: a step with prompts
        self.chunks: list[tuple[list[int], int]] = []
        self.began = self.ends = self.first_s = self.slope_s = 0.0
        self.times: Any = None  # of a run with speculation: seconds after each step
        self.sent: list[tuple[float, float, int]] = []
        """(end, seconds, tokens) of each run."""
        self.gaps: list[tuple[int, float, float]] = []
        """(tokens, gap before the first of them, before the last): times between the tokens of a sequence."""
        self.growing = 0  # new pages of the next decoding step
        if spec.speculation:
            k, a = spec.speculation.tokens, spec.speculation.acceptance
            wins = np.random.default_rng(seed).random((max(_POOL, 2 * max(shared.output)), k)) < a
            self.drawn = np.concatenate(([0], np.cumsum(1 + np.cumprod(wins, axis=1).sum(axis=1))))

    def add(self, request: int, with_tokens: int = 0) -> None:
        """Put a request in the queue, with `with_tokens` tokens of its cache."""
        heappush(self.waiting, (self.shared.priority[request], request, with_tokens))

    # Planning

    def plan(self, now: float) -> bool:
        """Plan the work from `now` on, and set `ends`; return whether there is any."""
        busy = self._plan_next(now)
        for request in self.fresh:
            self.shared.after[request] = self.first_s if busy else 0.0
        self.fresh = []
        return busy

    def _plan_next(self, now: float) -> bool:
        spec = self.spec
        self.version += 1
        self._make_room()
        self.chunks = []
        loading = self._fill(now) if self.prefilling or self.waiting else 0.0
        self.busy = bool(self.chunks or self.decoding)
        if not self.busy:
            return False
        self.began = now
        if self.chunks:
            self.run = 0
            tokens, pairs = 0, 0.0
            for item, n in self.chunks:
                tokens += n
                pairs += n * (item[1] + 0.5 * (n + 1))
            others = len(self.decoding) if self.policy.mixed else 0
            context = self.context if others else 0
            uneven = max(self._group_tokens()) * spec.groups / tokens if spec.groups > 1 else 1.0
            self.first_s = spec.price.mixed(tokens, pairs, others, context, uneven) + loading
            self.ends = now + self.first_s
            return True
        self._plan_run(now, loading)
        return True

    def _fill(self, now: float) -> float:
        """Admit requests, and cut chunks of prompts for the next step; return the seconds of loading adapters."""
        spec = self.spec
        budget = self.policy.prompt_budget(len(self.decoding) * spec.tokens_per_sequence)
        left = [budget // spec.groups] * spec.groups
        for item in self.prefilling:
            self._cut(item, left)
        loading = 0.0
        while self.waiting and (self.waiting[0][2] or left[self.admissions % spec.groups] > 0):
            if (admissible := self._admissible()) is None:
                break
            request, with_tokens, seconds = admissible
            loading += seconds
            self._take(request, with_tokens, now)
            if with_tokens:  # its cache was transferred
                self._join(request, with_tokens)
                self.growing = 0 if self.policy.reserve else int(self.need[self.step])
                continue
            tokens = self.shared.input[request] + self.shared.produced[request]
            reused = self.shared.reused[request] if spec.role != "decode" else 0
            item = [request, reused, tokens, self.admissions % spec.groups]
            self.admissions += 1
            self.prefilling.append(item)
            self._cut(item, left)
        return loading

    def _cut(self, item: list[int], left: list[int]) -> None:
        """Cut a prompt's next chunk from the rest of its group's share of the step."""
        n = min(left[item[3]], item[2] - item[1])
        if n > 0:
            self.chunks.append((item, n))
            left[item[3]] -= n

    def _group_tokens(self) -> list[int]:
        """Return the prompt tokens of the next step, by attention group."""
        tokens = [0] * self.spec.groups
        for item, n in self.chunks:
            tokens[item[3]] += n
        return tokens

    def admits(self) -> bool:
        """Whether slots and pages let the first waiting request begin at the next step boundary."""
        if not self.waiting:
            return False
        running = len(self.prefilling) + len(self.decoding)
        if self.spec.adapters:
            return running < self.policy.slots  # later requests may begin before the first
        _, request, tokens = self.waiting[0]
        return self.policy.admits(running, self._pages_wanted(request, tokens), self.free)

    def _begin(self, request: int, now: float) -> None:
        self.shared.first[request] = now
        self.fresh.append(request)

    def _pages_to_begin(self, request: int, tokens: int) -> int:
        s = self.shared
        cached = tokens or s.input[request] + s.produced[request]
        return self.policy.pages_to_begin(s.input[request], s.output[request], cached)

    def _pages_wanted(self, request: int, tokens: int) -> int:
        """Return the pages that must be free for a request to begin, with the pages of the first step of a
        transferred one."""
        begin = self._pages_to_begin(request, tokens)
        if not tokens or self.policy.reserve:
            return begin
        s = self.shared
        next_step = min(tokens + self.spec.tokens_per_sequence, s.input[request] + s.output[request] - 1)
        return max(begin, self.policy.pages_of(next_step))

    def _admissible(self) -> tuple[int, int, float] | None:
        """Take the first request of the queue that can begin: (request, tokens with it, seconds of loading).

        A request passes others only if their adapters have no place."""
        running, free = len(self.prefilling) + len(self.decoding), self.free - self.growing
        while self.waiting:
            _, request, tokens = self.waiting[0]
            if self.adapters and not self.adapters.has_place(self.shared.adapter[request]):
                self.adapters.passed.append(heappop(self.waiting))
                continue
            if not self.policy.admits(running, self._pages_wanted(request, tokens), free):
                break
            heappop(self.waiting)
            return request, tokens, self.adapters.use(self.shared.adapter[request]) if self.adapters else 0.0
        return None

    def _take(self, request: int, tokens: int, now: float) -> None:
        self.free -= self._pages_to_begin(request, tokens)
        if self.shared.admitted[request] < 0:
            self.shared.admitted[request] = now
        if tokens and self.shared.first[request] < 0:  # a decode worker sends the first token too
            self._begin(request, now)

    def _join(self, request: int, tokens: int) -> None:
        """Add a request with `tokens` in the cache to the decoding ones, from the next step on."""
        s, spec = self.shared, self.spec
        left = s.output[request] - s.produced[request]
        begin, accepted, steps = self.step, None, left
        if spec.speculation:
            at = (request * 7919 + s.produced[request]) % max(1, len(self.drawn) - 1 - left)
            accepted = np.minimum(self.drawn[at + 1 : at + 1 + left] - self.drawn[at], left)
            steps = int(np.searchsorted(accepted, left)) + 1
            accepted = accepted[:steps]
        self._extend(begin + steps + 1)
        if accepted is not None:
            self.grow[begin : begin + steps] += np.diff(accepted, prepend=0)
        self.decoding[request] = (begin, tokens, steps, accepted)
        self._book(request, 0, 1)
        heappush(self.finishing, (begin + steps, request))
        self.context += tokens + 1

    def _book(self, request: int, after: int, sign: int) -> None:
        """Add to the calendar (`sign` 1), or remove from it (-1), a sequence's steps that need a page, from its
        `after`-th step on."""
        if self.policy.reserve:
            return
        begin, tokens, steps, accepted = self.decoding[request]
        page = self.policy.page
        if accepted is None:
            first = -tokens % page
            if first < after:
                first += -(-(after - first) // page) * page
            self.need[begin + first : begin + steps : page] += sign
            return
        edges = np.arange(-(-tokens // page) * page, tokens + accepted[-1], page) - tokens
        places = np.searchsorted(accepted, edges, side="right")
        np.add.at(self.need, begin + places[places >= after], sign)

    def _extend(self, size: int) -> None:
        while size >= len(self.need):
            self.need = np.concatenate((self.need, np.zeros_like(self.need)))
            if self.spec.speculation:
                self.grow = np.concatenate((self.grow, np.zeros_like(self.grow)))

    # Runs of steps that only decode

    def _plan_run(self, now: float, loading: float) -> None:
        """Plan a run up to the first end of a sequence, the first lack of pages, or the end of the price's line."""
        while self.finishing[0][1] not in self.decoding or self._ends(self.finishing[0][1]) != self.finishing[0][0]:
            heappop(self.finishing)
        steps = self.finishing[0][0] - self.step
        batch, page = len(self.decoding), self.policy.page
        # The bound on pages of a sequence in `steps` steps is quick; with speculation only the calendar knows.
        if self.spec.speculation or batch * (steps // page + 1) > self.free:
            needed = np.cumsum(self.need[self.step : self.step + steps])
            if needed[-1] > self.free:
                steps = int(np.searchsorted(needed, self.free, side="right"))
        seconds, slope, line_end = self.spec.price.decode(batch, self.context)
        self.first_s, self.times = seconds, None
        seconds += loading
        if self.spec.speculation:
            grows = self.grow[self.step : self.step + steps]
            grown = np.cumsum(grows) - grows  # before each step
            inside = int(np.searchsorted(grown, line_end - self.context, side="right"))
            steps = max(1, min(steps, inside))
            self.times = loading + np.cumsum(self.first_s + slope * grown[:steps])
            self.slope_s = slope
            self.run, self.ends = steps, now + float(self.times[-1])
            return
        self.slope_s = slope * batch
        self.run = max(1, min(steps, (line_end - self.context) // batch + 1))
        self.began = now + loading
        self.ends = self.began + self._elapsed(self.run)

    def _ends(self, request: int) -> int:
        begin, _, steps, _ = self.decoding[request]
        return begin + steps

    def _elapsed(self, steps: int) -> float:
        return steps * self.first_s + self.slope_s * (0.5 * steps * (steps - 1))

    def cut(self, now: float) -> bool:
        """End the current run at the first step boundary from `now` on; return whether it ends earlier than
        planned."""
        if not self.busy or self.run < 2:
            return False
        if self.times is not None:
            steps = min(int(np.searchsorted(self.times, now - self.began)) + 1, self.run)
        else:
            waited, q = max(0.0, now - self.began), self.slope_s
            t = self.first_s - 0.5 * q  # elapsed(k) = q/2 k^2 + t k
            root = waited / t if q <= 0 else 2 * waited / (t + math.sqrt(t * t + 2 * q * waited))
            steps = max(1, min(self.run, math.ceil(root - 1e-9)))
        if steps >= self.run:
            return False
        self.run = steps
        self.ends = self.began + (self._elapsed(steps) if self.times is None else float(self.times[steps - 1]))
        self.version += 1
        return True

    # Results

    def finish(self) -> None:
        """Apply the planned work at its end."""
        now = self.ends
        self.busy = False
        if self.run:
            self._decoded(self.run, now, self._last_gap())
            return
        if self.decoding:
            if self.policy.mixed:
                self._decoded(1, now, self.first_s)
            else:
                self.stalls.append((self.first_s, len(self.decoding)))
        ready = 0
        for item, n in self.chunks:
            item[1] += n
            if item[1] == item[2]:
                ready += 1
                self.prefilling.remove(item) if self.prefilling[0] is not item else self.prefilling.popleft()
                self._computed(item[0], item[2], now + self._behind())
        if ready:
            self.sent.append((now, self.first_s, ready))

    def _last_gap(self) -> float:
        if self.times is None:
            return self.first_s + self.slope_s * (self.run - 1)
        return float(self.times[self.run - 1] - (self.times[self.run - 2] if self.run > 1 else 0.0))

    def _behind(self) -> float:
        """Return the seconds by which a prompt's last chunk leaves the pipeline after the step's first."""
        if self.spec.stages == 1:
            return 0.0
        chunk = max(1, self.policy.chunk // self.spec.stages // self.spec.groups)
        chunks = min(self.spec.stages, -(-max(self._group_tokens()) // chunk))
        return (chunks - 1) / self.spec.stages * self.first_s

    def _count_gaps(self, steps: int, batch: int, last: float) -> None:
        """Record the times between the tokens of a run. Its first step ends a wait for steps with prompts only, of
        which sequences that joined during them waited for a part."""
        before = 0
        waited = sum(seconds for seconds, _ in self.stalls)
        for seconds, sequences in self.stalls:
            self.gaps.append((sequences - before, self.first_s + waited, self.first_s + waited))
            before, waited = sequences, waited - seconds
        if self.stalls:
            self.gaps.append((batch - before, self.first_s, self.first_s))
            self.stalls = []
            steps -= 1
        self.gaps.append((batch * steps, self.first_s, last))

    def _decoded(self, steps: int, now: float, last_gap: float) -> None:
        """Apply `steps` steps of all decoding sequences."""
        batch, here = len(self.decoding), self.step
        tokens = int(self.grow[here : here + steps].sum()) if self.spec.speculation else batch * steps
        self.context += tokens
        if not self.policy.reserve:
            self.free -= int(self.need[here]) if steps == 1 else int(self.need[here : here + steps].sum())
        self.step = here = here + steps
        self.sent.append((now, now - self.began, tokens))
        self._count_gaps(steps, batch, last_gap)
        while self.finishing and self.finishing[0][0] <= here:
            end, request = heappop(self.finishing)
            if request in self.decoding and self._ends(request) == end:
                _, cached, _, _ = self.decoding.pop(request)
                s = self.shared
                left = s.output[request] - s.produced[request]
                self.context -= cached + 1 + left
                self._release(request, cached + left)
                s.produced[request] = s.output[request]
                self.on_done(request, now)

    def _computed(self, request: int, tokens: int, now: float) -> None:
        """Record that a prompt is cached and its first token sent (after a preemption, its next token)."""
        s = self.shared
        s.produced[request] += 1
        if s.first[request] < 0 and self.spec.role != "prefill":
            self._begin(request, now)
        if s.produced[request] == s.output[request]:
            s.first[request] = now if s.first[request] < 0 else s.first[request]
            self._release(request, tokens)
            self.on_done(request, now)
        elif self.spec.role == "prefill":
            self._leave_adapter(request)
            self.on_first(request, now)
        else:
            self._join(request, tokens)

    def handed_on(self, tokens: int) -> None:
        """Free the pages of a request whose cache has arrived at its decode worker."""
        self.free += self.policy.pages_of(tokens)

    def _release(self, request: int, tokens: int) -> None:
        self.free += self.policy.pages_to_begin(self.shared.input[request], self.shared.output[request], tokens)
        self._leave_adapter(request)

    def _leave_adapter(self, request: int) -> None:
        if self.adapters:
            for entry in self.adapters.leave(self.shared.adapter[request]):
                heappush(self.waiting, entry)

    def _make_room(self) -> None:
        """Preempt requests until there are pages for the next decoding step, and reserve them."""
        self.growing = int(self.need[self.step]) if self.decoding else 0
        while self.growing > self.free:
            victim = max((*self.decoding, *(item[0] for item in self.prefilling)), key=self._rank)
            self._preempt(victim)
            self.growing = int(self.need[self.step])

    def _rank(self, request: int) -> tuple[int, int]:
        return self.shared.priority[request], request

    def _preempt(self, request: int) -> None:
        s = self.shared
        s.preemptions += 1
        if request in self.decoding:
            begin, tokens, _, accepted = self.decoding[request]
            steps = self.step - begin
            generated = steps if accepted is None else int(accepted[steps - 1]) if steps else 0
            self._book(request, steps, -1)
            if accepted is not None:
                self.grow[self.step : begin + len(accepted)] -= np.diff(accepted, prepend=0)[steps:]
            del self.decoding[request]
            self.context -= tokens + 1 + generated
            s.produced[request] += generated
            self._release(request, tokens + generated)
        else:
            item = next(item for item in self.prefilling if item[0] == request)
            self.prefilling.remove(item)
            self._release(request, item[2])
        self.add(request)
