"""The terms of communication inside layers (tensor, context, expert parallelism) and between pipeline ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.cost.compute import moe
from phalanx.cost.compute.unit_work import NO_WORK, Column
from phalanx.cost.memory.state import partial_gradient_bytes, tied_gradient_bytes
from phalanx.cost.step.term import Columns, Term, repeat_of, unit_classes
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.layers import collectives, context
from phalanx.schedule.layers.routing import Routed
from phalanx.schedule.pipeline import stages
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, as_seen_by
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local_model


def layer_terms(
    spec: ModelSpec,
    job: Job,
    s: Strategy | Columns,
    like: Strategy,
    t: Column,
    passes: dict[tuple[str, str], Column],
    rows: Routed | None,
) -> list[Term]:
    """Return the terms of communication inside layers, in every pass of a unit: over tp ranks, over ranks that share
    sequences (ring, Ulysses) and over ranks that share experts; and of summing gradients that tp ranks have in parts.

    `t`: tokens of a micro-batch on one rank. `passes`: passes of a step by (phase, unit class). `rows`: the routed
    rows of a layer with experts."""
    compute = job.precision.compute
    phases: tuple[Phase, ...] = ("F", "B", "I", "W") if stages.splits_backward(like) else ("F", "B")
    terms = []
    for name, members in unit_classes(spec, like).items():
        repeat = repeat_of(like, members[0])
        for phase in phases:
            n = passes[phase, name]
            sends: dict[tuple[str, str], list[Column]] = {}
            unit_spec, unit = as_seen_by(spec, members[0]), name.split(",")[0]
            for i, x in enumerate(collectives.communication(unit_spec, job, like, unit, phase, t, repeat, rows)):
                if isinstance(x, collectives.Core):
                    for y in context.communication(local_model(spec, like), like, compute, x.way, t):
                        sends.setdefault((y.op, y.axis), []).append(y.bytes)
                    continue
                event = Event("collective", x.op, phase, name if i == 0 else f"{name}, then", x.axis, dtype=x.dtype)
                overlapping = NO_WORK
                if x.beside and unit_spec.experts is not None:
                    e = DTYPE_BYTES[compute]
                    local_spec = local_model(unit_spec, like)
                    assert local_spec.experts is not None
                    overlapping = moe.shared(local_spec, local_spec.experts, t, e, phase != "F") * n
                terms.append(Term(event, count=x.count * n, bytes=x.bytes * n, overlapping=overlapping))
            for (op, axis), sizes_sent in sends.items():
                event = Event("p2p" if axis == "ring" else "collective", op, phase, name, axis, dtype=compute)
                terms.append(Term(event, count=len(sizes_sent) * n, bytes=sum(sizes_sent) * n))
    if like.tp == 1:
        return terms
    sizes, where = np.unique(np.atleast_1d(s.bucket_bytes), return_inverse=True)
    per_size = [partial_gradient_bytes(spec, job, replace(like, bucket=size / 2**20)) for size in sizes]
    total = per_size[0] if isinstance(s, Strategy) else np.array(per_size)[where]
    if per_size[0]:
        event = Event("collective", "all_reduce", "opt", "copies", "tp", dtype=job.precision.accumulate_dtype)
        terms.append(Term(event, count=1, bytes=total))
    return terms


def pipeline_messages(spec: ModelSpec, job: Job, s: Strategy | Columns, like: Strategy, place: int) -> list[Term]:
    """Return the messages of pipeline rank `place`: the residual stream and its gradient, between chunks that lie on
    different ranks; and the reduction of a tied embedding, of which the first and the last rank have a copy."""
    if like.pp == 1:
        return []
    rank_of, m, dtype = stages.rank_of(like), s.accumulation(job), job.precision.compute
    tokens = s.micro_batch * job.seq // like.cp // (like.tp if like.sp else 1)
    size = tokens * spec.hidden * DTYPE_BYTES[dtype]
    terms = []
    for phase, onward in (("F", 1), ("B", -1)):
        for op, way in (("send", onward), ("recv", -onward)):
            n = sum(
                rank == place and 0 <= c + way < len(rank_of) and rank_of[c + way] != place
                for c, rank in enumerate(rank_of)
            )
            event = Event("p2p", op, phase, "stream", "pp", dtype=dtype)  # type: ignore[arg-type]
            terms.append(Term(event, count=n * m, bytes=size * n * m))
    tied_bytes = tied_gradient_bytes(spec, job, like)
    event = Event("collective", "all_reduce", "opt", "embedding", "embed", dtype=job.precision.accumulate_dtype)
    return [*terms, Term(event, count=1, bytes=tied_bytes)] if tied_bytes else terms
