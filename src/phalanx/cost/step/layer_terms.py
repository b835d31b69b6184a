"""Terms of what layers send."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.cost.compute import moe
from phalanx.cost.compute.unit_work import NO_WORK, Column
from phalanx.cost.memory import state
from phalanx.cost.step.term import Columns, Term, repeat_of, unit_classes
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.layers import collectives, context
from phalanx.schedule.layers.routing import Routed
from phalanx.schedule.pipeline import stages
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, seen_from
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local


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
    phases: tuple[Phase, ...] = ("F", "B", "I", "W") if stages.splits_backward(like) else ("F", "B")
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
                    beside = moe.shared(own, own.experts, t, e, phase != "F") * n
                found.append(Term(event, count=x.count * n, bytes=x.bytes * n, beside=beside))
            for (op, axis), each in sends.items():
                event = Event("p2p" if axis == "ring" else "collective", op, phase, name, axis, dtype=compute)
                found.append(Term(event, count=len(each) * n, bytes=sum(each) * n))
    if like.tp == 1:
        return found
    sizes, where = np.unique(np.atleast_1d(s.bucket_bytes), return_inverse=True)
    held = [state.copies(spec, job, replace(like, bucket=size / 2**20)) for size in sizes]
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
    tied = state.tied(spec, job, like)
    event = Event("collective", "all_reduce", "opt", "embedding", "embed", dtype=job.precision.accumulate_dtype)
    return [*found, Term(event, count=1, bytes=tied)] if tied else found
