"""An observed program compared with a plan: differences from the StepProgram of the plan's strategy.

A program names units and axes differently from a plan, so events are matched by operation, group size and phase. The
comparison covers their numbers and bytes, FLOPs of the passes, and the peak of live bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from phalanx.cost.step.expand import expand
from phalanx.cost.step.program import StepProgram
from phalanx.schedule.event import Event
from phalanx.schedule.layout import Layout
from phalanx.schedule.observation import Observation, RankObservation
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan

_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "opt": "optimizer"}


@dataclass(frozen=True)
class PlanComparison:
    """One kind of event, or one quantity, of a rank in the plan and in the program: its number, and total bytes or
    FLOPs."""

    rank: int
    what: str
    plan_count: int
    program_count: int
    plan_total: int
    program_total: int

    @property
    def differs(self) -> bool:
        """Whether plan and program disagree."""
        return (self.plan_count, self.plan_total) != (self.program_count, self.program_total)


def compare(o: Observation, plan: Plan) -> tuple[PlanComparison, ...]:
    """Compare every observed rank with the same rank of a plan. Raises InputError where the worlds differ."""
    world = plan.strategy.world
    if o.world != world:
        raise InputError("plan", str(plan.strategy), f"is for {world} ranks, the program was observed at {o.world}")
    layout = Layout(plan.model, plan.job, plan.strategy)
    return tuple(d for r in o.ranks for d in _of_rank(r, expand(layout.rank_view(r.rank))))


def _of_rank(observed: RankObservation, program: StepProgram) -> tuple[PlanComparison, ...]:
    result = []
    ours, theirs = _kinds(program.events), _kinds(tuple(x.event for x in observed.events))
    for kind in dict.fromkeys((*ours, *theirs)):
        (a, n), (b, m) = ours.get(kind, (0, 0)), theirs.get(kind, (0, 0))
        op, ranks, phase = kind
        result.append(PlanComparison(observed.rank, f"{op} of {ranks} ranks, {phase}", a, b, n, m))
    for phase in ("F", "B"):
        flops = sum(e.flops for e in program.events if _PHASES[e.phase] == _PHASES[phase])
        seen = sum(n for (p, _), n in observed.flops.items() if _PHASES[p] == _PHASES[phase])
        result.append(PlanComparison(observed.rank, f"FLOPs, {_PHASES[phase]}", 0, 0, flops, seen))
    result.append(PlanComparison(observed.rank, "peak of live bytes", 0, 0, program.peak_bytes, observed.peak))
    return tuple(result)


def _kinds(events: tuple[Event, ...]) -> dict[tuple[str, int, str], tuple[int, int]]:
    counts: Counter[tuple[str, int, str]] = Counter()
    sizes: Counter[tuple[str, int, str]] = Counter()
    for e in events:
        if e.kind != "compute":
            kind = e.op, e.group_size, _PHASES[e.phase]
            counts[kind] += 1
            sizes[kind] += e.bytes
    return {kind: (counts[kind], sizes[kind]) for kind in counts}
