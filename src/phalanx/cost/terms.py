"""A training step, written once, as terms.

A Term stands for all events of one template in one step of one rank: how many, how many bytes, how much work,
and what each allocates and frees. Its numbers are functions of the Strategy's fields and take one strategy or
NumPy columns of many. The search sums terms; `program.expand` turns the same terms into ordered events.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from phalanx.cost import kernel, memory
from phalanx.cost.kernel import NO_WORK, Column, Work
from phalanx.schedule.buckets import gradient_buckets
from phalanx.schedule.event import Event
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model import ModelSpec
from phalanx.spec.strategy import Strategy

METRICS = 4
"""Numbers in the fused fp64 all-reduce of a step: loss sum, target tokens, stop flag, faulty-loss flag."""


@dataclass(frozen=True)
class Columns:
    """The fields of many strategies, one NumPy column each: what terms read, and a Strategy has alike."""

    dp: Column
    micro_batch: Column
    bucket_bytes: Column

    def accumulation(self, job: Job) -> Column:
        return job.global_batch // (self.micro_batch * self.dp)


def columns(strategies: list[Strategy]) -> Columns:
    return Columns(*(np.array([getattr(s, f.name) for s in strategies], dtype=np.int64) for f in fields(Columns)))


@dataclass(frozen=True)
class Term:
    """`count` events like `event` in a step. `bytes` and `work` are totals over them; `alloc`, `free` are each's."""

    event: Event
    count: Column
    bytes: Column = 0
    work: Work = NO_WORK
    alloc: Column = 0
    free: Column = 0


def terms(spec: ModelSpec, job: Job, s: Strategy | Columns) -> tuple[Term, ...]:
    """The terms of a data-parallel step at zero=0: units forward and backward for each micro-batch, one all-reduce
    per bucket, the metrics, the optimizer."""
    m = s.accumulation(job)
    # FLOPs of a step pass 2^63 for large models: columns go through float64, one strategy through exact ints.
    t: Column = s.micro_batch * job.seq if isinstance(s, Strategy) else (s.micro_batch * job.seq).astype(float)
    e = DTYPE_BYTES[job.precision.compute]
    dtype = job.precision.compute
    found = []
    for unit, n in (("embed", 1), ("blocks", spec.layers), ("head", 1)):
        held = memory.footprint(spec, unit, t, job.seq, job)
        targets = t * 8 if unit == "embed" else 0  # made contiguous for one micro-batch
        found.append(
            Term(
                Event("compute", "forward", "F", unit, dtype=dtype),
                count=n * m,
                work=kernel.forward(spec, unit, t, job.seq, e) * (n * m),
                alloc=held.kept + held.forward + targets,
                free=held.forward,
            )
        )
        found.append(
            Term(
                Event("compute", "backward", "B", unit, dtype=dtype),
                count=n * m,
                work=kernel.backward(spec, unit, t, job.seq, e) * (n * m),
                alloc=held.backward,
                free=held.backward - held.leaves + targets + _freed(spec, unit, t, job),
            )
        )
    found += _gradient_terms(spec, job, s)
    found.append(
        Term(
            Event("collective", "all_reduce", "opt", "metrics", "world", dtype="float64"),
            count=np.where(np.greater(s.dp, 1), 1, 0) if isinstance(s, Columns) else int(s.dp > 1),
            bytes=(s.dp > 1) * METRICS * 8,
        )
    )
    cast = memory.cast_gradients(spec, job)
    optimizer = Event("compute", "optimizer", "opt", dtype=job.precision.master_dtype)
    found.append(Term(optimizer, count=1, work=kernel.optimizer(spec, job), alloc=cast, free=cast))
    return tuple(found)


def _freed(spec: ModelSpec, unit: str, t: Column, job: Job) -> Column:
    """What a backward pass frees of what forward passes kept: its own, and its input instead of its output."""
    stream = t * spec.hidden * DTYPE_BYTES[job.precision.compute]
    kept = memory.footprint(spec, unit, t, job.seq, job).kept
    return {"embed": kept - stream, "blocks": kept, "head": kept + stream}[unit]


def _gradient_terms(spec: ModelSpec, job: Job, s: Strategy | Columns) -> list[Term]:
    """One all-reduce per bucket over the data axis, in the last micro-batch's backward pass."""
    dtype = job.precision.reduce_dtype
    event = Event("collective", "all_reduce", "B", "gradients", "dp_replicate", dtype=dtype)
    total = spec.parameter_count * DTYPE_BYTES[dtype]
    if isinstance(s, Strategy):
        count: Any = len(gradient_buckets(spec, job, s.bucket_bytes))
    else:
        sizes, where = np.unique(s.bucket_bytes, return_inverse=True)
        count = np.array([len(gradient_buckets(spec, job, int(size))) for size in sizes])[where]
    active = s.dp > 1
    return [Term(event, count=count * active, bytes=total * active)]
