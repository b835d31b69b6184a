"""The event engine: jobs arrive, wait, run on GPUs of nodes, end; a policy says who starts when and where.

Events at one time are handled in the order: ends, arrivals, changes of queue, reserved starts; then waiting jobs are
scheduled. A job runs at a speed: 1 on the GPUs that it asks for, placed well; less where its placement or its width
is worse. What a job has done is kept when it is stopped; it loses `restart_s`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from phalanx.simulate.shared_cluster import policy as policies
from phalanx.simulate.shared_cluster.jobs import TraceJob
from phalanx.simulate.shared_cluster.nodes import Held, Nodes
from phalanx.simulate.shared_cluster.policy import DEPTH, MOST_SHRUNK, THRESHOLD, Key, Policy
from phalanx.simulate.shared_cluster.reservations import Reservation, Timelines, earliest

SpeedOf = Callable[[TraceJob, Held], float]
"""Speed of a job on the GPUs that it has, over that of its best placement: above 0, at most 1."""
_END, _DEMOTE, _RESERVED = 0, 2, 3
Chosen = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Run:
    """A job on its GPUs from `start` to `end`."""

    job: int
    start: float
    end: float
    held: Held


@dataclass
class History:
    """What happened to the jobs of a trace. Lists have an element for each job, in the order of the trace."""

    jobs: Sequence[TraceJob]
    nodes: Nodes
    policy: Policy
    finish: list[float]
    waited: list[float]
    """Seconds in which a job was neither running nor done."""
    preempted: list[int]
    """How often a job was stopped for another."""
    resized: list[int]
    """How often a running job changed its width."""
    runs: list[Run] = field(default_factory=list)
    fragmented: float = 0.0
    """GPU-seconds for which the first waiting job's GPUs were free, but not in the shape that it needs."""
    placement: float = 0.0
    """GPU-seconds that jobs took longer than on their best placement."""
    promised: dict[int, float] = field(default_factory=dict)
    """The latest start that a reservation has promised, by job."""

    @property
    def makespan(self) -> float:
        """Seconds from the first submission to the last end."""
        return max(self.finish, default=0.0)


@dataclass(slots=True)
class _Active:
    """A job that has arrived and has not ended."""

    left: float
    """Seconds of work left at speed 1."""
    since: float
    """When it began to wait, or to run."""
    attained: float = 0.0
    version: int = 0
    speed: float = 1.0
    end: float = 0.0
    planned_end: float = 0.0
    held: Held = ()
    width: int = 0


def simulate(jobs: Sequence[TraceJob], nodes: Nodes, policy: Policy, speed_of: SpeedOf | None = None) -> History:
    """Run the jobs of a trace, which must fit the empty cluster, in the order of their submission."""
    return _Simulation(jobs, nodes, policy, speed_of).run()


