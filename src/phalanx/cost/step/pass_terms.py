"""The terms of computing: forward and backward passes of every class of units."""

from collections.abc import Iterator
from dataclasses import replace

from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import NO_WORK, RankPass, Work
from phalanx.cost.memory.attention_core import Core
from phalanx.cost.memory.footprint import documents, footprint
from phalanx.cost.memory.live_bytes import Pass
from phalanx.cost.step.term import Term
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layers.head import sliced, slices_over_ranks
from phalanx.schedule.layers.routing import depends_on_router
from phalanx.schedule.layout import RankView, repeat_of
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision
from phalanx.spec.model.blocks.lowering import block_of
from phalanx.spec.model.blocks.operators import Router
from phalanx.spec.model.spec import ModelSpec, blocks_among
from phalanx.spec.strategy.spec import Strategy


def attention_core(view: RankView) -> Core | None:
    """Return the tensors of attention over ranks that share sequences; None if each rank has entire sequences."""
    if not view.context.parallel:
        return None
    return Core(view.local, view.job, view.tokens, view.context, view.ring_index)


def pass_terms(view: RankView) -> Iterator[Term]:
    """Yield the terms of each unit class, in forward order: forward; input_grad and weight_grad, if the schedule
    splits backward passes; backward."""
    core = attention_core(view)
    for name, members in view.unit_classes.items():
        yield from _of_class(view, name, members[0], core)


def _of_class(view: RankView, name: str, member: str, core: Core | None) -> Iterator[Term]:
    """Yield the terms of the unit class `name`. `member`: a unit of the class."""
    job, s, spec, t = view.job, view.strategy, view.local, view.tokens
    dtype, e = job.precision.compute, DTYPE_BYTES[job.precision.compute]
    unit, repeat, rows = name.split(",")[0], repeat_of(s, member), view.rows_of(member)
    narrow, turned = _narrow(job.precision, s)
    onward = RankPass(t, job.seq, e, s, rows, narrow, not job.separate and s.cp == 1)
    back = replace(onward, narrow=turned)
    deferrable = s.pp > 1  # with a pipeline, layers can always defer weight gradients
    cuts = sliced if s.tp == 1 else lambda *sizes: slices_over_ranks(*sizes) > 1
    in_slices = unit == "head" and not view.splits_backward and bool(cuts(t, spec.vocab, spec.hidden, e))
    in_parts = deferrable and not in_slices
    # Live bytes of the passes.
    memory = footprint(
        spec,
        member,
        t,
        job.seq,
        job,
        _gradient_dtype(s, job),
        s.tp,
        s.sp,
        repeat,
        core,
        in_parts,
        rows,
        narrow is not None and narrow.weights == "gathered",
    )
    separate = job.separate
    mask_bytes, temporary = _first_masks(view, core) if unit == "embed" and separate else (0, 0)
    mask_work = unit_work.mask(view.model, member, onward) if separate else NO_WORK
    route = block_of(view.model, member).first(Router) if unit == "blocks" else None
    depends_on_routing = route is not None and depends_on_router(route, s)
    # The forward pass.
    forward = unit_work.forward(view.model, member, onward) + mask_work
    products = NO_WORK  # of the backward pass, which a head in slices computes in its forward pass
    if in_slices:
        products = unit_work.head_products(view.model, onward)
    n = view.passes["F", name]
    highest = max(int(memory.forward), temporary)
    yield Term(
        Event("compute", "forward", "F", name, dtype=dtype, routed=depends_on_routing),
        count=n,
        work=(forward + products) * n,
        alloc=int(memory.kept) + highest,
        free=highest - mask_bytes,
    )
    # Work of the backward pass, including recomputation.
    recomputed = unit_work.recomputed_work(view.model, member, repeat, onward)
    recomputed += mask_work if repeat != "none" else NO_WORK
    freed = _freed(spec, unit, t // s.tp if s.sp else t, job, int(memory.kept))
    inputs = unit_work.input_grad(view.model, member, back) + mask_work + recomputed
    weights = unit_work.weight_grad(view.model, member, back)
    event = Event("compute", "backward", "B", name, dtype=dtype, routed=depends_on_routing)
    # A split backward pass: I and W.
    if memory.parts is not None and view.splits_backward:
        halves: tuple[tuple[Phase, str, Work, Work, Pass], ...] = (
            ("I", "input_grad", inputs, recomputed, memory.parts.inputs),
            ("W", "weight_grad", weights, NO_WORK, memory.parts.weights),
        )
        for phase, op, work, part_recomputed, pass_memory in halves:
            n = view.passes[phase, name]
            yield Term(
                replace(event, op=op, phase=phase),
                count=n,
                work=work * n,
                recomputed=part_recomputed * n,
                alloc=int(pass_memory.highest),
                free=int(pass_memory.highest - pass_memory.change),
                before=mask_bytes if phase == "I" else 0,
                masked=int(pass_memory.masked),
            )
    # The undivided backward pass.
    n = view.passes["B", name]
    yield Term(
        event,
        count=n,
        work=(inputs + weights if products is NO_WORK else unit_work.head_norm_input_grad(view.model, back)) * n,
        recomputed=recomputed * n,
        alloc=int(memory.backward),
        free=int(memory.backward - memory.leaves) + freed,
        before=mask_bytes,
        masked=int(memory.masked),
    )


def _narrow(p: Precision, s: Strategy) -> tuple[unit_work.Narrow | None, unit_work.Narrow | None]:
    """Return how forward and backward passes compute products of 8-bit operands; None: they compute none."""
    if p.operands is None:
        return None, None
    if p.gathers_narrow and sharding_of(s).parameters:
        return unit_work.Narrow(p.operands, "gathered"), unit_work.Narrow(p.operands, "transposed")
    return unit_work.Narrow(p.operands), unit_work.Narrow(p.operands)


def _first_masks(view: RankView, core: Core | None) -> tuple[int, int]:
    """Return bytes of the masks between documents that the embedding builds for the first chunk's blocks, and the
    bytes of the masks and their inputs."""
    masks = documents(view.local, view.job, view.tokens, view.context, blocks_among(view.chunks[0]))
    if not masks:
        return 0, 0
    size = int(sum(masks.values()))
    return size, size + boolean_mask_bytes(view, core)


def boolean_mask_bytes(view: RankView, core: Core | None) -> int:
    """Return bytes of the inputs of a chunk's masks between documents."""
    return view.tokens * view.job.seq if core is None else int(core.first_visible_temporary())


def _gradient_dtype(s: Strategy, job: Job) -> DType:
    """Return the dtype of the buffer into which a ready gradient is written."""
    p = job.precision
    return p.reduce_dtype if sharding_of(s).reduces_each and not s.compressor else p.accumulate_dtype


def _freed(spec: ModelSpec, unit: str, t: int, job: Job, kept: int) -> int:
    """Return the activation bytes that a backward pass frees: the bytes that its forward pass kept, with the unit's
    input in place of its output. `t`: tokens of the stream on the rank."""
    stream = t * spec.hidden * DTYPE_BYTES[job.precision.compute]
    return {"embed": kept - stream, "blocks": kept, "head": kept + stream}[unit]
