"""Expand the terms of a strategy into the ordered events of one training step of one rank.

The runtime has the same order: the actions of the pipeline schedule, the units of each chunk, the gathers of ZeRO-3
before their units, and buckets as they fill (bucket_order.py).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Literal

from phalanx.cost.memory.footprint import documents
from phalanx.cost.memory.state import (
    model_state,
    owned_elements,
    partial_gradient_bytes,
    tied_gradient_bytes,
    update_bytes,
)
from phalanx.cost.step.bucket_order import BucketOrder
from phalanx.cost.step.pass_terms import attention_core, boolean_mask_bytes
from phalanx.cost.step.program import StepProgram
from phalanx.cost.step.term import Term
from phalanx.cost.step.terms import OUTER, OUTER_METRICS, metrics_bytes, terms
from phalanx.schedule.event import INSIDE, Event, Kind, Phase
from phalanx.schedule.gradients.buckets import (
    PARAMETERS,
    PARAMETERS_IN_8_BITS,
    SCALES,
    Bucket,
    chunk_buckets,
    gathers_in_8_bits,
)
from phalanx.schedule.gradients.compression import (
    CompressedMessage,
    bucket_collectives,
    outer_collectives,
    outer_reduction,
    replica_collectives,
)
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.gradients.whole_matrices import Exchange
from phalanx.schedule.layers import collectives, context
from phalanx.schedule.layout import RankView, repeat_of
from phalanx.schedule.pipeline.actions import last_weight_grad_at
from phalanx.spec.job import DTYPE_BYTES
from phalanx.spec.model.spec import blocks_among


def expand(view: RankView, step_terms: Sequence[Term] | None = None, at: int | None = None) -> StepProgram:
    """Return the ordered events of one step of a rank and the model state around them. A stage view has the peers of
    the stage's first rank. `step_terms`: the rank's terms, if the caller has them. `at`: the index of the step among
    the steps that replicas take alone; None: the last step that sends changes."""
    at = view.job.outer.last_sent(view.strategy.local) if at is None else at
    return _Expansion(view, terms(view) if step_terms is None else step_terms, at).program()


_BACKWARD = {"B": "backward", "I": "input_grad", "W": "weight_grad"}


class _Expansion:
    """Builds the step of one rank, action by action of its pipeline schedule."""

    def __init__(self, view: RankView, step_terms: Sequence[Term], at: int) -> None:
        self.at = at
        self.view, self.job, self.strategy = view, view.job, view.strategy
        outside = (t for t in step_terms if t.event.phase == "opt" or t.event.axis not in (*INSIDE, "pp"))
        self.terms = {(t.event.op, t.event.unit): t for t in outside}
        self.finished = last_weight_grad_at(view.actions)
        order = [view.chunk_indices.index(chunk) for chunk in self.finished]
        self.sharding = sharding_of(self.strategy)
        early = self.sharding.reduces_each
        sets = chunk_buckets(view.buckets, view.stage, order, early)
        self.ready = [
            _buckets_by_unit([view.buckets[i] for i in indices], units)
            for indices, units in zip(sets, view.chunks, strict=True)
        ]
        self.bucket_order = BucketOrder(early)
        self.reductions_left = Counter(view.buckets[i].name for indices in sets for i in indices)  # in this step
        # Units gathered by ZeRO-3, in the order of the forward pass.
        self.gathers = [b.unit for b in reversed(view.buckets) if b.unit not in ("", "model") and not b.experts]
        self.gathered_units: set[str] = set()
        self.outgoing: set[tuple[str, int]] = set()
        self.stream = prod(view.stream_shape) * DTYPE_BYTES[self.job.precision.compute]
        self.peers = view.mesh.group_of(view.representative, "pp")
        core = attention_core(view)
        self.boolean_masks = boolean_mask_bytes(view, core)
        self.masks = [
            documents(view.stage, self.job, view.tokens, view.context, blocks_among(u)) for u in view.chunks
        ]
        # Events of any micro-batch: passes by term and bytes of masks, communication in layers by class and phase.
        self.passes: dict[tuple[str, str, int], Event] = {}
        self.inside: dict[tuple[str, Phase], tuple[Event, ...]] = {}
        self.log = EventLog()

    def program(self) -> StepProgram:
        """Expand all actions, then the end of the step: reductions, metrics, optimizer, gathers."""
        view, job, strategy, log = self.view, self.job, self.strategy, self.log
        # The pipeline's actions.
        for at, action in enumerate(view.actions):
            kind, chunk, m = action
            if kind == "F":
                self._forward(chunk, m)
            elif kind in _BACKWARD:
                self._backward(kind, chunk, m, last=self.finished[chunk] == at)  # type: ignore[arg-type]
            else:
                self._message(kind, chunk, m)
        # Remaining reductions, and gradients that several ranks of a replica share.
        log.add(self.bucket_order.finish())
        log.hold(-self.stream * len(self.outgoing))
        accumulate = job.precision.accumulate_dtype
        if size := tied_gradient_bytes(view):
            log.add([Event("collective", "all_reduce", "opt", "embedding", "embed", 2, dtype=accumulate, bytes=size)])
        if size := partial_gradient_bytes(view):
            log.add(
                [Event("collective", "all_reduce", "opt", "copies", "tp", strategy.tp, dtype=accumulate, bytes=size)]
            )
        # Metrics, and the update.
        if (ranks := view.mesh.step_ranks) > 1:
            event = self.terms["all_reduce", "metrics"].event
            log.add([replace(event, group_size=ranks, bytes=metrics_bytes(view.model, strategy))])
        if strategy.local and self.at + 1 == strategy.local:
            term = self.terms["all_reduce", OUTER_METRICS]
            log.add([replace(term.event, unit="metrics", group_size=strategy.dp_local, bytes=term.bytes)])
        log.compute(_update(self.terms["optimizer", ""], view))
        for x in view.exchanges:
            log.add(_matrix_exchange(x, view))
        # The synchronisation of replicas that step alone.
        log.add(self._changes())
        # Gathers of updated parameters.
        if self.sharding.updates_gather:
            for b in reversed(view.buckets):
                log.add(self._sent("all_gather", PARAMETERS, b, None))
        for (_, unit), term in self.terms.items():
            if unit.startswith(SCALES):
                size = view.mesh.size(term.event.axis)
                log.add([replace(term.event, group_size=size, bytes=term.bytes)])
        return StepProgram(log.events(), model_state(view), *log.before)

    def _changes(self) -> Iterator[Event]:
        """Yield the collectives by which replicas that step alone reduce the changes of their parameters."""
        view, s = self.view, self.strategy
        sent = self.job.outer.sent(self.at, s.local) if s.local else None
        if s.outer_compressor is None:
            for b in view.buckets:
                if b.fragment == sent:
                    yield _bucket(self.terms["all_reduce", b.kind(OUTER)], b, view, None)
            return
        alone, cut = outer_reduction(view.buckets, s)
        for b in (b for b in cut if b.fragment == sent):
            for x in outer_collectives(b, alone, self.job.precision.accumulate_dtype):
                yield replace(_compressed(x, b, view, None), phase="opt")

    def _forward(self, chunk: int, m: int) -> None:
        """Log the forward pass of a chunk for micro-batch m."""
        index = self.view.chunk_indices.index(chunk)
        units = self.view.chunks[index]
        if self.view.buckets[-1].unit == "model":
            self.log.add(self._gathered(["model"], "F", m))
        if units[0] != "embed" and (masks := self.masks[index]):  # the embedding's term includes them
            self.log.hold(sum(masks.values()) + self.boolean_masks)
            self.log.hold(-self.boolean_masks)
        for unit in units:
            self.log.add(self._gathered(self._needed(unit, "F"), "F", m))
            self.log.compute(self._pass("forward", unit, m))
            self.log.add(self._inside(unit, "F", m))

    def _backward(self, phase: Literal["B", "I", "W"], chunk: int, m: int, last: bool) -> None:
        """Log a backward pass (B, I or W) of a chunk for micro-batch m, and reductions of the buckets that it fills.
        `last`: whether it is the chunk's last backward pass in the step."""
        index = self.view.chunk_indices.index(chunk)
        last_use = {f"blocks.{i}": size for i, size in self.masks[index].items()} if phase != "W" else {}
        reduced = phase != "I" and (last or self.sharding.reduces_each)
        for unit in reversed(self.view.chunks[index]):
            if phase == "B":
                self.log.add(self._gathered(self._needed(unit, "B"), "B", m))
            self.log.compute(self._pass(_BACKWARD[phase], unit, m, last_use.get(unit, 0)))
            self.log.add(self._inside(unit, phase, m))
            for bucket in self.ready[index][unit] if reduced else ():
                self.reductions_left[bucket.name] -= last
                across = [] if self.reductions_left[bucket.name] else self._across(bucket, m)
                self.log.add(self.bucket_order.issue(self._reduction(bucket, m), across))
        if reduced and self.sharding.reduces_each:
            self.log.add(self.bucket_order.flush())

    def _message(self, kind: str, chunk: int, m: int) -> None:
        """Log a message between pipeline ranks. A receive allocates a buffer; a send frees the buffer of the chunk's
        previous send in the same direction."""
        op, _, way = kind.partition("_")
        if op == "RECV":
            self.log.hold(self.stream)
        elif (way, chunk) in self.outgoing:
            self.log.hold(-self.stream)
        else:
            self.outgoing.add((way, chunk))
        onward = (1 if way == "F" else -1) * (1 if op == "SEND" else -1)
        peer = self.peers[self.view.layout.rank_of[chunk + onward]]
        event = Event("p2p", op.lower(), way, f"chunk.{chunk}", "pp", self.strategy.pp, peer)  # type: ignore[arg-type]
        dtype = self.job.precision.compute
        self.log.add([replace(event, dtype=dtype, chunk=chunk, micro_batch=m, bytes=self.stream)])

    def _pass(self, op: str, unit: str, m: int, masks: int = 0) -> Event:
        """Return one pass of a unit. `masks`: bytes of masks that no later pass needs."""
        key = op, self.view.class_of[unit], masks
        if key not in self.passes:
            self.passes[key] = _template(self.terms[key[:2]], masks)
        return self.passes[key].at(unit, m)

    def _inside(self, unit: str, phase: Phase, m: int) -> Iterator[Event]:
        """Yield the communication in the middle of a pass of a unit."""
        key = self.view.class_of[unit], phase
        if key not in self.inside:
            self.inside[key] = tuple(_communication(self.view, unit, phase))
        for event in self.inside[key]:
            yield event.at(unit, m)

    def _needed(self, unit: str, phase: Phase) -> list[str]:
        """Return the units whose gathers must have started when a pass of `unit` begins (ZeRO-3)."""
        s, order = self.strategy, self.gathers
        if not self.sharding.keeps_gathered or unit not in order:
            return _prefetched(order, unit, 1 if phase == "F" else -1, s.prefetch)
        after = order.index(unit) + 1
        return [unit, *order[after : after + s.prefetch]] if phase == "F" else []

    def _gathered(self, names: Iterable[str], phase: Phase, m: int) -> Iterator[Event]:
        """Yield the gathers of the units, except those gathered earlier and kept (ZeRO-3)."""
        for name in names:
            if name not in self.gathered_units or not self.sharding.keeps_gathered:
                self.gathered_units.add(name)
                for bucket in sorted((b for b in self.view.buckets if b.unit == name), key=lambda b: b.experts):
                    what = PARAMETERS_IN_8_BITS if gathers_in_8_bits(bucket, self.job.precision) else PARAMETERS
                    yield from self._sent("all_gather", what, bucket, m, phase)

    def _sent(self, op: str, what: str, bucket: Bucket, m: int | None, phase: Phase | None = None) -> list[Event]:
        """Return one collective of a bucket; empty over one rank. `what`: the key of its term (Bucket.kind)."""
        if bucket.ranks(self.strategy) == 1:
            return []
        return [_bucket(self.terms[op, bucket.kind(what)], bucket, self.view, m, phase)]

    def _reduction(self, bucket: Bucket, m: int) -> list[Event]:
        """Return the collectives that reduce a bucket of gradients."""
        s, c = self.strategy, self.strategy.compressor
        if c is not None:
            sends = bucket_collectives(c, bucket, s, self.job.precision.accumulate_dtype)
            return [_compressed(x, bucket, self.view, m) for x in sends]
        op = "reduce_scatter" if self.sharding.state else "all_reduce"
        return self._sent(op, "gradients", bucket, m)

    def _across(self, bucket: Bucket, m: int) -> list[Event]:
        """Return the collectives that reduce a bucket's shard over the replicas (HSDP)."""
        s, c = self.strategy, self.strategy.compressor
        if c is not None:
            return [_compressed(x, bucket, self.view, m) for x in replica_collectives(c, bucket, s)]
        return self._sent("all_reduce", "shards", bucket, m) if bucket.across(s) else []


