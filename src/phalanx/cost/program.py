"""The StepProgram: the terms of one strategy, expanded into the ordered events of one training step.

What `verify` and the trainer's own check compare with the recorded step, event for event, byte for byte
(verify/compare.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx.cost import memory
from phalanx.cost.issued import Issued
from phalanx.cost.terms import Term, highest, metrics, repeat_of, terms, unit_class
from phalanx.schedule import context_parallel, inside_layers
from phalanx.schedule.buckets import Bucket, buckets
from phalanx.schedule.compression import Sent, sent, sent_across
from phalanx.schedule.context_parallel import Context
from phalanx.schedule.event import INSIDE, Event, Kind, Phase
from phalanx.schedule.inside_layers import Way
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.mesh import mesh
from phalanx.spec.model import ModelSpec, units
from phalanx.spec.split import local
from phalanx.spec.strategy import Strategy


@dataclass(frozen=True)
class StepProgram:
    """The events of one step on one rank, in the order in which they are issued, and the state around them."""

    events: tuple[Event, ...]
    state: memory.State

    def bytes_per_axis(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for event in self.events:
            if event.axis:
                found[event.axis] += event.bytes
        return dict(found)

    def flops_per_unit(self) -> dict[tuple[str, str], int]:
        """FLOPs of the step by (phase, unit)."""
        return flops_per_unit(self.events)

    @property
    def peak_bytes(self) -> int:
        """The most live bytes at any instant."""
        return max((i.highest for i in instants(self.events, self.state.total)), default=self.state.total)


@dataclass(frozen=True)
class Instant:
    """Live bytes when an event begins, and the most while it lasts."""

    event: Event
    live: int
    highest: int


def instants(events: Iterable[Event], state: int) -> list[Instant]:
    """Live bytes over the computes of a step that begins with `state`: a walk over the events."""
    found = []
    for event in events:
        if event.kind == "compute":
            found.append(Instant(event, state, state + event.alloc))
            state += event.alloc - event.free
    return found


def flops_per_unit(events: Iterable[Event]) -> dict[tuple[str, str], int]:
    """FLOPs of the model's passes by (phase, unit)."""
    found: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.kind == "compute" and event.phase != "opt":
            found[event.phase, event.unit] += event.flops
    return dict(found)


def expand(spec: ModelSpec, job: Job, strategy: Strategy, rank: int | None = None) -> StepProgram:
    """Order the terms of a strategy into a step. `rank`: of a certain one, whose shard may hold padding; without one
    no rank holds more, and peers are the first rank's."""
    grid = mesh(strategy)
    ring_index = None if rank is None else int(grid.along("ring")[rank])
    by_template = {
        (t.event.op, t.event.unit): t for t in terms(spec, job, strategy, ring_index) if t.event.axis not in INSIDE
    }
    stage, alone = strategy.stage, strategy.gradient_ranks == 1
    cut = () if alone else buckets(spec, job, strategy)
    order = [b.name for b in reversed(cut) if b.unit not in ("", "model")]  # units that gather, forward
    events: list[Event] = []
    last = strategy.accumulation(job) - 1
    c, accumulate = strategy.compressor, job.precision.accumulate_dtype
    ready = _completed(cut, spec)
    part = Context(job.seq, strategy.ring, strategy.ulysses)
    apart = memory.documents(spec, job, strategy.micro_batch * part.tokens, part)
    last_use = {f"blocks.{i}": size for i, size in apart.items()}

    def inside(unit: str, phase: Phase, m: int) -> Iterable[Event]:
        return _inside(spec, job, strategy, rank or 0, unit, phase, m)

    def gather(name: str, phase: Phase, m: int | None) -> Event:
        bucket = next(b for b in cut if b.name == name)
        return _bucket(by_template["all_gather", "parameters"], bucket, strategy, m, phase)

    def reduction(bucket: Bucket, m: int) -> list[Event]:
        if c is not None:
            return [_sent(x, bucket, strategy, m) for x in sent(c, bucket, strategy, accumulate)]
        op = "reduce_scatter" if stage else "all_reduce"
        return [_bucket(by_template[op, "gradients"], bucket, strategy, m)]

    def across(bucket: Bucket) -> list[Event]:
        if c is not None:
            return [_sent(x, bucket, strategy, last) for x in sent_across(c, bucket, strategy)]
        if not stage or strategy.dp_replicate == 1:
            return []
        return [_bucket(by_template["all_reduce", "shards"], bucket, strategy, last)]

    issued = Issued(early=stage >= 2)
    for m in range(last + 1):
        gathers = stage == 3 and (m == 0 or strategy.reshard != "step")
        if gathers and cut[-1].unit == "model":
            events.append(gather("model", "F", m))
        for unit in units(spec):
            if gathers:
                events += (gather(name, "F", m) for name in _ahead(order, unit, +1, strategy.prefetch))
            events.append(_compute(by_template["forward", unit_class(strategy, unit)], unit, m))
            events += inside(unit, "F", m)
        for unit in reversed(units(spec)):
            if gathers and strategy.reshard != "step":
                events += (gather(name, "B", m) for name in _ahead(order, unit, -1, strategy.prefetch))
            events.append(
                _compute(by_template["backward", unit_class(strategy, unit)], unit, m, last_use.get(unit, 0))
            )
            events += inside(unit, "B", m)
            if alone or (stage <= 1 and m < last):
                continue
            for bucket in ready[unit]:
                events += issued.issue(reduction(bucket, m), across(bucket) if m == last else [])
        events += issued.flush()
    events += issued.finish()
    if size := memory.copies(spec, job, strategy):
        events.append(
            Event("collective", "all_reduce", "opt", "copies", "tp", strategy.tp, dtype=accumulate, bytes=size)
        )
    if strategy.world > 1:
        event = by_template["all_reduce", "metrics"].event
        events.append(replace(event, group_size=strategy.world, bytes=metrics(strategy) * 8))
    shard = None if rank is None else grid.shard(rank)
    events.append(_update(by_template["optimizer", ""], spec, job, strategy, shard))
    if stage in (1, 2):
        events += (_bucket(by_template["all_gather", "parameters"], b, strategy, None) for b in reversed(cut))
    return StepProgram(tuple(events), memory.state(spec, job, strategy, shard))


