"""A training step, written once, as terms.

A Term stands for all events of one template in one step of one rank: how many, how many bytes, how much work,
and what each allocates and frees. Its numbers are functions of the Strategy's fields and take one strategy or
NumPy columns of many. The search sums terms; `program.expand` turns the same terms into ordered events.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phalanx.cost import compression, kernel, kernel_experts, memory
from phalanx.cost.backward_parts import Pass
from phalanx.cost.core import Core
from phalanx.cost.kernel import NO_WORK, Column, Work
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.gradients.buckets import Bucket, buckets
from phalanx.schedule.gradients.compression import sent, sent_across
from phalanx.schedule.layers import collectives, context
from phalanx.schedule.layers.context import Context, keys_per_query
from phalanx.schedule.layers.routing import Routed, routed, uncertain
from phalanx.schedule.pipeline import stages
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision
from phalanx.spec.model.spec import ModelSpec, blocks_among, chunks, expert_layers, seen_from, units
from phalanx.spec.strategy.compression import Compression
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Recompute, Strategy
from phalanx.spec.strategy.split import local

Indices = npt.NDArray[np.int64]


def metrics(spec: ModelSpec, s: Strategy) -> int:
    """Numbers in the fused fp64 all-reduce of a step: loss sum, target tokens, stop flag, flag of a rank that
    has something not finite; where each rank has a part of the gradients the square of their norm; and for each layer
    with experts the load of each, what was dropped, and two losses."""
    loads = len(expert_layers(spec)) * (spec.experts.count + 3) if spec.experts else 0
    return 4 + s.unlike + loads


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
    """`count` events like `event` in a step. `bytes` and `work` are totals over them; `alloc`, `free` are each's, and
    `before` is what is freed before each, by computes whose own terms do not say it. `masked`: `alloc` until masks
    are not needed any more."""

    event: Event
    count: Column
    bytes: Column = 0
    work: Work = NO_WORK
    alloc: Column = 0
    free: Column = 0
    before: Column = 0
    masked: Column = 0
    again: Work = NO_WORK
    """Of the work, that of forward passes that are repeated."""
    beside: Work = NO_WORK
    """What is computed of the same passes while this travels."""
    coding: Work = NO_WORK
    """Of compressing what is sent, by the compressor `code`."""
    code: str = ""


def highest(term: Term, masks: Column) -> Column:
    """What a pass allocates that is the last to need masks of so many bytes."""
    return np.maximum(term.masked, term.alloc - masks)


def unit_classes(spec: ModelSpec, s: Strategy) -> dict[str, tuple[str, ...]]:
    """The units whose passes are alike, in forward order, by the name of their terms: `embed`, `head`, and `blocks`
    apart from those that repeat something, and where there are experts from those that have none."""
    return _classes(spec, Strategy(recompute=s.recompute))


@functools.cache
def _classes(spec: ModelSpec, s: Strategy) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for unit in units(spec):
        name = unit_class(spec, s, unit)
        found[name] = (*found.get(name, ()), unit)
    return found


def unit_class(spec: ModelSpec, s: Strategy, unit: str) -> str:
    """The name of a unit's terms."""
    kind, repeat = unit.split(".")[0], repeat_of(s, unit)
    dense = ", dense" if spec.experts is not None and seen_from(spec, unit).experts is None else ""
    return kind + dense if repeat == "none" else f"{kind}{dense}, {repeat}"


def repeat_of(s: Strategy, unit: str) -> Recompute:
    """What of a unit's forward pass its backward pass repeats."""
    kind, _, index = unit.partition(".")
    return s.recompute_of(int(index)) if kind == "blocks" else "none"


