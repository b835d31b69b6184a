"""The terms of a rank's training step, and in particular of its collectives of gradients and parameters.

Prices are sums over terms (predict.py); `expand.expand` expands the same terms into ordered events.
"""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.cost.compute import compression, unit_work
from phalanx.cost.compute.unit_work import Work
from phalanx.cost.memory.state import update_bytes, updated_elements
from phalanx.cost.step.layer_terms import layer_terms, partial_gradients, pipeline_messages
from phalanx.cost.step.pass_terms import pass_terms
from phalanx.cost.step.term import Term
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.gradients.buckets import (
    NUMBER_BYTES,
    PARAMETERS,
    PARAMETERS_IN_8_BITS,
    SCALES,
    Bucket,
    gathers_in_8_bits,
    scale_elements,
)
from phalanx.schedule.gradients.compression import (
    bucket_collectives,
    outer_collectives,
    outer_reduction,
    replica_collectives,
)
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layout import RankView
from phalanx.spec.job import DTYPE_BYTES, DType, Precision
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Router
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.compressors import Compression
from phalanx.spec.strategy.spec import Strategy


def data_parallel_terms(view: RankView) -> list[Term]:
    """Return the terms of reducing gradients and, with ZeRO, of gathering parameters. Buckets of experts are reduced
    over other ranks than the rest."""
    terms = []
    for experts in (False, True):
        sized = [(b, size) for b, size in zip(view.buckets, view.padded, strict=True) if b.experts == experts]
        if sized and sized[0][0].ranks(view.strategy) > 1:
            cut, sizes = zip(*sized, strict=True)
            terms += _bucket_terms(view, cut, sizes)
    return terms


