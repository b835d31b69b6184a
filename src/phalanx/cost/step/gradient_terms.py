"""Terms of what reduces gradients and gathers parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from phalanx.cost.compute import compression
from phalanx.cost.compute.unit_work import Column, Work
from phalanx.cost.step.term import Columns, Term
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.gradients.buckets import Bucket, buckets
from phalanx.schedule.gradients.compression import sent, sent_across
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.compression import Compression
from phalanx.spec.strategy.spec import Strategy


def _collective_terms(spec: ModelSpec, job: Job, s: Strategy | Columns, like: Strategy) -> list[Term]:
    """Gradients on their way, in the backward pass, and parameters that are gathered (one of ZeRO's stages); those of
    experts apart, over ranks of their own."""
    sizes, where = np.unique(np.atleast_1d(s.bucket_bytes), return_inverse=True)
    cuts = [buckets(spec, job, replace(like, bucket=size / 2**20)) for size in sizes]

    def column(of_cuts: list[int]) -> Column:
        """A number of each way to cut the parameters into buckets, for the strategies that cut so."""
        return of_cuts[0] if isinstance(s, Strategy) else np.array(of_cuts)[where]

    found = []
    for experts in (False, True):
        own = [[b for b in cut if b.experts == experts] for cut in cuts]
        if own[0] and own[0][0].ranks(like) > 1:
            found += _bucket_terms(own, job.precision, like, s.accumulation(job), column)
    return found


def _bucket_terms(
    cuts: Sequence[Sequence[Bucket]],
    p: Precision,
    like: Strategy,
    m: Column,
    column: Callable[[list[int]], Column],
) -> list[Term]:
    """Those of buckets that go over the same ranks."""
    stage, first = like.stage, cuts[0][0]
    axis, parts = first.axis(like), first.parts(like)
    count, numel = column([len(cut) for cut in cuts]), column([sum(b.padded(like) for b in cut) for cut in cuts])

    def term(op: str, phase: Phase, unit: str, axis: str, dtype: DType, times: Column = 1, part: int = 1) -> Term:
        """Every bucket, or a `part` of it, so many times."""
        event = Event("collective", op, phase, first.kind(unit), axis, dtype=dtype)
        return Term(event, count=count * times, bytes=numel // part * DTYPE_BYTES[dtype] * times)

    often = m if stage >= 2 else 1
    c = like.compressor
    if c is not None:
        found = _compressed_terms(c, like, p.accumulate_dtype, cuts, column, often)
    elif stage == 0:
        found = [term("all_reduce", "B", "gradients", axis, p.reduce_dtype)]
    else:
        found = [term("reduce_scatter", "B", "gradients", axis, p.reduce_dtype, often)]
        if first.across(like):
            found.append(term("all_reduce", "B", "shards", "dp_replicate", p.accumulate_dtype, part=parts))
    if stage >= 2:  # gradients are copied to where they are reduced, and added up shard by shard
        compute, accumulate = DTYPE_BYTES[p.compute], DTYPE_BYTES[p.accumulate_dtype]
        reduce = accumulate if c else DTYPE_BYTES[p.reduce_dtype]
        copies = Work(traffic_bytes=numel * often * (compute + reduce + 3 * accumulate / parts))
        found[0] = replace(found[0], work=found[0].work + copies)
    if stage in (1, 2):
        found.append(term("all_gather", "opt", "parameters", axis, p.compute))
    elif stage == 3:
        found.append(_gathers(cuts[0], like, p.compute, m))
    return found


def _compressed_terms(
    c: Compression,
    like: Strategy,
    dtype: DType,
    cuts: Sequence[Sequence[Bucket]],
    column: Callable[[list[int]], Column],
    often: Column,
) -> list[Term]:
    """The collectives of compressed gradients: the first of every bucket, the second of every bucket that has one;
    then the same of shards over their replicas. The work of coding is with the first."""
    found: list[Term] = []
    of_buckets = [[sent(c, b, like, dtype) for b in cut] for cut in cuts]
    of_shards = [[sent_across(c, b, like) for b in cut] for cut in cuts]
    for unit, sends, times in (("gradients", of_buckets, often), ("shards", of_shards, 1)):
        kinds = {
            (i, x.op, x.axis, x.dtype, x.at_most) for of_cut in sends for own in of_cut for i, x in enumerate(own)
        }
        for i, op, axis, sent_dtype, at_most in sorted(kinds):
            sizes = [[own[i].bytes for own in of_cut if len(own) > i] for of_cut in sends]
            name = unit if i == 0 else f"{unit}, then"
            event = Event("collective", op, "B", name, axis, dtype=sent_dtype, at_most=at_most)
            found.append(
                Term(event, column([len(n) for n in sizes]) * times, column([sum(n) for n in sizes]) * times)
            )
    e = DTYPE_BYTES[dtype]
    each = [compression.work(c, cut, like, e) for cut in cuts]
    traffic, kernels = column([int(w.traffic_bytes) for w in each]), column([int(w.kernels) for w in each])
    coding = Work(traffic_bytes=traffic, kernels=kernels) * often
    return [replace(found[0], coding=coding, code=c.name), *found[1:]]


def _gathers(cut: Sequence[Bucket], like: Strategy, dtype: DType, m: Column) -> Term:
    """Stage 3: units gathered in every pass of every micro-batch, or once a step."""
    whole = sum(b.padded(like) for b in cut)
    kept = sum(b.padded(like) for b in cut if b.unit in ("head", "model"))  # from the forward to the backward pass
    kept_units = sum(b.unit in ("head", "model") for b in cut)
    event = Event("collective", "all_gather", "F", cut[0].kind("parameters"), cut[0].axis(like), dtype=dtype)
    if like.gathers_once:
        gathers, size = len(cut), whole
    else:
        gathers, size = (2 * len(cut) - kept_units) * m, (2 * whole - kept) * m
    return Term(event, count=gathers, bytes=size * DTYPE_BYTES[dtype])