def terms(
    spec: ModelSpec, job: Job, s: Strategy | Columns, rank: int | None = None, place: int = 0
) -> tuple[Term, ...]:
    """The terms of a step of one rank: units forward and backward for each micro-batch, the collectives inside of
    layers, those of the ZeRO stage, the stream's messages, the metrics, the optimizer. `rank`: of a certain
    one; without one none at a `place` of the pipeline holds more."""
    like = s if isinstance(s, Strategy) else s.like
    whole = stages.stage(spec, like, place)
    spec = local(whole, like)
    m = s.accumulation(job)
    # FLOPs of a step pass 2^63 for large models: columns go through float64, one strategy through exact ints.
    part = Context(job.seq, like.ring, like.ulysses)
    t: Column = s.micro_batch * part.tokens
    if isinstance(s, Columns):
        t = t.astype(float)
    keys = keys_per_query(job.seq, like.ring)
    ring_index = None if rank is None else int(mesh(like).along("ring")[rank])
    core = Core(spec, job, t, part, ring_index) if part.parallel else None
    rows = routed(spec.experts, like, t, rank or 0) if spec.experts is not None else None
    e = DTYPE_BYTES[job.precision.compute]
    dtype = job.precision.compute
    often = _passes(spec, like, m, place)
    found = []
    for name, alike in unit_classes(spec, like).items():
        unit, repeat, seen = name.split(",")[0], repeat_of(like, alike[0]), seen_from(spec, alike[0])
        placed, in_parts = _placed(like, job), like.pp > 1  # layers of every pipeline are such, one part or two
        held = memory.footprint(seen, unit, t, job.seq, job, placed, like.tp, like.sp, repeat, core, in_parts, rows)
        apart: Column = 0
        made: Column = 0
        if unit == "embed" and job.documents == "separate":  # what blocks need, made of truth values, is made here
            docs = memory.documents(spec, job, t, part, blocks_among(chunks(spec)[0]))
            apart = sum(docs.values())
            made = (apart + (t * job.seq if core is None else core.lowest_made())) if docs else 0
        masked = kernel.mask(spec, unit, t, job.seq, e, keys) if job.documents == "separate" else NO_WORK
        depends = seen.experts is not None and uncertain(seen.experts, like)
        found.append(
            Term(
                Event("compute", "forward", "F", name, dtype=dtype, routed=depends),
                count=often["F", name],
                work=(kernel.forward(seen, unit, t, job.seq, e, keys, rows) + masked) * often["F", name],
                alloc=held.kept + np.maximum(held.forward, made),
                free=np.maximum(held.forward, made) - apart,
            )
        )
        again = kernel.repeated(seen, repeat, t, job.seq, e, keys, rows) + (masked if repeat != "none" else NO_WORK)
        after = _freed(spec, unit, t // like.tp if like.sp else t, job, held.kept)
        inputs = kernel.input_grad(seen, unit, t, job.seq, e, keys, rows) + masked + again
        weights = kernel.weight_grad(seen, unit, t, e, rows)
        event = Event("compute", "backward", "B", name, dtype=dtype, routed=depends)
        n = often["B", name]
        backward = Term(
            event,
            count=n,
            work=(inputs + weights) * n,
            again=again * n,
            alloc=held.backward,
            free=held.backward - held.leaves + after,
            before=apart,
            masked=held.masked,
        )
        if held.parts is None or not like.split_backward:
            found.append(backward)
            continue
        halves: tuple[tuple[Phase, str, Work, Work, Pass], ...] = (
            ("I", "input_grad", inputs, again, held.parts.inputs),
            ("W", "weight_grad", weights, NO_WORK, held.parts.weights),
        )
        for phase, op, work, repeated, of_part in halves:
            n = often[phase, name]
            found.append(
                Term(
                    replace(event, op=op, phase=phase),
                    count=n,
                    work=work * n,
                    again=repeated * n,
                    alloc=of_part.highest,
                    free=of_part.highest - of_part.change,
                    before=apart if phase == "I" else 0,
                    masked=of_part.masked,
                )
            )
        found.append(backward)
    found += _inside_terms(whole, job, s, like, t, often, rows)
    found += _collective_terms(whole, job, s, like)
    found += _messages(whole, job, s, like, place)
    active = int(like.world > 1)
    found.append(
        Term(
            Event("collective", "all_reduce", "opt", "metrics", "world", dtype="float64"),
            count=active,
            bytes=active * metrics(whole, like) * 8,
        )
    )
    updated = memory.updated(spec, like)
    cast = memory.cast_gradients(updated, job)
    optimizer = Event("compute", "optimizer", "opt", dtype=job.precision.master_dtype)
    found.append(Term(optimizer, count=1, work=kernel.optimizer(updated, job), alloc=cast, free=cast))
    return tuple(found)


def _passes(spec: ModelSpec, like: Strategy, m: Column, place: int) -> dict[tuple[str, str], Column]:
    """How many passes of each kind the units of a class have together in a step: of each chunk, by phase."""
    classes = unit_classes(spec, like)
    if not like.split_backward:
        return {
            (phase, name): len(alike) * (m if phase in "FB" else 0)
            for name, alike in classes.items()
            for phase in "FBIW"
        }
    actions = Counter((a.kind, a.chunk) for a in stages.schedule(like, int(m)).actions[place])
    found = dict.fromkeys(((phase, name) for name in classes for phase in "FBIW"), 0)
    for chunk, own in zip(stages.held_chunks(like, place), chunks(spec), strict=True):
        for unit in own:
            for phase in "FBIW":
                found[phase, unit_class(spec, like, unit)] += actions[phase, chunk]  # type: ignore[index]
    return found


def _inside_terms(
    spec: ModelSpec,
    job: Job,
    s: Strategy | Columns,
    like: Strategy,
    t: Column,
    often: dict[tuple[str, str], Column],
    rows: Routed | None,
) -> list[Term]:
    """What is sent inside of layers, over tp ranks, over those that share sequences and those that share experts: in
    every pass of a unit; and of gradients of which tp ranks have parts."""
    compute = job.precision.compute
    phases: tuple[Phase, ...] = ("F", "B", "I", "W") if like.split_backward else ("F", "B")
    found = []
    for name, alike in unit_classes(spec, like).items():
        repeat = repeat_of(like, alike[0])
        for phase in phases:
            n = often[phase, name]
            sends: dict[tuple[str, str], list[Column]] = {}
            seen, unit = seen_from(spec, alike[0]), name.split(",")[0]
            for i, x in enumerate(collectives.sent(seen, job, like, unit, phase, t, repeat, rows)):
                if isinstance(x, collectives.Core):
                    for y in context.sent(local(spec, like), like, compute, x.way, t):
                        sends.setdefault((y.op, y.axis), []).append(y.bytes)
                    continue
                event = Event("collective", x.op, phase, name if i == 0 else f"{name}, then", x.axis, dtype=x.dtype)
                beside = NO_WORK
                if x.beside and seen.experts is not None:
                    e = DTYPE_BYTES[compute]
                    own = local(seen, like)
                    assert own.experts is not None
                    beside = kernel_experts.shared(own, own.experts, t, e, phase != "F") * n
                found.append(Term(event, count=x.count * n, bytes=x.bytes * n, beside=beside))
            for (op, axis), each in sends.items():
                event = Event("p2p" if axis == "ring" else "collective", op, phase, name, axis, dtype=compute)
                found.append(Term(event, count=len(each) * n, bytes=sum(each) * n))
    if like.tp == 1:
        return found
    sizes, where = np.unique(np.atleast_1d(s.bucket_bytes), return_inverse=True)
    held = [memory.copies(spec, job, replace(like, bucket=size / 2**20)) for size in sizes]
    total = held[0] if isinstance(s, Strategy) else np.array(held)[where]
    if held[0]:
        event = Event("collective", "all_reduce", "opt", "copies", "tp", dtype=job.precision.accumulate_dtype)
        found.append(Term(event, count=1, bytes=total))
    return found


def _messages(spec: ModelSpec, job: Job, s: Strategy | Columns, like: Strategy, place: int) -> list[Term]:
    """The stream from chunk to chunk where those are on different ranks, and its gradient."""
    if like.pp == 1:
        return []
    rank_of, m, dtype = stages.rank_of(like), s.accumulation(job), job.precision.compute
    tokens = s.micro_batch * job.seq // like.cp // (like.tp if like.sp else 1)
    size = tokens * spec.hidden * DTYPE_BYTES[dtype]
    found = []
    for phase, onward in (("F", 1), ("B", -1)):
        for op, way in (("send", onward), ("recv", -onward)):
            n = sum(
                rank == place and 0 <= c + way < len(rank_of) and rank_of[c + way] != place
                for c, rank in enumerate(rank_of)
            )
            event = Event("p2p", op, phase, "stream", "pp", dtype=dtype)  # type: ignore[arg-type]
            found.append(Term(event, count=n * m, bytes=size * n * m))
    tied = memory.tied(spec, job, like)
    event = Event("collective", "all_reduce", "opt", "embedding", "embed", dtype=job.precision.accumulate_dtype)
    return [*found, Term(event, count=1, bytes=tied)] if tied else found


def _placed(like: Strategy, job: Job) -> DType:
    """The type of the memory in which a gradient is put where it becomes ready."""
    p = job.precision
    return p.accumulate_dtype if like.stage <= 1 or like.compressor else p.reduce_dtype


def _freed(spec: ModelSpec, unit: str, t: Column, job: Job, kept: Column) -> Column:
    """What a backward pass frees of what forward passes kept: its own, and its input instead of its output."""
    stream = t * spec.hidden * DTYPE_BYTES[job.precision.compute]
    return {"embed": kept - stream, "blocks": kept, "head": kept + stream}[unit]


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
