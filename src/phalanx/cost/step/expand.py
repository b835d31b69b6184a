"""Expand the terms of a strategy into the ordered events of one training step of one rank.

The order is that of the runtime: the actions of the pipeline schedule, the units of each chunk, the gathers of
ZeRO-3 ahead of their units, and buckets as they fill (bucket_order.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Literal

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.attention_core import Core
from phalanx.cost.memory.footprint import documents
from phalanx.cost.memory.state import (
    Shard,
    cast_gradients,
    model_state,
    owned_elements,
    partial_gradient_bytes,
    tied_gradient_bytes,
)
from phalanx.cost.step.bucket_order import BucketOrder
from phalanx.cost.step.program import StepProgram
from phalanx.cost.step.term import Term, highest, repeat_of, unit_class
from phalanx.cost.step.terms import metrics, terms
from phalanx.schedule.event import INSIDE, Event, Kind, Phase
from phalanx.schedule.gradients.buckets import Bucket, buckets, of_chunks
from phalanx.schedule.gradients.compression import Sent, bucket_collectives, replica_collectives
from phalanx.schedule.layers import collectives, context
from phalanx.schedule.layers.collectives import Way
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.routing import routed
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.schedules import last_weight_grad_at
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, as_seen_by, blocks_among, chunks
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local_model


def expand(spec: ModelSpec, job: Job, strategy: Strategy, rank: int | None = None, place: int = 0) -> StepProgram:
    """Return the ordered events of one step and the model state around them.

    `rank`: expand for this rank exactly, whose shard may hold padding. Without it, expand for pipeline rank `place`:
    no rank there holds more memory, and peers are those of the first rank there.
    """
    return _Expansion(spec, job, strategy, rank, place).program()


_BACKWARD = {"B": "backward", "I": "input_grad", "W": "weight_grad"}


class _Expansion:
    """Builds the step of one rank, action by action of its pipeline schedule."""

    def __init__(self, spec: ModelSpec, job: Job, strategy: Strategy, rank: int | None, place: int) -> None:
        self.job, self.strategy = job, strategy
        self.grid = mesh(strategy)
        self.place = place if rank is None else self.grid.place(rank)["pp"]
        self.rank = self.grid.group_of(0, "pp")[place] if rank is None else rank
        self.shard = None if rank is None else (self.grid.shard(rank), int(self.grid.along("edp")[rank]))
        self.full_spec, self.spec = spec, stages.stage(spec, strategy, self.place)
        ring_index = None if rank is None else int(self.grid.along("ring")[rank])
        step_terms = terms(spec, job, strategy, rank, self.place)
        self.terms = {(t.event.op, t.event.unit): t for t in step_terms if t.event.axis not in (*INSIDE, "pp")}
        self.cut = buckets(self.spec, job, strategy)
        self.schedule = stages.schedule(strategy, strategy.accumulation(job))
        self.actions = self.schedule.actions[self.place]
        self.chunks = stages.held_chunks(strategy, self.place)
        self.finished = last_weight_grad_at(self.actions)
        order = [self.chunks.index(chunk) for chunk in self.finished]
        early = strategy.effective_zero >= 2
        sets = of_chunks(self.cut, self.spec, order, early)
        self.ready = [
            _completed([self.cut[i] for i in indices], units)
            for indices, units in zip(sets, chunks(self.spec), strict=True)
        ]
        self.bucket_order = BucketOrder(early)
        self.reductions_left = Counter(self.cut[i].name for indices in sets for i in indices)  # in this step
        self.gathered_units: set[str] = set()
        self.outgoing: set[tuple[str, int]] = set()
        self.part = Context(job.seq, strategy.ring, strategy.ulysses)
        self.tokens = strategy.micro_batch * self.part.tokens
        self.stream = prod(stages.stream(spec, job, strategy)) * DTYPE_BYTES[job.precision.compute]
        self.core = (
            Core(local_model(self.spec, strategy), job, self.tokens, self.part, ring_index)
            if self.part.parallel
            else None
        )
        self.log = EventLog()

    def program(self) -> StepProgram:
        """Expand all actions, then what follows the last backward pass: reductions, metrics, optimizer, gathers."""
        job, strategy, log = self.job, self.strategy, self.log
        for at, action in enumerate(self.actions):
            kind, chunk, m = action
            if kind == "F":
                self._forward(chunk, m)
            elif kind in _BACKWARD:
                self._backward(kind, chunk, m, last=self.finished[chunk] == at)  # type: ignore[arg-type]
            else:
                self._message(kind, chunk, m)
        log.add(self.bucket_order.finish())
        log.hold(-self.stream * len(self.outgoing))
        accumulate = job.precision.accumulate_dtype
        if size := tied_gradient_bytes(self.spec, job, strategy):
            log.add([Event("collective", "all_reduce", "opt", "embedding", "embed", 2, dtype=accumulate, bytes=size)])
        if size := partial_gradient_bytes(self.spec, job, strategy):
            log.add(
                [Event("collective", "all_reduce", "opt", "copies", "tp", strategy.tp, dtype=accumulate, bytes=size)]
            )
        if strategy.world > 1:
            event = self.terms["all_reduce", "metrics"].event
            log.add([replace(event, group_size=strategy.world, bytes=metrics(self.full_spec, strategy) * 8)])
        shard = self.shard
        log.compute(_update(self.terms["optimizer", ""], self.spec, job, strategy, shard))
        if strategy.effective_zero in (1, 2):
            for b in reversed(self.cut):
                log.add(self._sent("all_gather", "parameters", b, None))
        return StepProgram(log.events(), model_state(self.spec, job, strategy, shard), *log.before)

    def _forward(self, chunk: int, m: int) -> None:
        """Log the forward pass of a chunk for micro-batch m."""
        units = chunks(self.spec)[self.chunks.index(chunk)]
        if self.cut[-1].unit == "model":
            self.log.add(self._gathered(["model"], "F", m))
        if units[0] != "embed" and (masks := self._documents(chunk)):  # the embedding's own term includes them
            temporary = self.tokens * self.job.seq if self.core is None else int(self.core.first_visible_temporary())
            self.log.hold(sum(masks.values()) + temporary)
            self.log.hold(-temporary)
        for unit in units:
            self.log.add(self._gathered(self._needed(unit, "F"), "F", m))
            self.log.compute(_compute(self.terms["forward", unit_class(self.spec, self.strategy, unit)], unit, m))
            self.log.add(self._inside(unit, "F", m))

    def _backward(self, phase: Literal["B", "I", "W"], chunk: int, m: int, last: bool) -> None:
        """Log a backward pass (B, I or W) of a chunk for micro-batch m, with the buckets that it fills. `last`: the
        chunk's last one of the step."""
        index, s = self.chunks.index(chunk), self.strategy
        last_use = {f"blocks.{i}": size for i, size in self._documents(chunk).items()} if phase != "W" else {}
        reduced = phase != "I" and (last or s.effective_zero >= 2)
        for unit in reversed(chunks(self.spec)[index]):
            if phase == "B":
                self.log.add(self._gathered(self._needed(unit, "B"), "B", m))
            term = self.terms[_BACKWARD[phase], unit_class(self.spec, s, unit)]
            self.log.compute(_compute(term, unit, m, last_use.get(unit, 0)))
            self.log.add(self._inside(unit, phase, m))
            for bucket in self.ready[index][unit] if reduced else ():
                self.reductions_left[bucket.name] -= last
                across = [] if self.reductions_left[bucket.name] else self._across(bucket, m)
                self.log.add(self.bucket_order.issue(self._reduction(bucket, m), across))
        if reduced and s.effective_zero >= 2:
            self.log.add(self.bucket_order.flush())

    def _message(self, kind: str, chunk: int, m: int) -> None:
        """Log a message between pipeline ranks. A receive allocates its buffer; a send frees the buffer of the
        previous send in its direction."""
        op, _, way = kind.partition("_")
        if op == "RECV":
            self.log.hold(self.stream)
        elif (way, chunk) in self.outgoing:
            self.log.hold(-self.stream)
        else:
            self.outgoing.add((way, chunk))
        onward = (1 if way == "F" else -1) * (1 if op == "SEND" else -1)
        peer = self.grid.group_of(self.rank, "pp")[self.schedule.rank_of[chunk + onward]]
        event = Event("p2p", op.lower(), way, f"chunk.{chunk}", "pp", self.strategy.pp, peer)  # type: ignore[arg-type]
        dtype = self.job.precision.compute
        self.log.add([replace(event, dtype=dtype, chunk=chunk, micro_batch=m, bytes=self.stream)])

    def _documents(self, chunk: int) -> dict[int, Column]:
        """Return bytes of the masks that keep documents apart in a chunk, by the last block whose backward pass needs
        them."""
        blocks = blocks_among(chunks(self.spec)[self.chunks.index(chunk)])
        return documents(self.spec, self.job, self.tokens, self.part, blocks)

    def _inside(self, unit: str, phase: Phase, m: int) -> Iterable[Event]:
        return _inside(self.full_spec, self.job, self.strategy, self.rank, unit, phase, m)

    def _needed(self, unit: str, phase: Phase) -> list[str]:
        """Return the units whose gather must have started when a pass of `unit` begins (ZeRO-3)."""
        s = self.strategy
        order = [b.unit for b in reversed(self.cut) if b.unit not in ("", "model") and not b.experts]  # forward
        if not s.gathers_once or unit not in order:
            return _ahead(order, unit, 1 if phase == "F" else -1, s.prefetch)
        after = order.index(unit) + 1
        return [unit, *order[after : after + s.prefetch]] if phase == "F" else []

    def _gathered(self, names: Iterable[str], phase: Phase, m: int) -> Iterable[Event]:
        """Yield the gathers of units that are not gathered yet (ZeRO-3)."""
        for name in names:
            if name not in self.gathered_units or not self.strategy.gathers_once:
                self.gathered_units.add(name)
                for bucket in sorted((b for b in self.cut if b.unit == name), key=lambda b: b.experts):
                    yield from self._sent("all_gather", "parameters", bucket, m, phase)

    def _sent(self, op: str, what: str, bucket: Bucket, m: int | None, phase: Phase | None = None) -> list[Event]:
        """Return one collective of a bucket; none over one rank."""
        if bucket.ranks(self.strategy) == 1:
            return []
        return [_bucket(self.terms[op, bucket.kind(what)], bucket, self.strategy, m, phase)]

    def _reduction(self, bucket: Bucket, m: int) -> list[Event]:
        """Return the collectives that reduce a bucket of gradients."""
        s, c = self.strategy, self.strategy.compressor
        if c is not None:
            return [
                _sent(x, bucket, s, m) for x in bucket_collectives(c, bucket, s, self.job.precision.accumulate_dtype)
            ]
        op = "reduce_scatter" if s.effective_zero else "all_reduce"
        return self._sent(op, "gradients", bucket, m)

    def _across(self, bucket: Bucket, m: int) -> list[Event]:
        """Return the collectives that reduce a bucket's shard over the replicas (HSDP)."""
        s, c = self.strategy, self.strategy.compressor
        if c is not None:
            return [_sent(x, bucket, s, m) for x in replica_collectives(c, bucket, s)]
        return self._sent("all_reduce", "shards", bucket, m) if bucket.across(s) else []


