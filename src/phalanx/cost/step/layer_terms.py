"""The terms of communication inside layers (tensor, context, expert parallelism) and between pipeline ranks."""

from phalanx.cost.compute.unit_work import NO_WORK, RankPass, shared_expert
from phalanx.cost.memory.state import partial_gradient_bytes, tied_gradient_bytes
from phalanx.cost.step.term import Term
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.layers import collectives, context
from phalanx.schedule.layout import RankView, repeat_of
from phalanx.spec.job import DTYPE_BYTES


def layer_terms(view: RankView) -> list[Term]:
    """Return the terms of communication inside layers: over tp ranks, over ranks that share sequences (ring, Ulysses)
    and over ranks that share experts."""
    phases: tuple[Phase, ...] = ("F", "B", "I", "W") if view.splits_backward else ("F", "B")
    terms = []
    for name, members in view.unit_classes.items():
        for phase in phases:
            terms += _of_pass(view, name, members[0], phase)
    return terms


def _of_pass(view: RankView, name: str, member: str, phase: Phase) -> list[Term]:
    """Return the terms of one phase of the unit class `name`. `member`: a unit of the class."""
    job, s, t, rows = view.job, view.strategy, view.tokens, view.rows_of(member)
    compute, n = job.precision.compute, view.passes[phase, name]
    shared = RankPass(t, job.seq, DTYPE_BYTES[compute], s)
    terms = []
    core: dict[tuple[str, str], list[int]] = {}  # bytes that the core sends, by operation and axis
    repeat, splits = repeat_of(s, member), view.splits_backward
    for i, x in enumerate(collectives.communication(view.model, job, s, member, phase, t, repeat, rows, splits)):
        if isinstance(x, collectives.CoreRuns):
            for y in context.communication(x.op, x.sublayer, s, compute, x.way, t):
                core.setdefault((y.op, y.axis), []).append(y.bytes)
            continue
        event = Event("collective", x.op, phase, name if i == 0 else f"{name}, then", x.axis, dtype=x.dtype)
        overlapping = NO_WORK
        if x.overlapped:
            overlapping = shared_expert(view.model, member, shared, phase != "F") * n
        terms.append(Term(event, count=x.count * n, bytes=x.bytes * n, overlapping=overlapping))
    for (op, axis), sizes in core.items():
        event = Event("p2p" if axis == "ring" else "collective", op, phase, name, axis, dtype=compute)
        terms.append(Term(event, count=len(sizes) * n, bytes=sum(sizes) * n))
    return terms


def partial_gradients(view: RankView) -> list[Term]:
    """Return the term of summing partial gradients of tp ranks."""
    if not (size := partial_gradient_bytes(view)):
        return []
    event = Event("collective", "all_reduce", "opt", "copies", "tp", dtype=view.job.precision.accumulate_dtype)
    return [Term(event, count=1, bytes=size)]


def pipeline_messages(view: RankView) -> list[Term]:
    """Return the terms of a pipeline rank's messages to other ranks, the residual stream and its gradient, and of the
    reduction of a tied embedding, of which the first and the last rank have a copy."""
    job, s, rank_of, m = view.job, view.strategy, view.layout.rank_of, view.layout.micro_batches
    if s.pp == 1:
        return []
    dtype = job.precision.compute
    tokens = view.tokens // (s.tp if s.sp else 1)
    size = tokens * view.model.hidden * DTYPE_BYTES[dtype]
    terms = []
    phases: tuple[tuple[Phase, int], ...] = (("F", 1), ("B", -1))
    for phase, onward in phases:
        for op, way in (("send", onward), ("recv", -onward)):
            n = sum(0 <= c + way < len(rank_of) and rank_of[c + way] != view.place for c in view.chunk_indices)
            event = Event("p2p", op, phase, "stream", "pp", dtype=dtype)
            terms.append(Term(event, count=n * m, bytes=size * n * m))
    if tied_bytes := tied_gradient_bytes(view):
        event = Event("collective", "all_reduce", "opt", "embedding", "embed", dtype=job.precision.accumulate_dtype)
        terms.append(Term(event, count=1, bytes=tied_bytes))
    return terms
