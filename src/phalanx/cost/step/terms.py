"""A training step, written once, as terms.

A Term stands for all events of one template in one step of one rank: how many, how many bytes, how much work,
and what each allocates and frees. Its numbers are functions of the Strategy's fields and take one strategy or
NumPy columns of many. The search sums terms (predict.py); `expand.expand` turns the same terms into ordered events.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import NO_WORK, Column, Work
from phalanx.cost.memory.attention_core import Core
from phalanx.cost.memory.footprint import documents, footprint
from phalanx.cost.memory.split_backward import Pass
from phalanx.cost.memory.state import cast_gradients, updated_elements
from phalanx.cost.step.gradient_terms import data_parallel_terms
from phalanx.cost.step.layer_terms import layer_terms, pipeline_messages
from phalanx.cost.step.term import Columns, Term, repeat_of, unit_class, unit_classes
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.layers.context import Context, keys_per_query
from phalanx.schedule.layers.routing import depends_on_router, routed
from phalanx.schedule.pipeline import stages
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model.spec import ModelSpec, as_seen_by, blocks_among, chunks, expert_layers
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local_model


def metrics(spec: ModelSpec, s: Strategy) -> int:
    """Return how many numbers the fused fp64 all-reduce of a step carries: loss sum, target tokens, stop flag,
    non-finite flag; the squared gradient norm where ranks have parts of the gradients; and for each layer with
    experts the load of every expert, dropped rows, and two losses."""
    loads = len(expert_layers(spec)) * (spec.experts.count + 3) if spec.experts else 0
    return 4 + s.gradients_differ_by_rank + loads


def terms(
    spec: ModelSpec, job: Job, s: Strategy | Columns, rank: int | None = None, place: int = 0
) -> tuple[Term, ...]:
    """Return the terms of a step of one rank: forward and backward passes of the units for each micro-batch, the
    collectives inside layers and of ZeRO, the messages between pipeline ranks, metrics, optimizer.

    `rank`: price this rank exactly. Without it, price pipeline rank `place`: no rank there holds more memory."""
    like = s if isinstance(s, Strategy) else s.like
    stage_spec = stages.stage(spec, like, place)
    spec = local_model(stage_spec, like)
    m = s.accumulation(job)
    part = Context(job.seq, like.ring, like.ulysses)
    t: Column = s.micro_batch * part.tokens
    # FLOPs of a step of a large model exceed 2^63: columns are float64, a single strategy has exact ints.
    if isinstance(s, Columns):
        t = t.astype(float)
    keys = keys_per_query(job.seq, like.ring)
    ring_index = None if rank is None else int(mesh(like).along("ring")[rank])
    core = Core(spec, job, t, part, ring_index) if part.parallel else None
    rows = routed(spec.experts, like, t, rank or 0) if spec.experts is not None else None
    e = DTYPE_BYTES[job.precision.compute]
    dtype = job.precision.compute
    passes = _passes(spec, like, m, place)
    step_terms = []
    for name, members in unit_classes(spec, like).items():
        unit, repeat, unit_spec = name.split(",")[0], repeat_of(like, members[0]), as_seen_by(spec, members[0])
        gradient_dtype = _gradient_dtype(like, job)
        deferrable = like.pp > 1  # with a pipeline, layers can always defer weight gradients
        memory = footprint(
            unit_spec, unit, t, job.seq, job, gradient_dtype, like.tp, like.sp, repeat, core, deferrable, rows
        )
        mask_bytes: Column = 0
        temporary: Column = 0
        if unit == "embed" and job.documents == "separate":  # the blocks' masks are built here, from boolean ones
            masks = documents(spec, job, t, part, blocks_among(chunks(spec)[0]))
            mask_bytes = sum(masks.values())
            temporary = (
                (mask_bytes + (t * job.seq if core is None else core.first_visible_temporary())) if masks else 0
            )
        mask_work = unit_work.mask(spec, unit, t, job.seq, e, keys) if job.documents == "separate" else NO_WORK
        depends_on_routing = unit_spec.experts is not None and depends_on_router(unit_spec.experts, like)
        step_terms.append(
            Term(
                Event("compute", "forward", "F", name, dtype=dtype, routed=depends_on_routing),
                count=passes["F", name],
                work=(unit_work.forward(unit_spec, unit, t, job.seq, e, keys, rows) + mask_work) * passes["F", name],
                alloc=memory.kept + np.maximum(memory.forward, temporary),
                free=np.maximum(memory.forward, temporary) - mask_bytes,
            )
        )
        recomputed = unit_work.recomputed(unit_spec, repeat, t, job.seq, e, keys, rows) + (
            mask_work if repeat != "none" else NO_WORK
        )
        freed = _freed(spec, unit, t // like.tp if like.sp else t, job, memory.kept)
        inputs = unit_work.input_grad(unit_spec, unit, t, job.seq, e, keys, rows) + mask_work + recomputed
        weights = unit_work.weight_grad(unit_spec, unit, t, e, rows)
        event = Event("compute", "backward", "B", name, dtype=dtype, routed=depends_on_routing)
        n = passes["B", name]
        backward = Term(
            event,
            count=n,
            work=(inputs + weights) * n,
            recomputed=recomputed * n,
            alloc=memory.backward,
            free=memory.backward - memory.leaves + freed,
            before=mask_bytes,
            masked=memory.masked,
        )
        if memory.parts is None or not stages.splits_backward(like):
            step_terms.append(backward)
            continue
        halves: tuple[tuple[Phase, str, Work, Work, Pass], ...] = (
            ("I", "input_grad", inputs, recomputed, memory.parts.inputs),
            ("W", "weight_grad", weights, NO_WORK, memory.parts.weights),
        )
        for phase, op, work, part_recomputed, pass_memory in halves:
            n = passes[phase, name]
            step_terms.append(
                Term(
                    replace(event, op=op, phase=phase),
                    count=n,
                    work=work * n,
                    recomputed=part_recomputed * n,
                    alloc=pass_memory.highest,
                    free=pass_memory.highest - pass_memory.change,
                    before=mask_bytes if phase == "I" else 0,
                    masked=pass_memory.masked,
                )
            )
        step_terms.append(backward)
    step_terms += layer_terms(stage_spec, job, s, like, t, passes, rows)
    step_terms += data_parallel_terms(stage_spec, job, s, like)
    step_terms += pipeline_messages(stage_spec, job, s, like, place)
    active = int(like.world > 1)
    step_terms.append(
        Term(
            Event("collective", "all_reduce", "opt", "metrics", "world", dtype="float64"),
            count=active,
            bytes=active * metrics(stage_spec, like) * 8,
        )
    )
    elements = updated_elements(spec, like)
    cast = cast_gradients(elements, job)
    optimizer = Event("compute", "optimizer", "opt", dtype=job.precision.master_dtype)
    step_terms.append(Term(optimizer, count=1, work=unit_work.optimizer(elements, job), alloc=cast, free=cast))
    return tuple(step_terms)


def _passes(spec: ModelSpec, like: Strategy, m: Column, place: int) -> dict[tuple[str, str], Column]:
    """Return the passes in a step by (phase, unit class), summed over the units of the class."""
    classes = unit_classes(spec, like)
    if not stages.splits_backward(like):
        return {
            (phase, name): len(members) * (m if phase in "FB" else 0)
            for name, members in classes.items()
            for phase in "FBIW"
        }
    counts = Counter((a.kind, a.chunk) for a in stages.schedule(like, int(m)).actions[place])
    passes = dict.fromkeys(((phase, name) for name in classes for phase in "FBIW"), 0)
    for chunk, units in zip(stages.held_chunks(like, place), chunks(spec), strict=True):
        for unit in units:
            for phase in "FBIW":
                passes[phase, unit_class(spec, like, unit)] += counts[phase, chunk]  # type: ignore[index]
    return passes


def _gradient_dtype(like: Strategy, job: Job) -> DType:
    """Return the dtype of the memory that a gradient is written to when it is ready."""
    p = job.precision
    return p.accumulate_dtype if like.effective_zero <= 1 or like.compressor else p.reduce_dtype


def _freed(spec: ModelSpec, unit: str, t: Column, job: Job, kept: Column) -> Column:
    """Return the activation bytes that a backward pass frees: what its forward pass kept, with the input of the unit
    in place of its output."""
    stream = t * spec.hidden * DTYPE_BYTES[job.precision.compute]
    return {"embed": kept - stream, "blocks": kept, "head": kept + stream}[unit]
