"""Terms expanded into the ordered events of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Literal

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory import footprint
from phalanx.cost.memory.attention_core import Core
from phalanx.cost.memory.state import Shard, cast_gradients, copies, model_state, owned, tied
from phalanx.cost.step.bucket_order import Issued
from phalanx.cost.step.program import StepProgram
from phalanx.cost.step.term import Term, highest, repeat_of, unit_class
from phalanx.cost.step.terms import metrics, terms
from phalanx.schedule.event import INSIDE, Event, Kind, Phase
from phalanx.schedule.gradients.buckets import Bucket, buckets, of_chunks
from phalanx.schedule.gradients.compression import Sent, sent, sent_across
from phalanx.schedule.layers import collectives, context
from phalanx.schedule.layers.collectives import Way
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.routing import routed
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.schedules import finished
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, blocks_among, chunks, seen_from
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local


def expand(spec: ModelSpec, job: Job, strategy: Strategy, rank: int | None = None, place: int = 0) -> StepProgram:
    """Order the terms of a strategy into a step. `rank`: of a certain one, whose shard may hold padding; without one
    no rank at a `place` of the pipeline holds more, and peers are those of the first rank there."""
    return _Expansion(spec, job, strategy, rank, place).program()


_BACKWARD = {"B": "backward", "I": "input_grad", "W": "weight_grad"}


class _Expansion:
    """The step of a rank, action by action of its part of the pipeline."""

    def __init__(self, spec: ModelSpec, job: Job, strategy: Strategy, rank: int | None, place: int) -> None:
        self.job, self.strategy = job, strategy
        self.grid = mesh(strategy)
        self.place = place if rank is None else self.grid.place(rank)["pp"]
        self.rank = self.grid.group_of(0, "pp")[place] if rank is None else rank
        self.shard = None if rank is None else (self.grid.shard(rank), int(self.grid.along("edp")[rank]))
        self.whole, self.spec = spec, stages.stage(spec, strategy, self.place)
        ring_index = None if rank is None else int(self.grid.along("ring")[rank])
        found = terms(spec, job, strategy, rank, self.place)
        self.terms = {(t.event.op, t.event.unit): t for t in found if t.event.axis not in (*INSIDE, "pp")}
        self.cut = buckets(self.spec, job, strategy)
        self.schedule = stages.schedule(strategy, strategy.accumulation(job))
        self.actions = self.schedule.actions[self.place]
        self.held = stages.held_chunks(strategy, self.place)
        self.finished = finished(self.actions)
        order = [self.held.index(chunk) for chunk in self.finished]
        early = strategy.stage >= 2
        sets = of_chunks(self.cut, self.spec, order, early)
        self.ready = [
            _completed([self.cut[i] for i in own], units) for own, units in zip(sets, chunks(self.spec), strict=True)
        ]
        self.issued = Issued(early)
        self.left = Counter(self.cut[i].name for own in sets for i in own)  # reductions until complete
        self.whole_units: set[str] = set()
        self.leaving: set[tuple[str, int]] = set()
        self.part = Context(job.seq, strategy.ring, strategy.ulysses)
        self.tokens = strategy.micro_batch * self.part.tokens
        self.stream = prod(stages.stream(spec, job, strategy)) * DTYPE_BYTES[job.precision.compute]
        held = local(self.spec, strategy)
        self.core = Core(held, job, self.tokens, self.part, ring_index) if self.part.parallel else None
        self.steps = Steps()

    def program(self) -> StepProgram:
        job, strategy, steps = self.job, self.strategy, self.steps
        for at, action in enumerate(self.actions):
            kind, chunk, m = action
            if kind == "F":
                self._forward(chunk, m)
            elif kind in _BACKWARD:
                self._backward(kind, chunk, m, last=self.finished[chunk] == at)  # type: ignore[arg-type]
            else:
                self._message(kind, chunk, m)
        steps.add(self.issued.finish())
        steps.hold(-self.stream * len(self.leaving))
        accumulate = job.precision.accumulate_dtype
        if size := tied(self.spec, job, strategy):
            steps.add(
                [Event("collective", "all_reduce", "opt", "embedding", "embed", 2, dtype=accumulate, bytes=size)]
            )
        if size := copies(self.spec, job, strategy):
            steps.add(
                [Event("collective", "all_reduce", "opt", "copies", "tp", strategy.tp, dtype=accumulate, bytes=size)]
            )
        if strategy.world > 1:
            event = self.terms["all_reduce", "metrics"].event
            steps.add([replace(event, group_size=strategy.world, bytes=metrics(self.whole, strategy) * 8)])
        shard = self.shard
        steps.compute(_update(self.terms["optimizer", ""], self.spec, job, strategy, shard))
        if strategy.stage in (1, 2):
            for b in reversed(self.cut):
                steps.add(self._sent("all_gather", "parameters", b, None))
        return StepProgram(steps.events(), model_state(self.spec, job, strategy, shard), *steps.before)

    def _forward(self, chunk: int, m: int) -> None:
        of = chunks(self.spec)[self.held.index(chunk)]
        if self.cut[-1].unit == "model":
            self.steps.add(self._gathered(["model"], "F", m))
        if of[0] != "embed" and (apart := self._documents(chunk)):  # the embedding's own term has them
            made = self.tokens * self.job.seq if self.core is None else int(self.core.lowest_made())
            self.steps.hold(sum(apart.values()) + made)
            self.steps.hold(-made)
        for unit in of:
            self.steps.add(self._gathered(self._needed(unit, "F"), "F", m))
            self.steps.compute(_compute(self.terms["forward", unit_class(self.spec, self.strategy, unit)], unit, m))
            self.steps.add(self._inside(unit, "F", m))

    def _backward(self, phase: Literal["B", "I", "W"], chunk: int, m: int, last: bool) -> None:
        index, s = self.held.index(chunk), self.strategy
        last_use = {f"blocks.{i}": size for i, size in self._documents(chunk).items()} if phase != "W" else {}
        reduced = phase != "I" and (last or s.stage >= 2)
        for unit in reversed(chunks(self.spec)[index]):
            if phase == "B":
                self.steps.add(self._gathered(self._needed(unit, "B"), "B", m))
            term = self.terms[_BACKWARD[phase], unit_class(self.spec, s, unit)]
            self.steps.compute(_compute(term, unit, m, last_use.get(unit, 0)))
            self.steps.add(self._inside(unit, phase, m))
            for bucket in self.ready[index][unit] if reduced else ():
                self.left[bucket.name] -= last
                across = [] if self.left[bucket.name] else self._across(bucket, m)
                self.steps.add(self.issued.issue(self._reduction(bucket, m), across))
        if reduced and s.stage >= 2:
            self.steps.add(self.issued.flush())

    def _message(self, kind: str, chunk: int, m: int) -> None:
        """Memory for what comes; what has left before is free when the next one does."""
        op, _, way = kind.partition("_")
        if op == "RECV":
            self.steps.hold(self.stream)
        elif (way, chunk) in self.leaving:
            self.steps.hold(-self.stream)
        else:
            self.leaving.add((way, chunk))
        onward = (1 if way == "F" else -1) * (1 if op == "SEND" else -1)
        peer = self.grid.group_of(self.rank, "pp")[self.schedule.rank_of[chunk + onward]]
        event = Event("p2p", op.lower(), way, f"chunk.{chunk}", "pp", self.strategy.pp, peer)  # type: ignore[arg-type]
        dtype = self.job.precision.compute
        self.steps.add([replace(event, dtype=dtype, chunk=chunk, micro_batch=m, bytes=self.stream)])

    def _documents(self, chunk: int) -> dict[int, Column]:
        """What keeps the documents of a micro-batch apart in a chunk, by the block that is the last to need it."""
        blocks = blocks_among(chunks(self.spec)[self.held.index(chunk)])
        return footprint.documents(self.spec, self.job, self.tokens, self.part, blocks)

    def _inside(self, unit: str, phase: Phase, m: int) -> Iterable[Event]:
        return _inside(self.whole, self.job, self.strategy, self.rank, unit, phase, m)

    def _needed(self, unit: str, phase: Phase) -> list[str]:
        """Stage 3: what has to be whole, or on its way, when a pass of a unit begins."""
        s = self.strategy
        order = [b.unit for b in reversed(self.cut) if b.unit not in ("", "model") and not b.experts]  # forward
        if not s.gathers_once or unit not in order:
            return _ahead(order, unit, 1 if phase == "F" else -1, s.prefetch)
        after = order.index(unit) + 1
        return [unit, *order[after : after + s.prefetch]] if phase == "F" else []

    def _gathered(self, names: Iterable[str], phase: Phase, m: int) -> Iterable[Event]:
        for name in names:
            if name not in self.whole_units or not self.strategy.gathers_once:
                self.whole_units.add(name)
                for bucket in sorted((b for b in self.cut if b.unit == name), key=lambda b: b.experts):
                    yield from self._sent("all_gather", "parameters", bucket, m, phase)

    def _sent(self, op: str, what: str, bucket: Bucket, m: int | None, phase: Phase | None = None) -> list[Event]:
        """A collective of a bucket: nothing over one rank."""
        if bucket.ranks(self.strategy) == 1:
            return []
        return [_bucket(self.terms[op, bucket.kind(what)], bucket, self.strategy, m, phase)]

    def _reduction(self, bucket: Bucket, m: int) -> list[Event]:
        s, c = self.strategy, self.strategy.compressor
        if c is not None:
            return [_sent(x, bucket, s, m) for x in sent(c, bucket, s, self.job.precision.accumulate_dtype)]
        op = "reduce_scatter" if s.stage else "all_reduce"
        return self._sent(op, "gradients", bucket, m)

    def _across(self, bucket: Bucket, m: int) -> list[Event]:
        s, c = self.strategy, self.strategy.compressor
        if c is not None:
            return [_sent(x, bucket, s, m) for x in sent_across(c, bucket, s)]
        return self._sent("all_reduce", "shards", bucket, m) if bucket.across(s) else []


class Steps:
    """Events in their order; memory that is held or let go between passes is the last one's that began."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._at: int | None = None  # the pass that began last
        self._live = self._highest = 0  # above what was live when it did
        self.before = (0, 0)
        """Bytes above the state when the first pass begins, and the most before."""

    def add(self, events: Iterable[Event]) -> None:
        self._events += events

    def hold(self, size: int) -> None:
        """Memory is taken, or let go."""
        self._live += size
        self._highest = max(self._highest, self._live)

    def compute(self, event: Event) -> None:
        self._over()
        self._at = len(self._events)
        self._events.append(event)
        self._live, self._highest = event.alloc - event.free, event.alloc

    def _over(self) -> None:
        if self._at is None:
            self.before = self._live, self._highest
            return
        event, free = self._events[self._at], self._highest - self._live
        if (event.alloc, event.free) != (self._highest, free):
            self._events[self._at] = replace(event, alloc=self._highest, free=free)

    def events(self) -> tuple[Event, ...]:
        self._over()
        return tuple(self._events)