def _bucket_terms(view: RankView, cut: Sequence[Bucket], sizes: Sequence[int]) -> list[Term]:
    """Return the terms of buckets that are reduced over the same ranks. `sizes`: their elements, including
    padding."""
    s, p, m = view.strategy, view.job.precision, view.layout.micro_batches
    sharding, first = sharding_of(s), cut[0]
    axis, parts = first.axis(s), first.parts(s)
    filled = [_times_filled(view, b) if sharding.reduces_each else 1 for b in cut]
    numel, reduced = sum(sizes), sum(size * n for size, n in zip(sizes, filled, strict=True))

    def term(op: str, phase: Phase, unit: str, axis: str, dtype: DType, part: int = 1) -> Term:
        """Return the term of one collective per bucket and step, over the bucket or one of its `part` equal parts."""
        event = Event("collective", op, phase, first.kind(unit), axis, dtype=dtype)
        return Term(event, count=len(cut), bytes=numel // part * DTYPE_BYTES[dtype])

    reductions = sharding.reductions(m)  # of each bucket in a step
    # Reductions.
    c = s.compressor
    if c is not None:
        again = [b for b, n in zip(cut, filled, strict=True) for _ in range(n)]
        terms = _compressed_terms(c, s, p.accumulate_dtype, cut, again, reductions)
    elif not sharding.state:
        terms = [term("all_reduce", "B", "gradients", axis, p.reduce_dtype)]
    else:
        event = term("reduce_scatter", "B", "gradients", axis, p.reduce_dtype).event
        count, size = sum(filled) * reductions, reduced * DTYPE_BYTES[p.reduce_dtype] * reductions
        terms = [Term(event, count=count, bytes=size)]
        if first.across(s):
            terms.append(term("all_reduce", "B", "shards", "dp_replicate", p.accumulate_dtype, part=parts))
    if sharding.reduces_each:  # gradients are copied into the reduction buffer, and the reduced shards accumulated
        compute, accumulate = DTYPE_BYTES[p.compute], DTYPE_BYTES[p.accumulate_dtype]
        reduce = accumulate if c else DTYPE_BYTES[p.reduce_dtype]
        copies = Work(traffic_bytes=reduced * reductions * (compute + reduce + 3 * accumulate / parts))
        terms[0] = replace(terms[0], work=terms[0].work + copies)
    # Gathers of parameters: after the update, or by unit and pass.
    if sharding.updates_gather:
        terms.append(term("all_gather", "opt", PARAMETERS, axis, p.compute))
    elif sharding.parameters:
        narrow = [gathers_in_8_bits(b, p) for b in cut]
        for eight in (False, True):
            pairs = zip(cut, sizes, strict=True)
            if those := [pair for pair, is_narrow in zip(pairs, narrow, strict=True) if is_narrow == eight]:
                terms.append(_gathers(those, s, "uint8" if eight else p.compute, m))
        if any(narrow):
            terms.append(_scales([b for b, is_narrow in zip(cut, narrow, strict=True) if is_narrow], s, p))
    return terms


def _times_filled(view: RankView, bucket: Bucket) -> int:
    """Return the number of times that a rank fills a bucket per micro-batch: twice a tied embedding's, if the rank
    has both ends of a V-shaped pipeline."""
    if bucket.parameters[0].unit != "model":
        return 1
    return max(1, sum("embed" in units or "head" in units for units in view.chunks))


def _compressed_terms(
    c: Compression, s: Strategy, dtype: DType, held: Sequence[Bucket], cut: Sequence[Bucket], times_a_step: int
) -> list[Term]:
    """Return the terms of reducing the compressed gradients of the buckets `cut`: the first collectives of all
    buckets, their second collectives, and likewise for the shards of the buckets `held` over their replicas. The
    first term has the work of coding. `cut` has a bucket as often as a micro-batch fills it."""
    terms: list[Term] = []
    bucket_sends = [bucket_collectives(c, b, s, dtype) for b in cut]
    shard_sends = [replica_collectives(c, b, s) for b in held]
    for unit, sends, times in (("gradients", bucket_sends, times_a_step), ("shards", shard_sends, 1)):
        kinds = {(i, x.op, x.axis, x.dtype, x.at_most) for of_bucket in sends for i, x in enumerate(of_bucket)}
        for i, op, axis, sent_dtype, at_most in sorted(kinds):
            sizes = [of_bucket[i].bytes for of_bucket in sends if len(of_bucket) > i]
            name = unit if i == 0 else f"{unit}, then"
            event = Event("collective", op, "B", name, axis, dtype=sent_dtype, at_most=at_most)
            terms.append(Term(event, len(sizes) * times, sum(sizes) * times))
    work = compression.work(c, cut, s, DTYPE_BYTES[dtype])
    coding = Work(traffic_bytes=int(work.traffic_bytes), kernels=int(work.kernels)) * times_a_step
    return [replace(terms[0], coding=coding, code=c.name), *terms[1:]]


def _gathers(sized: Sequence[tuple[Bucket, int]], s: Strategy, dtype: str, m: int) -> Term:
    """Return the term of ZeRO-3's gathers: of every unit in every pass of every micro-batch, or once a step."""
    total, first = sum(size for _, size in sized), sized[0][0]
    kept = [size for b, size in sized if b.unit in ("head", "model")]  # from the forward to the backward pass
    what = PARAMETERS_IN_8_BITS if dtype == "uint8" else PARAMETERS
    event = Event("collective", "all_gather", "F", first.kind(what), first.axis(s), dtype=dtype)
    if sharding_of(s).gathers_each:
        gathers, size = (2 * len(sized) - len(kept)) * m, (2 * total - sum(kept)) * m
    else:
        gathers, size = len(sized), total
    return Term(event, count=gathers, bytes=size * DTYPE_BYTES[dtype])


def _scales(cut: Sequence[Bucket], s: Strategy, p: Precision) -> Term:
    """Return the term of the all-reduce that finds the scales of 8-bit gathers. Its work reads the master weights
    twice: to find the scales, and to round them."""
    event = Event("collective", "all_reduce", "opt", cut[0].kind(SCALES), cut[0].axis(s), dtype="float32")
    part = sum(b.padded(s) // b.parts(s) for b in cut)
    rounding = Work(traffic_bytes=part * (2 * DTYPE_BYTES[p.master_dtype] + 2 * DTYPE_BYTES[p.compute] + 1))
    return Term(event, count=1, bytes=scale_elements(cut) * NUMBER_BYTES, work=rounding)


def terms(view: RankView) -> tuple[Term, ...]:
    """Return the terms of a rank's step: the passes of its units, communication inside their layers, the collectives
    of gradients and parameters, the messages between pipeline ranks, metrics, and the optimizer with its
    communication."""
    return (
        *pass_terms(view),
        *layer_terms(view),
        *partial_gradients(view),
        *data_parallel_terms(view),
        *pipeline_messages(view),
        *_metrics(view),
        _optimizer(view),
        *_matrices(view),
        *_outer(view),
    )


def metrics_bytes(spec: ModelSpec, s: Strategy) -> int:
    """Return the bytes of a step's fused fp64 all-reduce: loss sum, target tokens, stop flag, non-finite flag; the
    squared gradient norm if ranks have parts of the gradients; and for each layer with experts the load of every
    expert, dropped rows, and two losses."""
    loads = sum(n * (x.count + 3) for block, n in architecture(spec).kinds.items() for x in block.all(Router))
    return 8 * (4 + s.gradients_differ_by_rank + loads)


def _metrics(view: RankView) -> list[Term]:
    """Return the term of reducing a step's metrics."""
    if view.mesh.step_ranks == 1:
        return []
    event = Event("collective", "all_reduce", "opt", "metrics", view.mesh.step_axis, dtype="float64")
    return [Term(event, count=1, bytes=metrics_bytes(view.model, view.strategy))]


OUTER, OUTER_METRICS = "outer", "outer metrics"
"""Units of terms in which replicas that step alone synchronise: the changes of their parameters, and the metrics."""


def _outer(view: RankView) -> list[Term]:
    """Return the terms in which replicas that step alone synchronise: loss sum, target tokens and stop flag, and the
    changes of their parameters, in the memory and the dtype of the gradients."""
    s, p = view.strategy, view.job.precision
    if not s.local:
        return []
    terms = [Term(Event("collective", "all_reduce", "opt", OUTER_METRICS, "dp_local", dtype="float64"), 1, 3 * 8)]
    e = DTYPE_BYTES[p.accumulate_dtype]
    if s.outer_compressor is not None:
        return [*terms, *_compressed_changes(view, s.outer_compressor)]
    for experts in (False, True):
        cut = [b for b in view.buckets if b.experts == experts]
        elements = sum(b.padded(s) // b.parts(s) for b in cut)
        kind = cut[0].kind(OUTER) if cut else OUTER
        work = Work(traffic_bytes=elements * view.job.outer_traffic)
        event = Event("collective", "all_reduce", "opt", kind, "dp_local", dtype=p.accumulate_dtype)
        terms += [Term(event, len(cut), elements * e, work)] if cut else []
    return terms


def _compressed_changes(view: RankView, c: Compression) -> list[Term]:
    """Return the terms of reducing the compressed changes of replicas that step alone. The first has the work of the
    outer optimizer and of coding."""
    (alone, cut), dtype = outer_reduction(view.buckets, view.strategy), view.job.precision.accumulate_dtype
    sends = [outer_collectives(b, alone, dtype) for b in cut]
    terms = []
    for i, x in enumerate(sends[0]):
        event = Event("collective", x.op, "opt", f"{OUTER}, then" if i else OUTER, x.axis, dtype=x.dtype)
        event = replace(event, at_most=x.at_most)
        terms.append(Term(event, len(sends), sum(of_bucket[i].bytes for of_bucket in sends)))
    update = Work(traffic_bytes=sum(b.padded(alone) for b in cut) * view.job.outer_traffic)
    work = compression.work(c, cut, alone, DTYPE_BYTES[dtype])
    coding = Work(traffic_bytes=int(work.traffic_bytes), kernels=int(work.kernels))
    return [replace(terms[0], work=update, coding=coding, code=c.name), *terms[1:]]


def _optimizer(view: RankView) -> Term:
    """Return the term of the optimizer's update."""
    elements, local, s = updated_elements(view.local, view.strategy), view.local, view.strategy
    alloc = update_bytes(view, elements)
    event = Event("compute", "optimizer", "opt", dtype=view.job.precision.master_dtype)
    work = unit_work.optimizer(elements, view.job)
    if view.job.optimizer.row.whole:
        flops = sum(x.most_flops for x in view.exchanges)  # the others wait for the rank that has most
        work = unit_work.optimizer(elements, view.job, updated_elements(local, s, matrices=True), flops)
    return Term(event, count=1, work=work, alloc=alloc, free=alloc)


def _matrices(view: RankView) -> list[Term]:
    """Return the terms of gathering whole matrices for their update and scattering the results."""
    dtype, terms = view.job.precision.compute, []
    for x in view.exchanges:
        if x.axis:
            event = Event("collective", "all_to_all", "opt", x.unit, x.axis, dtype=dtype)
            terms.append(Term(event, 2, bytes=(x.held_elements + x.owned_elements) * DTYPE_BYTES[dtype]))
    return terms