class EventLog:
    """Events in issue order. Memory taken or freed between two passes is booked to the pass before it."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._at: int | None = None  # index of the last compute event
        self._live = self._highest = 0  # bytes above those live when it began
        self.before = (0, 0)
        """Bytes above the model state when the first pass begins, and the peak until then."""

    def add(self, events: Iterable[Event]) -> None:
        """Append events that allocate nothing."""
        self._events += events

    def hold(self, size: int) -> None:
        """Allocate `size` bytes, or free them if negative."""
        self._live += size
        self._highest = max(self._highest, self._live)

    def compute(self, event: Event) -> None:
        """Append a pass with its own allocations."""
        self._close()
        self._at = len(self._events)
        self._events.append(event)
        self._live, self._highest = event.alloc - event.free, event.alloc

    def _close(self) -> None:
        """Book the memory taken since the last pass began to that pass."""
        if self._at is None:
            self.before = self._live, self._highest
            return
        event, free = self._events[self._at], self._highest - self._live
        if (event.alloc, event.free) != (self._highest, free):
            self._events[self._at] = replace(event, alloc=self._highest, free=free)

    def events(self) -> tuple[Event, ...]:
        """Return all events in order."""
        self._close()
        return tuple(self._events)


def _update(term: Term, spec: ModelSpec, job: Job, strategy: Strategy, shard: Shard | None) -> Event:
    """Return the optimizer's event, with the cast gradients of a certain shard where one is given."""
    cast = term.alloc
    if strategy.effective_zero and shard is not None:
        cast = cast_gradients(owned_elements(spec, job, strategy, shard)[0], job)
    return replace(term.event, alloc=cast, free=cast)


