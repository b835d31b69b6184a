"""The StepProgram: the terms of one strategy, expanded into the ordered events of one training step.

What `verify` and the trainer's own check compare with the recorded step, event for event, byte for byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.cost import memory
from phalanx.cost.terms import METRICS, Term, terms
from phalanx.schedule.buckets import Bucket, gradient_buckets
from phalanx.schedule.event import Event
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.mesh import mesh
from phalanx.spec.model import ModelSpec, units
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
        found: Counter[tuple[str, str]] = Counter()
        for event in self.events:
            if event.kind == "compute" and event.phase != "opt":
                found[event.phase, event.unit] += event.flops
        return dict(found)

    @property
    def peak_bytes(self) -> int:
        """The most live bytes at any instant: a walk over the events."""
        live = peak = self.state.total
        for event in self.events:
            peak = max(peak, live + event.alloc)
            live += event.alloc - event.free
        return peak


def expand(spec: ModelSpec, job: Job, strategy: Strategy) -> StepProgram:
    """Order the terms of a strategy into a step."""
    by_template = {(t.event.op, t.event.unit): t for t in terms(spec, job, strategy)}
    cut = gradient_buckets(spec, job, strategy.bucket_bytes) if strategy.dp > 1 else ()
    events: list[Event] = []
    last = strategy.accumulation(job) - 1
    for m in range(last + 1):
        for unit in units(spec):
            events.append(_compute(by_template["forward", unit.split(".")[0]], unit, m))
        ready = _completed(cut, spec)
        for unit in reversed(units(spec)):
            events.append(_compute(by_template["backward", unit.split(".")[0]], unit, m))
            if m == last:
                events += (_bucket(by_template["all_reduce", "gradients"], b, job, strategy, m) for b in ready[unit])
    if strategy.dp > 1:
        metrics = by_template["all_reduce", "metrics"].event
        events.append(replace(metrics, group_size=mesh(strategy).world, bytes=METRICS * 8))
    update = by_template["optimizer", ""]
    events.append(replace(update.event, alloc=update.alloc, free=update.free))
    return StepProgram(tuple(events), memory.state(spec, job, strategy.dp))


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


def _compute(term: Term, unit: str, micro_batch: int) -> Event:
    return replace(
        term.event,
        unit=unit,
        micro_batch=micro_batch,
        flops=term.work.flops // term.count,
        alloc=int(term.alloc),
        free=int(term.free),
    )


def _bucket(term: Term, bucket: Bucket, job: Job, strategy: Strategy, micro_batch: int) -> Event:
    return replace(
        term.event,
        unit=bucket.name,
        group_size=mesh(strategy).size(term.event.axis),
        micro_batch=micro_batch,
        bytes=bucket.numel * DTYPE_BYTES[job.precision.reduce_dtype],
    )


def differences(predicted: tuple[Event, ...], recorded: tuple[Event, ...]) -> Iterator[str]:
    """Where recorded events differ from the predicted ones: order per axis, then FLOPs per unit."""
    for axis in dict.fromkeys(e.axis for e in (*predicted, *recorded) if e.axis):
        ours = [e for e in predicted if e.axis == axis]
        theirs = [e for e in recorded if e.axis == axis]
        for i in range(max(len(ours), len(theirs))):
            a = ours[i] if i < len(ours) else None
            b = theirs[i] if i < len(theirs) else None
            if a is None or b is None or a.identity != b.identity:
                yield f"axis {axis}, event {i}: predicted {a or 'nothing'}, recorded {b or 'nothing'}"
                break
    ours_flops = StepProgram(predicted, _NO_STATE).flops_per_unit()
    theirs_flops = StepProgram(recorded, _NO_STATE).flops_per_unit()
    for key in dict.fromkeys((*ours_flops, *theirs_flops)):
        a_flops, b_flops = ours_flops.get(key), theirs_flops.get(key)
        if a_flops != b_flops:
            yield f"FLOPs of {key[0]} {key[1]}: predicted {a_flops}, recorded {b_flops}"


_NO_STATE = memory.State(0, 0, 0, 0, 0, 0)
