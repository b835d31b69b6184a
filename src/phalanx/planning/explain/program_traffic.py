"""The traffic of our own program in a step, by axis and operation, and its differences from another stack's price."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phalanx.cost.step.terms import terms
from phalanx.planning.explain.traffic import SENT, job_flows
from phalanx.planning.search.column_pricing import Pricing
from phalanx.schedule.event import INSIDE, Event
from phalanx.schedule.layout import Layout
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_PADDING = 0.01
"""Share by which the bytes of an axis may differ: buckets are padded to equal parts of whole cache lines."""


@dataclass(frozen=True)
class ProgramFlow:
    """One operation over one axis; `times` and `sent` (bytes): per step of one rank, for each pipeline stage."""

    axis: str
    op: str
    ranks: int
    payload: int
    """Bytes of the largest buffer."""
    times: tuple[float, ...]
    sent: tuple[float, ...]


def program_flows(model: ModelSpec, job: Job, s: Strategy) -> list[ProgramFlow]:
    """Return the collectives and messages of our own program. A message is an operation of two ranks."""
    grid = mesh(s)
    payload: Counter[tuple[str, str]] = Counter()
    ranks: dict[tuple[str, str], int] = {}
    times: dict[tuple[str, str], list[float]] = {}
    sent: dict[tuple[str, str], list[float]] = {}
    for stage, view in enumerate(Layout(model, job, s).stage_views()):
        for term in terms(view):
            e = term.event
            if e.kind == "compute" or not term.count or e.op == "recv":
                continue
            key = (e.axis, e.op)
            p = ranks[key] = grid.size(e.axis) if e.kind == "collective" else 2
            payload[key] = max(payload[key], -(-term.bytes // term.count))
            times.setdefault(key, [0.0] * s.pp)[stage] += term.count
            sent.setdefault(key, [0.0] * s.pp)[stage] += _share(e, p) * term.bytes
    return [ProgramFlow(*key, ranks[key], payload[key], tuple(times[key]), tuple(sent[key])) for key in sent]


def _share(e: Event, ranks: int) -> float:
    """Return the bytes that a rank sends over a ring per byte of an event; for a message 1, or 0 if received."""
    if e.kind == "p2p":
        return float(e.op != "recv")
    return SENT.get(e.op, 1.0) * (ranks - 1) / ranks


def bytes_sent(events: Iterable[Event]) -> dict[str, float]:
    """Return the bytes that the rank of these events sends over each axis."""
    payload: Counter[tuple[str, float]] = Counter()
    for e in events:
        if e.axis:
            payload[e.axis, _share(e, e.group_size)] += e.bytes
    result: dict[str, float] = {}
    for (axis, share), total in sorted(payload.items()):
        result[axis] = result.get(axis, 0.0) + share * total
    return result


def differing_axes(pricing: Pricing, s: Strategy) -> Iterator[tuple[str, float, float]]:
    """Yield (axis, bytes sent by the job according to the stack's price, bytes sent by our program) where these
    differ. Axes over which dense gradients reduce are called dp; the numbers of a step's metrics are left out."""
    priced: dict[str, float] = {}
    for row in job_flows(pricing, s):
        priced[row.flow.axis] = priced.get(row.flow.axis, 0.0) + row.job
    program: dict[str, float] = {}
    for flow in program_flows(pricing.model, pricing.job, s):
        if flow.axis != "world":
            axis = flow.axis if flow.axis in (*INSIDE, "pp", "edp", "embed") else "dp"
            program[axis] = program.get(axis, 0.0) + sum(flow.sent) * s.world / s.pp
    for axis in sorted(priced.keys() | program.keys()):
        then, now = priced.get(axis, 0.0), program.get(axis, 0.0)
        if abs(then - now) > _PADDING * max(then, now):
            yield axis, then, now
