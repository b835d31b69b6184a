"""A training step, written once, as terms.

A Term stands for all events of one template in one step of one rank: how many, how many bytes, how much work,
and what each allocates and frees. Its numbers are functions of the Strategy's fields and take one strategy or
NumPy columns of many. The search sums terms; `program.expand` turns the same terms into ordered events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phalanx.cost import kernel, memory
from phalanx.cost.kernel import NO_WORK, Column, Work
from phalanx.schedule.buckets import gradient_buckets, unit_buckets
from phalanx.schedule.event import Event, Phase
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model import ModelSpec
from phalanx.spec.strategy import Strategy

Indices = npt.NDArray[np.int64]


def metrics(stage: int) -> int:
    """Numbers in the fused fp64 all-reduce of a step: loss sum, target tokens, stop flag, faulty-loss flag, and
    where gradients are sharded the square of their norm."""
    return 5 if stage else 4


@dataclass(frozen=True)
class Columns:
    """Strategies that differ in what stands here as NumPy columns, and else are as `like` is."""

    like: Strategy
    micro_batch: Column
    bucket_bytes: Column

    def accumulation(self, job: Job) -> Column:
        return job.global_batch // (self.micro_batch * self.like.dp)


def columns(strategies: Sequence[Strategy]) -> list[tuple[Columns, Indices]]:
    """Strategies as columns, group by group, with the rows that each group stands for."""
    groups: dict[Strategy, list[int]] = {}
    for i, s in enumerate(strategies):
        groups.setdefault(replace(s, micro_batch=1, bucket="auto"), []).append(i)
    return [
        (
            Columns(
                like, *(np.array([getattr(strategies[i], f) for i in rows]) for f in ("micro_batch", "bucket_bytes"))
            ),
            np.array(rows),
        )
        for like, rows in groups.items()
    ]


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
    """The terms of a data-parallel step: units forward and backward for each micro-batch, the collectives of the ZeRO
    stage, the metrics, the optimizer."""
    like = s if isinstance(s, Strategy) else s.like
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
    found += _collective_terms(spec, job, s, like)
    active = int(like.dp > 1)
    found.append(
        Term(
            Event("collective", "all_reduce", "opt", "metrics", "world", dtype="float64"),
            count=active,
            bytes=active * metrics(like.stage) * 8,
        )
    )
    shards = like.dp_shard
    cast = memory.cast_gradients(spec, job, shards)
    optimizer = Event("compute", "optimizer", "opt", dtype=job.precision.master_dtype)
    found.append(Term(optimizer, count=1, work=kernel.optimizer(spec, job, shards), alloc=cast, free=cast))
    return tuple(found)


def _freed(spec: ModelSpec, unit: str, t: Column, job: Job) -> Column:
    """What a backward pass frees of what forward passes kept: its own, and its input instead of its output."""
    stream = t * spec.hidden * DTYPE_BYTES[job.precision.compute]
    kept = memory.footprint(spec, unit, t, job.seq, job).kept
    return {"embed": kept - stream, "blocks": kept, "head": kept + stream}[unit]


def _collective_terms(spec: ModelSpec, job: Job, s: Strategy | Columns, like: Strategy) -> list[Term]:
    """Gradients on their way, in the backward pass, and parameters that are gathered (one of ZeRO's stages)."""
    p, stage, shards = job.precision, like.stage, like.dp_shard
    m = s.accumulation(job)
    bucket_bytes = np.atleast_1d(s.bucket_bytes)
    if stage == 3:
        cuts = [unit_buckets(spec)]
        where = np.zeros(len(bucket_bytes), dtype=int)
    else:
        sizes, where = np.unique(bucket_bytes, return_inverse=True)
        cuts = [gradient_buckets(spec, job, int(size)) for size in sizes]
    counts = np.array([len(cut) for cut in cuts])[where]
    padded = np.array([sum(b.padded(shards if stage else 1) for b in cut) for cut in cuts], dtype=object)[where]
    one = isinstance(s, Strategy)
    count: Column = int(counts[0]) if one else counts
    numel: Column = int(padded[0]) if one else padded.astype(np.int64)

    def term(op: str, phase: Phase, unit: str, axis: str, dtype: DType, times: Column, size: Column) -> Term:
        total = numel * size * DTYPE_BYTES[dtype]
        return Term(Event("collective", op, phase, unit, axis, dtype=dtype), count=count * times, bytes=total)

    if stage == 0:
        active = int(like.dp > 1)
        return [term("all_reduce", "B", "gradients", "dp_replicate", p.reduce_dtype, active, active)]
    often = m if stage >= 2 else 1
    found = [term("reduce_scatter", "B", "gradients", "dp_shard", p.reduce_dtype, often, often)]
    if like.dp_replicate > 1:
        shard = term("all_reduce", "B", "shards", "dp_replicate", p.accumulate_dtype, 1, 1)
        found.append(replace(shard, bytes=shard.bytes // shards))
    if stage < 3:
        found.append(term("all_gather", "opt", "parameters", "dp_shard", p.compute, 1, 1))
        return found
    cut = unit_buckets(spec)
    whole = sum(b.padded(shards) for b in cut)
    kept = sum(b.padded(shards) for b in cut if b.unit in ("head", "model"))  # from the forward to the backward pass
    kept_units = sum(b.unit in ("head", "model") for b in cut)
    event = Event("collective", "all_gather", "F", "parameters", "dp_shard", dtype=p.compute)
    if like.reshard == "step":
        gathers, size = len(cut), whole
    else:
        gathers, size = (2 * len(cut) - kept_units) * m, (2 * whole - kept) * m
    found.append(Term(event, count=gathers, bytes=size * DTYPE_BYTES[p.compute]))
    return found