def _update(term: Term, spec: ModelSpec, job: Job, strategy: Strategy, shard: Shard | None) -> Event:
    cast = term.alloc
    if strategy.stage and shard is not None:
        cast = cast_gradients(owned(spec, job, strategy, shard)[0], job)
    return replace(term.event, alloc=cast, free=cast)


def _ahead(order: list[str], unit: str, way: int, prefetch: int) -> list[str]:
    """What starts to be gathered when a unit's pass begins: itself, where nobody did before, and what comes next."""
    if unit not in order:
        return []
    at, last = order.index(unit), len(order) - 1
    first = at == (0 if way > 0 else last)
    own = [unit] if (first and way > 0) or (not first and not prefetch) else []
    return own + ([order[at + way]] if prefetch and 0 <= at + way <= last else [])


def _completed(cut: Sequence[Bucket], own: tuple[str, ...]) -> dict[str, list[Bucket]]:
    """Which buckets of a chunk are full after the backward pass of each of its units. They are issued in order, none
    overtaking."""
    order = {unit: i for i, unit in enumerate(reversed(own))}
    full: dict[str, list[Bucket]] = {unit: [] for unit in order}
    at = 0
    for bucket in cut:
        # A shared parameter (unit `model`) is complete after the pass of the first unit that has it, the last to run.
        shared = len(order) - 1 if "embed" in order else 0
        at = max([at, *(order.get(p.unit, shared) for p in bucket.parameters)])
        full[list(order)[at]].append(bucket)
    return full