class EventLog:
    """Events in issue order. Memory allocated or freed between two passes is attributed to the earlier one."""

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
        """Append a pass, which allocates and frees memory."""
        self._close()
        self._at = len(self._events)
        self._events.append(event)
        self._live, self._highest = event.alloc - event.free, event.alloc

    def _close(self) -> None:
        """Attribute to the last pass the memory allocated and freed since it began."""
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


def _matrix_exchange(x: Exchange, view: RankView) -> Iterator[Event]:
    """Yield the all-to-alls that send the pieces of matrices to their owners and the updated ones back."""
    dtype = view.job.precision.compute
    event = Event("collective", "all_to_all", "opt", x.unit, x.axis, len(x.places), dtype=dtype)
    for elements in (x.held_elements, x.owned_elements) if x.axis else ():
        yield replace(event, bytes=elements * DTYPE_BYTES[dtype])


def _update(term: Term, view: RankView) -> Event:
    """Return the optimizer's event. A specific rank casts the gradients of its own shard."""
    cast = term.alloc
    if view.strategy.shards > 1 and view.shard is not None:
        cast = update_bytes(view, owned_elements(view, view.shard)[0])
    return replace(term.event, alloc=cast, free=cast)


def _prefetched(order: list[str], unit: str, way: int, prefetch: int) -> list[str]:
    """Return the units whose gathers start when a pass of `unit` begins: the unit itself unless an earlier pass
    prefetched it, and the next unit with prefetch. `way`: +1 forward, -1 backward."""
    if unit not in order:
        return []
    at, last = order.index(unit), len(order) - 1
    first = at == (0 if way > 0 else last)
    current = [unit] if (first and way > 0) or (not first and not prefetch) else []
    return current + ([order[at + way]] if prefetch and 0 <= at + way <= last else [])


