"""The price of an observed program on a cluster: its events, priced one by one.

compute        FLOPs of products and attention at the rate of the chip's long bf16 products; other kernels are not
               counted, so this is a lower bound
communication  each collective alone (cost/collectives/nccl_model.py), with its group's own ranks on the links
step           at least the longer of the two (all hidden), at most their sum (nothing hidden): streams decide what
               overlaps, and a recording without times does not show them

An observed program compared with a plan: differences from the StepProgram of the plan's strategy.

A program names units and axes differently from a plan, so events are matched by operation, group size and phase. The
comparison covers their numbers and bytes, FLOPs of the passes, and the peak of live bytes.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.collectives.nccl_model import collective_s, message_s
from phalanx.cost.hardware.system import System
from phalanx.cost.step.expand import expand
from phalanx.cost.step.program import StepProgram
from phalanx.schedule.event import Event
from phalanx.schedule.layout import Layout
from phalanx.schedule.observation import Observation, ObservedEvent, RankObservation
from phalanx.schedule.observation_file import from_json
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.documents import read_text, require_shallow
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan

_ALIKE = {"broadcast": "all_gather", "reduce": "reduce_scatter", "gather": "all_gather", "scatter": "reduce_scatter"}
"""Collectives without a price of their own, and the one of equal traffic over a ring that prices each."""


@dataclass(frozen=True)
class ObservedFlow:
    """Equal collectives or messages: their number, the bytes of each, the innermost links that their group spans, and
    their total seconds."""

    op: str
    axis: str
    ranks: int
    dtype: str
    links: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class ObservedStep:
    """An observed rank's step on a cluster: a lower bound, since of the kernels only products and attention count."""

    rank: int
    flops: int
    compute_s: float
    communication_s: float
    """All collectives, one after the other."""
    all_hidden_s: float
    """The step with full overlap: the longer of computing and communicating."""
    none_hidden_s: float
    """The step without overlap: their sum."""
    peak_bytes: int
    usable_bytes: float
    fits: bool
    collectives: tuple[ObservedFlow, ...]


def read(path: Path) -> Observation | None:
    """Read an observation from a file; None if the file is something else. Raises InputError for a damaged one."""
    try:
        text = read_text(path, "observation")
        if '"observation"' not in text:
            return None
        content = require_shallow(json.loads(text))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("kind") != "observation":
        return None
    return from_json(text, str(path))


def price_observation(o: Observation, cluster: ClusterSpec) -> tuple[ObservedStep, ...]:
    """Price every observed rank on a cluster. Raises InputError if it has fewer ranks than the program."""
    if cluster.ranks < o.world:
        raise InputError("cluster", cluster.name, f"has {cluster.ranks} ranks, the program {o.world}")
    system = system_of(cluster)
    rate = float(np.asarray(system.peak_bf16 * system.gemm))
    memory = float(np.asarray(system.memory_bytes))
    return tuple(_step(r, cluster, system, sum(r.flops.values()) / rate, memory) for r in o.ranks)


def _step(r: RankObservation, cluster: ClusterSpec, system: System, compute_s: float, memory: float) -> ObservedStep:
    flows = tuple(_flows(r, cluster, system))
    communication_s = sum(f.seconds for f in flows)
    return ObservedStep(
        rank=r.rank,
        flops=sum(r.flops.values()),
        compute_s=compute_s,
        communication_s=communication_s,
        all_hidden_s=max(compute_s, communication_s),
        none_hidden_s=compute_s + communication_s,
        peak_bytes=r.peak,
        usable_bytes=memory,
        fits=r.peak <= memory,
        collectives=flows,
    )


def _flows(r: RankObservation, cluster: ClusterSpec, system: System) -> list[ObservedFlow]:
    counts: Counter[tuple[str, str, tuple[int, ...], str, int]] = Counter()
    for o in r.communication:
        e = o.event
        counts[e.op, e.axis, _ends(o, r.rank), e.dtype, e.bytes] += 1
    result = []
    for (op, axis, ranks, dtype, n), count in counts.items():
        stride = abs(ranks[1] - ranks[0]) if len(ranks) > 1 else 1
        if op in ("send", "recv"):
            seconds = message_s(n, stride, system) if op == "send" else 0.0
        else:
            seconds = collective_s(_ALIKE.get(op, op), n, len(ranks), stride, system)
        each = float(np.asarray(seconds))
        result.append(ObservedFlow(op, axis, len(ranks), dtype, _links(ranks, cluster), count, n, count * each))
    return result


def _ends(o: ObservedEvent, rank: int) -> tuple[int, ...]:
    return tuple(sorted((rank, o.event.peer))) if o.event.peer is not None else o.ranks


def _links(ranks: tuple[int, ...], cluster: ClusterSpec) -> str:
    """Name the innermost tier of links with a block that contains all ranks of a group."""
    for tier in cluster.tiers:
        if len({r // tier.ranks for r in ranks}) == 1:
            return tier.name
    return cluster.tiers[-1].name


_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "opt": "optimizer"}


@dataclass(frozen=True)
class PlanDifference:
    """One kind of event or quantity (`what`) on a rank: its count, and its bytes or FLOPs, in plan and program."""

    rank: int
    what: str
    plan_count: int
    program_count: int
    plan_total: int
    program_total: int
    differs: bool


def compare_with_plan(o: Observation, plan: Plan) -> tuple[PlanDifference, ...]:
    """Compare every observed rank with the same rank of a plan. Raises InputError if the world sizes differ."""
    world = plan.strategy.world
    if o.world != world:
        raise InputError("plan", str(plan.strategy), f"is for {world} ranks, the program was observed at {o.world}")
    layout = Layout(plan.model, plan.job, plan.strategy)
    return tuple(d for r in o.ranks for d in _of_rank(r, expand(layout.rank_view(r.rank))))


def _of_rank(observed: RankObservation, program: StepProgram) -> tuple[PlanDifference, ...]:
    ours, theirs = _kinds(program.events), _kinds(tuple(x.event for x in observed.events))
    rows = []
    for op, ranks, phase in dict.fromkeys((*ours, *theirs)):
        kind = op, ranks, phase
        rows.append((f"{op} of {ranks} ranks, {phase}", ours.get(kind, (0, 0)), theirs.get(kind, (0, 0))))
    for phase in ("F", "B"):
        flops = sum(e.flops for e in program.events if _PHASES[e.phase] == _PHASES[phase])
        seen = sum(n for (p, _), n in observed.flops.items() if _PHASES[p] == _PHASES[phase])
        rows.append((f"FLOPs, {_PHASES[phase]}", (0, flops), (0, seen)))
    rows.append(("peak of live bytes", (0, program.peak_bytes), (0, observed.peak)))
    return tuple(PlanDifference(observed.rank, what, a, b, n, m, (a, n) != (b, m)) for what, (a, n), (b, m) in rows)


def _kinds(events: tuple[Event, ...]) -> dict[tuple[str, int, str], tuple[int, int]]:
    """Return (number, total bytes) of communication events by (operation, group size, phase)."""
    totals: dict[tuple[str, int, str], tuple[int, int]] = {}
    for e in events:
        if e.kind != "compute":
            kind = e.op, e.group_size, _PHASES[e.phase]
            count, size = totals.get(kind, (0, 0))
            totals[kind] = count + 1, size + e.bytes
    return totals