def _update(term: Term, spec: ModelSpec, job: Job, strategy: Strategy, shard: int | None) -> Event:
    cast = term.alloc
    if strategy.stage and shard is not None:
        cast = memory.cast_gradients(memory.owned(spec, job, strategy, shard)[0], job)
    return replace(term.event, alloc=cast, free=cast)


def _ahead(order: list[str], unit: str, way: int, prefetch: int) -> list[str]:
    """What starts to be gathered when a unit's pass begins: itself, where nobody did before, and what comes next."""
    if unit not in order:
        return []
    at, last = order.index(unit), len(order) - 1
    first = at == (0 if way > 0 else last)
    own = [unit] if (first and way > 0) or (not first and not prefetch) else []
    return own + ([order[at + way]] if prefetch and 0 <= at + way <= last else [])


def _completed(cut: tuple[Bucket, ...], spec: ModelSpec) -> dict[str, list[Bucket]]:
    """Which buckets are full after the backward pass of each unit. They are issued in order, none overtaking."""
    order = {unit: i for i, unit in enumerate(reversed(units(spec)))}
    full: dict[str, list[Bucket]] = {unit: [] for unit in order}
    at = 0
    for bucket in cut:
        # A shared parameter (unit `model`) is complete after the first unit's backward pass, the last to run.
        at = max([at, *(order.get(p.unit, len(order) - 1) for p in bucket.parameters)])
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
    of, repeat = unit.split(".")[0], repeat_of(strategy, unit)
    for x in inside_layers.sent(spec, job, strategy, of, phase, tokens, repeat):
        if isinstance(x, inside_layers.Core):
            yield from _core(spec, job, strategy, rank, unit, phase, micro_batch, x.way)
            continue
        event = Event("collective", x.op, phase, unit, "tp", strategy.tp, dtype=x.dtype)
        for _ in range(x.count):
            yield replace(event, micro_batch=micro_batch, bytes=x.bytes // x.count)


def _core(
    spec: ModelSpec, job: Job, s: Strategy, rank: int, unit: str, phase: Phase, micro_batch: int, way: Way
) -> Iterable[Event]:
    """What the core of attention sends, forward or backward, inside of a pass of a block."""
    grid, dtype, tokens = mesh(s), job.precision.compute, s.micro_batch * job.seq // s.cp
    for x in context_parallel.sent(local(spec, s.tp), s, dtype, way, tokens):
        group = grid.group_of(rank, x.axis)
        to = {"send": 1, "recv": -1}.get(x.op)
        peer = None if to is None else group[(group.index(rank) + to) % len(group)]
        kind: Kind = "collective" if peer is None else "p2p"
        event = Event(kind, x.op, phase, unit, x.axis, len(group), peer, dtype)
        yield replace(event, micro_batch=micro_batch, bytes=x.bytes)


def _sent(x: Sent, bucket: Bucket, strategy: Strategy, micro_batch: int) -> Event:
    event = Event("collective", x.op, "B", bucket.name, x.axis, mesh(strategy).size(x.axis), dtype=x.dtype)
    return replace(event, micro_batch=micro_batch, bytes=x.bytes, at_most=x.at_most)