def _buckets_by_unit(cut: Sequence[Bucket], units: tuple[str, ...]) -> dict[str, list[Bucket]]:
    """Return by unit of a chunk the buckets that are issued after its backward pass: the full ones, in their order,
    each after all buckets before it."""
    order = {unit: i for i, unit in enumerate(reversed(units))}
    full: dict[str, list[Bucket]] = {unit: [] for unit in order}
    at = 0
    for bucket in cut:
        # The gradient of a shared parameter (unit `model`) is complete after the backward pass of the embedding.
        shared = len(order) - 1 if "embed" in order else 0
        at = max([at, *(order.get(p.unit, shared) for p in bucket.parameters)])
        full[list(order)[at]].append(bucket)
    return full


def _template(term: Term, masks: int) -> Event:
    """Return the event of one pass of a term, after which no pass needs `masks` bytes of masks."""
    alloc = term.peak(masks)
    free = term.free + masks - (term.alloc - alloc)
    return replace(term.event, flops=term.work.flops // term.count, alloc=alloc, free=free)


def _bucket(term: Term, bucket: Bucket, view: RankView, micro_batch: int | None, phase: Phase | None = None) -> Event:
    """Return the collective of one bucket, or of its shard alone if the term reduces shards over replicas."""
    of_shard = term.event.unit in ("shards", bucket.kind(OUTER))
    numel = bucket.padded(view.strategy) // (bucket.parts(view.strategy) if of_shard else 1)
    return replace(
        term.event,
        unit=bucket.name,
        phase=phase or term.event.phase,
        group_size=view.mesh.size(term.event.axis),
        micro_batch=micro_batch,
        bytes=numel * DTYPE_BYTES[term.event.dtype],
    )


def _communication(view: RankView, unit: str, phase: Phase) -> Iterator[Event]:
    """Yield the communication in the middle of a pass of a unit, for any micro-batch."""
    repeat, rows, splits = repeat_of(view.strategy, unit), view.rows_of(unit), view.splits_backward
    for x in collectives.communication(
        view.model, view.job, view.strategy, unit, phase, view.tokens, repeat, rows, splits
    ):
        if isinstance(x, collectives.CoreRuns):
            yield from _core(view, unit, phase, x)
            continue
        size = view.mesh.size(x.axis)
        event = Event("collective", x.op, phase, unit, x.axis, size, dtype=x.dtype, routed=x.routed)
        for _ in range(x.count):
            yield replace(event, bytes=x.bytes // x.count)


def _core(view: RankView, unit: str, phase: Phase, runs: collectives.CoreRuns) -> Iterator[Event]:
    """Yield the hops of a ring or the all-to-alls of an attention core or a recurrence in a pass of a block."""
    dtype, rank = view.job.precision.compute, view.representative
    for x in context.communication(runs.op, runs.sublayer, view.strategy, dtype, runs.way, view.tokens):
        group = view.mesh.group_of(rank, x.axis)
        step = {"send": 1, "recv": -1}.get(x.op)
        peer = None if step is None else group[(group.index(rank) + step) % len(group)]
        kind: Kind = "collective" if peer is None else "p2p"
        yield Event(kind, x.op, phase, unit, x.axis, len(group), peer, dtype, bytes=x.bytes)


def _compressed(x: CompressedMessage, bucket: Bucket, view: RankView, micro_batch: int | None) -> Event:
    """Return one collective of a compressed bucket."""
    event = Event("collective", x.op, "B", bucket.name, x.axis, view.mesh.size(x.axis), dtype=x.dtype)
    return replace(event, micro_batch=micro_batch, bytes=x.bytes, at_most=x.at_most)