class _Simulation:
    """The state of a simulation."""

    def __init__(self, jobs: Sequence[TraceJob], nodes: Nodes, policy: Policy, speed_of: SpeedOf | None) -> None:
        n = len(jobs)
        self.jobs, self.nodes, self.policy, self.speed_of = jobs, nodes, policy, speed_of
        self.history = History(jobs, nodes, policy, [0.0] * n, [0.0] * n, [0] * n, [0] * n)
        self.active: dict[int, _Active] = {}
        self.running: dict[int, _Active] = {}
        self.waiting: dict[int, list[tuple[Key, int]]] = {}
        """By width, in the order of the policy."""
        self.events: list[tuple[float, int, int, int]] = []
        self.now = 0.0
        self.stuck = 0
        """GPUs of the first waiting job while it waits for their shape only."""
        self.reserved_for = -1
        self.reservation: Reservation | None = None
        self.timelines = Timelines(nodes) if policy.name == "conservative" else None
        self.promises: dict[int, tuple[float, Chosen, float]] = {}
        """Conservative: (start, nodes, planned end) of each waiting job."""
        self.early = False
        """Conservative: whether a job has just ended before its limit."""
        self.ends: list[tuple[float, int]] = []
        """Planned ends of running jobs, ascending."""
        self.second: list[int] = [0] * len(nodes.sizes)
        """las: GPUs of each node that run jobs of the second queue."""
        self.lowest = min((job.priority for job in jobs), default=0)
        self.mixed = any(job.priority != self.lowest for job in jobs)
        self.shrinkable: set[int] = set()
        """Running jobs that can run on fewer GPUs."""

    def run(self) -> History:
        """Handle all events and return the history."""
        order = sorted(range(len(self.jobs)), key=lambda n: (self.jobs[n].submit, n))
        i, events = 0, self.events
        while i < len(order) or events:
            arrival = self.jobs[order[i]].submit if i < len(order) else float("inf")
            time = min(arrival, events[0][0]) if events else arrival
            self.history.fragmented += self.stuck * (time - self.now)
            self.now = time
            self._handle(_END)
            if self.early:  # once all that end now have given back their GPUs
                self._bring_forward()
            while i < len(order) and self.jobs[order[i]].submit == time:
                self._arrive(order[i])
                i += 1
            self._handle(_RESERVED)
            if self.timelines is None:
                self._schedule()
            head = self._first()
            self.stuck = 0
            if head is not None and self.jobs[head].gpus <= self.nodes.count:
                self.stuck = self.jobs[head].gpus
        return self.history

    def _handle(self, last: int) -> None:
        """Handle the events of this moment up to a kind."""
        while self.events and self.events[0][0] == self.now and self.events[0][1] <= last:
            _, kind, number, version = heapq.heappop(self.events)
            job = self.active.get(number)
            if job is None or job.version != version:
                continue
            if kind == _END:
                self._end(number)
            elif kind == _DEMOTE:
                self._demote(number)
            else:
                assert self.timelines is not None
                start, chosen, end = self.promises.pop(number)
                self.timelines.change(chosen, start, end, 1)  # starting takes them again
                self._start(number, chosen, 1.0)

    # Arrivals, starts and ends.

    def _arrive(self, number: int) -> None:
        job = self.jobs[number]
        self.active[number] = _Active(job.duration, self.now)
        if self.timelines is not None:
            self._promise(number)
        else:
            self._wait(number)

    def _key(self, number: int) -> Key:
        return policies.key(self.policy, self.jobs[number], number, self.active[number].attained)

    def _wait(self, number: int) -> None:
        insort(self.waiting.setdefault(self.jobs[number].gpus, []), (self._key(number), number))

    def _unwait(self, number: int) -> None:
        own = self.waiting[self.jobs[number].gpus]
        del own[bisect_left(own, (self._key(number), number))]

    def _speed(self, number: int, chosen: Chosen) -> float:
        """Speed on GPUs that are about to be taken, for their placement alone."""
        job = self.jobs[number]
        if self.speed_of is None or not job.plan:
            return 1.0
        return self.speed_of(job, tuple((node, (1 << gpus) - 1) for node, gpus in chosen))

    def _start(self, number: int, chosen: Chosen, narrower: float, placed: float | None = None) -> None:
        """Start a job on (node, GPUs) at a speed of `narrower` times that of the placement."""
        state, job = self.active[number], self.jobs[number]
        state.speed = narrower * (self._speed(number, chosen) if placed is None else placed)
        state.width = sum(gpus for _, gpus in chosen)
        state.held = self.nodes.take(chosen)
        self.history.waited[number] += self.now - state.since
        state.since = self.now
        state.end = self.now + state.left / state.speed
        # A limit is of the job as it asked to run: what it loses elsewhere comes on top.
        state.planned_end = max(state.end, state.end + (job.planned - job.duration) / state.speed)
        state.version += 1
        self.running[number] = state
        if self.policy.elastic and job.widths and job.widths[0][0] < state.width:
            self.shrinkable.add(number)
        heapq.heappush(self.events, (state.end, _END, number, state.version))
        if self.timelines is not None:
            self.timelines.change(chosen, self.now, state.planned_end, -1)
        if self.policy.name == "easy":
            insort(self.ends, (state.planned_end, number))
        if self.policy.name == "las":
            if state.attained >= THRESHOLD:
                self._second(state.held, 1)
            else:
                at = self.now + (THRESHOLD - state.attained) / state.width
                if at < state.end:
                    heapq.heappush(self.events, (at, _DEMOTE, number, state.version))

    def _leave(self, number: int) -> None:
        """Take a job off its GPUs."""
        state, job = self.running.pop(number), self.jobs[number]
        self.shrinkable.discard(number)
        ran = self.now - state.since
        if self.policy.name == "las" and state.attained >= THRESHOLD:
            self._second(state.held, -1)
        state.attained += ran * state.width
        # Rounding may leave a last fraction of a second undone.
        state.left = 0.0 if self.now >= state.end else max(0.0, state.left - ran * state.speed)
        state.since = self.now
        state.version += 1
        self.nodes.give_back(state.held)
        self.history.runs.append(Run(number, self.now - ran, self.now, state.held))
        narrower = dict(job.widths).get(state.width, 1.0) if state.width != job.gpus else 1.0
        self.history.placement += ran * state.width * (1 - state.speed / narrower)
        if self.policy.name == "easy":
            del self.ends[bisect_left(self.ends, (state.planned_end, number))]

    def _end(self, number: int) -> None:
        state = self.running[number]
        self._leave(number)
        del self.active[number]
        self.history.finish[number] = self.now
        if self.timelines is not None and state.planned_end > self.now:
            chosen = [(node, bits.bit_count()) for node, bits in state.held]
            self.timelines.change(chosen, self.now, state.planned_end, 1)
            self.early = True
        elif self.policy.elastic and not any(self.waiting.values()):
            self._widen()

    # Least attained service.

    def _second(self, held: Held, sign: int) -> None:
        for node, bits in held:
            self.second[node] += sign * bits.bit_count()

    def _demote(self, number: int) -> None:
        """Move a running job to the second queue."""
        state = self.running[number]
        state.attained = THRESHOLD
        ran = self.now - state.since
        state.left -= ran * state.speed
        self.history.runs.append(Run(number, state.since, self.now, state.held))
        state.since = self.now
        self._second(state.held, 1)

    def _may_stop(self, number: int, other: int) -> bool:
        """Whether a waiting job may stop a running one: for its priority, or under `las` one of the second queue for
        one of the first."""
        own, running = self.jobs[number].priority, self.jobs[other].priority
        if own < running:
            return False
        if own > running and self.policy.preempt:
            return True
        first = self.active[number].attained < THRESHOLD
        return self.policy.name == "las" and first and self.running[other].attained >= THRESHOLD

    def _preempt_for(self, number: int) -> Chosen:
        """Stop jobs that a waiting one may stop, so that it can start; return its nodes, none if none do."""
        shape, largest = self.nodes.shape(self.jobs[number].gpus), self.nodes.largest
        if self.mixed:
            room = list(self.nodes.free)
            for other, state in self.running.items():
                if self._may_stop(number, other):
                    for node, bits in state.held:
                        room[node] += bits.bit_count()
        else:
            room = [free + second for free, second in zip(self.nodes.free, self.second, strict=True)]
        parts = [(largest, shape.entire), (shape.part, 1 if shape.part else 0)]
        chosen: Chosen = []
        for gpus, count in parts:
            taken = {node for node, _ in chosen}
            # Where the fewest GPUs must be taken from others.
            fitting = sorted(
                (gpus - self.nodes.free[n], n) for n, k in enumerate(room) if k >= gpus and n not in taken
            )
            if len(fitting) < count:
                return []
            chosen += [(n, gpus) for _, n in fitting[:count]]
        for node, gpus in chosen:
            victims = [
                n
                for n, s in self.running.items()
                if any(at == node for at, _ in s.held) and self._may_stop(number, n)
            ]
            for victim in sorted(victims, key=lambda n: (self.jobs[n].priority, -self.jobs[n].submit)):
                if self.nodes.free[node] >= gpus:
                    break
                self._stop(victim)
        return chosen

    def _stop(self, number: int) -> None:
        """Stop a running job, which loses `restart_s` and waits again."""
        self._leave(number)
        self.history.preempted[number] += 1
        self.active[number].left += self.policy.restart_s
        self._wait(number)

    # Elastic width.

    def _narrower(self, number: int) -> tuple[Chosen, float]:
        """Return nodes and speed for the widest width below the one asked for that can start now."""
        for width, speed in reversed(self.jobs[number].widths):
            if width < self.jobs[number].gpus:
                chosen = self.nodes.choose(width, self.policy.rule)
                if chosen:
                    return chosen, speed
        return [], 0.0

    def _shrink_for(self, number: int) -> tuple[Chosen, float]:
        """Let running elastic jobs give up GPUs so that a waiting job can start; return its nodes and speed, none if
        that does not suffice. The job gets the widest of its widths that can start, from as few others as possible:
        first those that submitted last."""
        job = self.jobs[number]
        others = sorted((n for n in self.shrinkable if self._worth_shrinking(number, n)), reverse=True)[:MOST_SHRUNK]
        for width, speed in ((job.gpus, 1.0), *reversed(job.widths)):
            for count in range(1, len(others) + 1):
                for narrowest in (False, True):
                    chosen = self._shrunk(width, others[:count], narrowest)
                    if chosen:
                        return chosen, speed
        return [], 0.0

    def _worth_shrinking(self, number: int, other: int) -> bool:
        """Whether a running job gives up GPUs for a waiting one: not if it has a higher priority, or ends before it
        would have started again."""
        job, state = self.jobs[other], self.running[other]
        return job.priority <= self.jobs[number].priority and state.end - self.now > self.policy.restart_s

    def _shrunk(self, width: int, others: Sequence[int], narrowest: bool) -> Chosen:
        """Shrink all of these jobs, to their next or to their narrowest width, if `width` GPUs for another job are
        then free in the right shape; return its nodes, and none if they are not."""
        to: list[tuple[int, int, float]] = []
        for other in others:
            narrower = [w for w in self.jobs[other].widths if w[0] < self.running[other].width]
            to.append((other, *(narrower[0] if narrowest else narrower[-1])))
        freed = sum(self.running[n].width - w for n, w, _ in to)
        if self.nodes.count + freed < width:
            return []
        held = [self.running[n].held for n in others]
        for own in held:
            self.nodes.give_back(own)
        taken: list[Held] = []
        places: list[Chosen] = []
        for gpus in (width, *(w for _, w, _ in to)):
            chosen = self.nodes.choose(gpus, self.policy.rule)
            if not chosen:
                break
            places.append(chosen)
            taken.append(self.nodes.take(chosen))
        for own in taken:
            self.nodes.give_back(own)
        for own in held:
            self.nodes.retake(own)
        if len(places) <= len(to):
            return []
        for other, _, _ in to:
            self._leave(other)
        for (other, _, speed), chosen in zip(to, places[1:], strict=True):
            self.active[other].left += self.policy.restart_s
            self.history.resized[other] += 1
            self._start(other, chosen, speed)
        return places[0]

    def _widen(self) -> None:
        """Let elastic jobs that run narrower than they asked for use free GPUs, the longest waiting first."""
        for number in sorted(n for n, s in self.running.items() if s.width < self.jobs[n].gpus):
            state, job = self.running[number], self.jobs[number]
            if not self.nodes.count:
                return
            left = state.end - self.now
            for width, speed in reversed((*job.widths, (job.gpus, 1.0))):
                if width <= state.width or width - state.width > self.nodes.count:
                    continue
                if (left * state.speed + self.policy.restart_s) / speed >= left:
                    continue  # it would lose more than it gains
                self.nodes.give_back(state.held)
                chosen = self.nodes.choose(width, self.policy.rule)
                self.nodes.retake(state.held)
                if chosen:
                    self._leave(number)
                    state.left += self.policy.restart_s
                    self.history.resized[number] += 1
                    self._start(number, chosen, speed)
                    break

    # Scheduling.

    def _schedule(self) -> None:
        """Start the waiting jobs that the policy lets start now."""
        name = self.policy.name
        if name == "fifo":
            self._in_order(passing=False)
        elif name == "easy":
            self._easy()
        else:
            self._in_order(passing=True)

    def _first(self) -> int | None:
        """The waiting job that comes first."""
        if self.timelines is not None:
            return min(self.promises, default=None)
        best: tuple[Key, int] | None = None
        for own in self.waiting.values():
            if own and (best is None or own[0] < best):
                best = own[0]
        return None if best is None else best[1]

    def _try(self, number: int) -> bool:
        """Start a waiting job if it can start now."""
        chosen, speed = self.nodes.choose(self.jobs[number].gpus, self.policy.rule), 1.0
        if not chosen and self.policy.elastic and self.jobs[number].widths:
            chosen, speed = self._narrower(number)
        if not chosen and self._preempts(number):
            chosen, speed = self._preempt_for(number), 1.0
        if not chosen and self.shrinkable:
            chosen, speed = self._shrink_for(number)
        if not chosen:
            return False
        self._unwait(number)
        self._start(number, chosen, speed)
        return True

    def _preempts(self, number: int) -> bool:
        """Whether a waiting job may stop any other."""
        if self.policy.preempt and self.jobs[number].priority > self.lowest:
            return True
        return self.policy.name == "las" and self.active[number].attained < THRESHOLD

    def _in_order(self, passing: bool) -> None:
        """Start jobs in their order. Where one cannot start, nobody passes it, or (`passing`) only jobs of other
        widths: those of its own width cannot start either."""
        for number in self._merged():
            if not self._try(number) and not passing:
                return

    def _merged(self) -> Iterator[int]:
        """Yield the first waiting job again and again; a width whose first job did not start is left out from then
        on. Elastic jobs may differ: then their width stays in."""
        closed: set[int] = set()
        while True:
            best: tuple[Key, int] | None = None
            for width, own in self.waiting.items():
                if own and width not in closed and (best is None or own[0] < best):
                    best = own[0]
            if best is None:
                return
            yield best[1]
            width = self.jobs[best[1]].gpus
            own = self.waiting[width]
            if own and own[0][1] == best[1]:
                closed.add(width)

    def _easy(self) -> None:
        while (head := self._first()) is not None and self._try(head):
            if head != self.reserved_for:  # it came before the job with the reservation, which must be made again
                self.reserved_for = -1
        if head is None or not self.nodes.count:
            if head is not None:
                self._reserve(head)
            return
        self._reserve(head)
        self._backfill(head)

    def _reserve(self, head: int) -> None:
        if self.reserved_for != head:
            ends = ((time, self.running[n].held) for time, n in self.ends)
            gpus = self.jobs[head].gpus
            self.reservation = earliest(self.nodes, gpus, self.policy.rule == "scatter", ends)
            self.reserved_for = head
            self.history.promised[head] = self.reservation.time

    def _backfill(self, head: int) -> None:
        """Start jobs behind the first that end before its reservation, or leave what is reserved."""
        reservation = self.reservation
        assert reservation is not None
        for width in sorted(self.waiting):
            own, position, seen = self.waiting[width], 0, 0
            beside = True  # whether jobs of this width may still find GPUs that are not reserved
            while position < len(own) and seen < DEPTH:
                chosen = self.nodes.choose(width, self.policy.rule)
                if not chosen:
                    break
                number = own[position][1]
                job = self.jobs[number]
                seen += 1
                speed = self._speed(number, chosen)
                late = self.now + job.planned / speed > reservation.time
                if late and beside and number != head:
                    chosen = self._beside(job)
                    beside = bool(chosen)
                if number == head or (late and not beside):
                    position += 1
                    continue
                if late:
                    speed = self._speed(number, chosen)
                    reservation.use(chosen)
                self._unwait(number)
                self._start(number, chosen, 1.0, speed)

    def _beside(self, job: TraceJob) -> Chosen:
        """Nodes for a job that ends after the reservation."""
        reservation = self.reservation
        assert reservation is not None
        if reservation.anywhere is not None:
            enough = reservation.anywhere >= job.gpus
            return self.nodes.choose(job.gpus, self.policy.rule) if enough else []
        shape = self.nodes.shape(job.gpus)
        each = self.nodes.largest if shape.entire else shape.part
        return self.nodes.choose(job.gpus, self.policy.rule, lambda node: reservation.allows(node, each))

    # Conservative backfilling.

    def _promise(self, number: int) -> None:
        """Start a job now, or reserve the earliest time at which it fits between all that is reserved."""
        assert self.timelines is not None
        job = self.jobs[number]
        if not self.promises:
            chosen = self.nodes.choose(job.gpus, self.policy.rule)
            if chosen:
                self._start_now(number, chosen)
                return
        start, chosen, planned = self._find(number)
        if start <= self.now:
            self._start_now(number, chosen)
        else:
            self._reserve_for(number, start, chosen, start + planned)
            self.history.promised[number] = start

    def _start_now(self, number: int, chosen: Chosen) -> None:
        self._start(number, chosen, 1.0)
        self._handle(_END)  # of a job that takes no time: to the timelines its GPUs are free already

    def _find(self, number: int) -> tuple[float, Chosen, float]:
        """Return the earliest start of a job, its nodes, and the seconds that it is planned to take on them."""
        assert self.timelines is not None
        job, speed = self.jobs[number], 1.0
        while True:
            start, chosen = self.timelines.find(job.gpus, job.planned / speed, self.now)
            placed = self._speed(number, chosen)
            if placed >= speed:
                return start, chosen, job.planned / speed
            speed = placed

    def _reserve_for(self, number: int, start: float, chosen: Chosen, end: float) -> None:
        assert self.timelines is not None
        self.timelines.change(chosen, start, end, -1)
        self.promises[number] = (start, chosen, end)
        state = self.active[number]
        state.version += 1
        heapq.heappush(self.events, (start, _RESERVED, number, state.version))

    def _bring_forward(self) -> None:
        """After an early end, give waiting jobs an earlier start where there is one, in their order."""
        assert self.timelines is not None
        self.early = False
        for number in sorted(self.promises)[:DEPTH]:
            start, chosen, end = self.promises.pop(number)
            self.timelines.change(chosen, start, end, 1)
            sooner, elsewhere, planned = self._find(number)
            if sooner <= self.now:
                self._start_now(number, elsewhere)
            elif sooner < start:
                self._reserve_for(number, sooner, elsewhere, sooner + planned)
            else:
                self._reserve_for(number, start, chosen, end)