def _ahead(order: list[str], unit: str, way: int, prefetch: int) -> list[str]:
    """Return the units whose gather starts when a pass of `unit` begins: the unit itself if no earlier pass
    prefetched it, and the next one with prefetch. `way`: +1 forward, -1 backward."""
    if unit not in order:
        return []
    at, last = order.index(unit), len(order) - 1
    first = at == (0 if way > 0 else last)
    current = [unit] if (first and way > 0) or (not first and not prefetch) else []
    return current + ([order[at + way]] if prefetch and 0 <= at + way <= last else [])


def _completed(cut: Sequence[Bucket], units: tuple[str, ...]) -> dict[str, list[Bucket]]:
    """Return the buckets of a chunk that are full after the backward pass of each of its units. Buckets are issued in
    order; none overtakes another."""
    order = {unit: i for i, unit in enumerate(reversed(units))}
    full: dict[str, list[Bucket]] = {unit: [] for unit in order}
    at = 0
    for bucket in cut:
        # A shared parameter (unit `model`) is complete after the pass of the first unit that has it, the last to run.
        shared = len(order) - 1 if "embed" in order else 0
        at = max([at, *(order.get(p.unit, shared) for p in bucket.parameters)])
        full[list(order)[at]].append(bucket)
    return full


def _compute(term: Term, unit: str, micro_batch: int, masks: int = 0) -> Event:
    """Return one pass of a unit. `masks`: bytes of the masks that this pass is the last to need."""
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
    """Return the collective of one bucket; of its shard only, where the term reduces shards over replicas."""
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
    """Yield the communication in the middle of a pass of a unit."""
    tokens = strategy.micro_batch * job.seq // strategy.cp
    kind, repeat, unit_spec = unit.split(".")[0], repeat_of(strategy, unit), as_seen_by(spec, unit)
    rows = routed(spec.experts, strategy, tokens, rank) if spec.experts is not None else None
    for x in collectives.communication(unit_spec, job, strategy, kind, phase, tokens, repeat, rows):
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
    """Yield what the attention core communicates in a pass of a block: hops of the ring, all-to-alls of Ulysses."""
    grid, dtype, tokens = mesh(s), job.precision.compute, s.micro_batch * job.seq // s.cp
    for x in context.communication(local_model(spec, s), s, dtype, way, tokens):
        group = grid.group_of(rank, x.axis)
        step = {"send": 1, "recv": -1}.get(x.op)
        peer = None if step is None else group[(group.index(rank) + step) % len(group)]
        kind: Kind = "collective" if peer is None else "p2p"
        event = Event(kind, x.op, phase, unit, x.axis, len(group), peer, dtype)
        yield replace(event, micro_batch=micro_batch, bytes=x.bytes)


def _sent(x: Sent, bucket: Bucket, strategy: Strategy, micro_batch: int) -> Event:
    """Return one collective of a compressed bucket."""
    event = Event("collective", x.op, "B", bucket.name, x.axis, mesh(strategy).size(x.axis), dtype=x.dtype)
    return replace(event, micro_batch=micro_batch, bytes=x.bytes, at_most=x.at_most)
