"""A training step, written once, as terms.

A Term stands for all events of one template in one step of one rank: how many, how many bytes, how much work,
and what each allocates and frees. Its numbers are functions of the Strategy's fields and take one strategy or
NumPy columns of many. The search sums terms; `program.expand` turns the same terms into ordered events.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import NO_WORK, Column, Work
from phalanx.cost.memory import footprint, state
from phalanx.cost.memory.attention_core import Core
from phalanx.cost.memory.split_backward import Pass
from phalanx.cost.memory.state import cast_gradients
from phalanx.cost.step.gradient_terms import _collective_terms
from phalanx.cost.step.layer_terms import _inside_terms, _messages
from phalanx.cost.step.term import Columns, Term, repeat_of, unit_class, unit_classes
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.layers.context import Context, keys_per_query
from phalanx.schedule.layers.routing import routed, uncertain
from phalanx.schedule.pipeline import stages
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model.spec import ModelSpec, blocks_among, chunks, expert_layers, seen_from
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local


def metrics(spec: ModelSpec, s: Strategy) -> int:
    """Numbers in the fused fp64 all-reduce of a step: loss sum, target tokens, stop flag, flag of a rank that
    has something not finite; where each rank has a part of the gradients the square of their norm; and for each layer
    with experts the load of each, what was dropped, and two losses."""
    loads = len(expert_layers(spec)) * (spec.experts.count + 3) if spec.experts else 0
    return 4 + s.unlike + loads


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
        held = footprint.footprint(
            seen, unit, t, job.seq, job, placed, like.tp, like.sp, repeat, core, in_parts, rows
        )
        apart: Column = 0
        made: Column = 0
        if unit == "embed" and job.documents == "separate":  # what blocks need, made of truth values, is made here
            docs = footprint.documents(spec, job, t, part, blocks_among(chunks(spec)[0]))
            apart = sum(docs.values())
            made = (apart + (t * job.seq if core is None else core.lowest_made())) if docs else 0
        masked = unit_work.mask(spec, unit, t, job.seq, e, keys) if job.documents == "separate" else NO_WORK
        depends = seen.experts is not None and uncertain(seen.experts, like)
        found.append(
            Term(
                Event("compute", "forward", "F", name, dtype=dtype, routed=depends),
                count=often["F", name],
                work=(unit_work.forward(seen, unit, t, job.seq, e, keys, rows) + masked) * often["F", name],
                alloc=held.kept + np.maximum(held.forward, made),
                free=np.maximum(held.forward, made) - apart,
            )
        )
        again = unit_work.repeated(seen, repeat, t, job.seq, e, keys, rows) + (
            masked if repeat != "none" else NO_WORK
        )
        after = _freed(spec, unit, t // like.tp if like.sp else t, job, held.kept)
        inputs = unit_work.input_grad(seen, unit, t, job.seq, e, keys, rows) + masked + again
        weights = unit_work.weight_grad(seen, unit, t, e, rows)
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
        if held.parts is None or not stages.splits_backward(like):
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
    updated = state.updated(spec, like)
    cast = cast_gradients(updated, job)
    optimizer = Event("compute", "optimizer", "opt", dtype=job.precision.master_dtype)
    found.append(Term(optimizer, count=1, work=unit_work.optimizer(updated, job), alloc=cast, free=cast))
    return tuple(found)


def _passes(spec: ModelSpec, like: Strategy, m: Column, place: int) -> dict[tuple[str, str], Column]:
    """How many passes of each kind the units of a class have together in a step: of each chunk, by phase."""
    classes = unit_classes(spec, like)
    if not stages.splits_backward(like):
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


def _placed(like: Strategy, job: Job) -> DType:
    """The type of the memory in which a gradient is put where it becomes ready."""
    p = job.precision
    return p.accumulate_dtype if like.stage <= 1 or like.compressor else p.reduce_dtype


def _freed(spec: ModelSpec, unit: str, t: Column, job: Job, kept: Column) -> Column:
    """What a backward pass frees of what forward passes kept: its own, and its input instead of its output."""
    stream = t * spec.hidden * DTYPE_BYTES[job.precision.compute]
    return {"embed": kept - stream, "blocks": kept, "head": kept + stream}[unit]