def _compute(term: Term, unit: str, micro_batch: int, masks: int = 0) -> Event:
    """`masks`: bytes of those that the pass is the last to need."""
    alloc = int(highest(term, masks))
    return replace(
        term.event,
        unit=unit,
        micro_batch=micro_batch,
        flops=term.work.flops // term.count,
        alloc=alloc,
        free=int(term.free) + masks - (int(term.alloc) - alloc),
    )


def _bucket(
    term: Term, bucket: Bucket, strategy: Strategy, micro_batch: int | None, phase: Phase | None = None
) -> Event:
    numel = bucket.padded(strategy) // (strategy.shards if term.event.unit == "shards" else 1)
    return replace(
        term.event,
        unit=bucket.name,
        phase=phase or term.event.phase,
        group_size=mesh(strategy).size(term.event.axis),
        micro_batch=micro_batch,
        bytes=numel * DTYPE_BYTES[term.event.dtype],
    )


def _inside(
    spec: ModelSpec, job: Job, strategy: Strategy, rank: int, unit: str, phase: Phase, micro_batch: int
) -> Iterable[Event]:
    """What is sent inside of a pass of a unit."""
    tokens = strategy.micro_batch * job.seq // strategy.cp
    of, repeat, seen = unit.split(".")[0], repeat_of(strategy, unit), seen_from(spec, unit)
    rows = routed(spec.experts, strategy, tokens, rank) if spec.experts is not None else None
    for x in collectives.sent(seen, job, strategy, of, phase, tokens, repeat, rows):
        if isinstance(x, collectives.Core):
            yield from _core(spec, job, strategy, rank, unit, phase, micro_batch, x.way)
            continue
        size = mesh(strategy).size(x.axis)
        event = Event("collective", x.op, phase, unit, x.axis, size, dtype=x.dtype, routed=x.routed)
        for _ in range(x.count):
            yield replace(event, micro_batch=micro_batch, bytes=x.bytes // x.count)


def _core(
    spec: ModelSpec, job: Job, s: Strategy, rank: int, unit: str, phase: Phase, micro_batch: int, way: Way
) -> Iterable[Event]:
    """What the core of attention sends, forward or backward, inside of a pass of a block."""
    grid, dtype, tokens = mesh(s), job.precision.compute, s.micro_batch * job.seq // s.cp
    for x in context.sent(local(spec, s), s, dtype, way, tokens):
        group = grid.group_of(rank, x.axis)
        to = {"send": 1, "recv": -1}.get(x.op)
        peer = None if to is None else group[(group.index(rank) + to) % len(group)]
        kind: Kind = "collective" if peer is None else "p2p"
        event = Event(kind, x.op, phase, unit, x.axis, len(group), peer, dtype)
        yield replace(event, micro_batch=micro_batch, bytes=x.bytes)


def _sent(x: Sent, bucket: Bucket, strategy: Strategy, micro_batch: int) -> Event:
    event = Event("collective", x.op, "B", bucket.name, x.axis, mesh(strategy).size(x.axis), dtype=x.dtype)
    return replace(event, micro_batch=micro_batch, bytes=x.bytes, at_most=x.at_most)
