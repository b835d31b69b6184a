"""The terms of reducing gradients and gathering parameters: the collectives of data parallelism and ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from phalanx.cost.compute import compression
from phalanx.cost.compute.unit_work import Column, Work
from phalanx.cost.step.term import Columns, Term
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.gradients.buckets import Bucket, buckets
from phalanx.schedule.gradients.compression import bucket_collectives, replica_collectives
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.compressors import Compression
from phalanx.spec.strategy.spec import Strategy


def data_parallel_terms(spec: ModelSpec, job: Job, s: Strategy | Columns, like: Strategy) -> list[Term]:
    """Return the terms of reducing gradients and, with ZeRO, of gathering parameters. Experts have buckets of their
    own, reduced over their own ranks. `spec`: the units that this pipeline rank has."""
    sizes, where = np.unique(np.atleast_1d(s.bucket_bytes), return_inverse=True)
    cuts = [buckets(spec, job, replace(like, bucket=size / 2**20)) for size in sizes]

    def column(of_cuts: list[int]) -> Column:
        """Spread one number per bucket size to the strategies that have that size."""
        return of_cuts[0] if isinstance(s, Strategy) else np.array(of_cuts)[where]

    terms = []
    for experts in (False, True):
        group = [[b for b in cut if b.experts == experts] for cut in cuts]
        if group[0] and group[0][0].ranks(like) > 1:
            terms += _bucket_terms(group, job.precision, like, s.accumulation(job), column)
    return terms


def _bucket_terms(
    cuts: Sequence[Sequence[Bucket]],
    p: Precision,
    like: Strategy,
    m: Column,
    column: Callable[[list[int]], Column],
) -> list[Term]:
    """Return the terms of buckets that are reduced over the same ranks; `cuts` has one list of buckets per size."""
    stage, first = like.effective_zero, cuts[0][0]
    axis, parts = first.axis(like), first.parts(like)
    count, numel = column([len(cut) for cut in cuts]), column([sum(b.padded(like) for b in cut) for cut in cuts])

    def term(op: str, phase: Phase, unit: str, axis: str, dtype: DType, times: Column = 1, part: int = 1) -> Term:
        """A collective per bucket, of the bucket or one of its `part` equal parts, `times` times a step."""
        event = Event("collective", op, phase, first.kind(unit), axis, dtype=dtype)
        return Term(event, count=count * times, bytes=numel // part * DTYPE_BYTES[dtype] * times)

    reductions = m if stage >= 2 else 1  # of each bucket in a step
    c = like.compressor
    if c is not None:
        terms = _compressed_terms(c, like, p.accumulate_dtype, cuts, column, reductions)
    elif stage == 0:
        terms = [term("all_reduce", "B", "gradients", axis, p.reduce_dtype)]
    else:
        terms = [term("reduce_scatter", "B", "gradients", axis, p.reduce_dtype, reductions)]
        if first.across(like):
            terms.append(term("all_reduce", "B", "shards", "dp_replicate", p.accumulate_dtype, part=parts))
    if stage >= 2:  # gradients are copied into the reduction buffer, and the reduced shards accumulated
        compute, accumulate = DTYPE_BYTES[p.compute], DTYPE_BYTES[p.accumulate_dtype]
        reduce = accumulate if c else DTYPE_BYTES[p.reduce_dtype]
        copies = Work(traffic_bytes=numel * reductions * (compute + reduce + 3 * accumulate / parts))
        terms[0] = replace(terms[0], work=terms[0].work + copies)
    if stage in (1, 2):
        terms.append(term("all_gather", "opt", "parameters", axis, p.compute))
    elif stage == 3:
        terms.append(_gathers(cuts[0], like, p.compute, m))
    return terms


def _compressed_terms(
    c: Compression,
    like: Strategy,
    dtype: DType,
    cuts: Sequence[Sequence[Bucket]],
    column: Callable[[list[int]], Column],
    times_a_step: Column,
) -> list[Term]:
    """Return the terms of reducing compressed gradients: the first collective of every bucket, the second of every
    bucket that has one, then the same for shards over their replicas. The first term carries the work of coding."""
    terms: list[Term] = []
    bucket_sends = [[bucket_collectives(c, b, like, dtype) for b in cut] for cut in cuts]
    shard_sends = [[replica_collectives(c, b, like) for b in cut] for cut in cuts]
    for unit, sends, times in (("gradients", bucket_sends, times_a_step), ("shards", shard_sends, 1)):
        kinds = {
            (i, x.op, x.axis, x.dtype, x.at_most)
            for of_cut in sends
            for of_bucket in of_cut
            for i, x in enumerate(of_bucket)
        }
        for i, op, axis, sent_dtype, at_most in sorted(kinds):
            sizes = [[of_bucket[i].bytes for of_bucket in of_cut if len(of_bucket) > i] for of_cut in sends]
            name = unit if i == 0 else f"{unit}, then"
            event = Event("collective", op, "B", name, axis, dtype=sent_dtype, at_most=at_most)
            terms.append(
                Term(event, column([len(n) for n in sizes]) * times, column([sum(n) for n in sizes]) * times)
            )
    e = DTYPE_BYTES[dtype]
    each = [compression.work(c, cut, like, e) for cut in cuts]
    traffic, kernels = column([int(w.traffic_bytes) for w in each]), column([int(w.kernels) for w in each])
    coding = Work(traffic_bytes=traffic, kernels=kernels) * times_a_step
    return [replace(terms[0], coding=coding, code=c.name), *terms[1:]]


def _gathers(cut: Sequence[Bucket], like: Strategy, dtype: DType, m: Column) -> Term:
    """Return ZeRO-3's gathers: of every unit in every pass of every micro-batch, or once a step."""
    total = sum(b.padded(like) for b in cut)
    kept = sum(b.padded(like) for b in cut if b.unit in ("head", "model"))  # from the forward to the backward pass
    kept_units = sum(b.unit in ("head", "model") for b in cut)
    event = Event("collective", "all_gather", "F", cut[0].kind("parameters"), cut[0].axis(like), dtype=dtype)
    if like.gathers_once:
        gathers, size = len(cut), total
    else:
        gathers, size = (2 * len(cut) - kept_units) * m, (2 * total - kept) * m
    return Term(event, count=gathers, bytes=size * DTYPE_BYTES[dtype])
