"""The price of a strategy with a pipeline: the terms of every pipeline rank, in the times of its schedule.

    step = max over ranks (end of its last action + communication that is seen) + optimizer

The schedule is run with each chunk's own seconds (pipeline.py); what is sent inside of layers is in them. Memory is
that of the fullest rank, from its expanded step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.collectives import measured
from phalanx.cost.collectives.link import link
from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import Column
from phalanx.cost.pipeline_time import Costs, Priced, price
from phalanx.cost.step.expand import expand
from phalanx.cost.step.program import StepProgram
from phalanx.cost.step.term import Term, unit_class
from phalanx.cost.step.terms import terms
from phalanx.schedule.event import INSIDE
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.sends import without
from phalanx.spec.cluster.spec import ClusterSpec, KernelRates
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, chunks
from phalanx.spec.strategy.mesh import Mesh, mesh
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Pipelined:
    """`costs` of each chunk, `priced` with them; by pipeline rank its communication, the part of that which is seen,
    and its optimizer, in seconds."""

    costs: Costs
    priced: Priced
    communication_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]

    @property
    def step_time_s(self) -> float:
        ends = [own[-1][1] if own else 0.0 for own in self.priced.times]
        return max(end + seen for end, seen in zip(ends, self.exposed_s, strict=True)) + max(self.optimizer_s)


def programs(spec: ModelSpec, job: Job, s: Strategy) -> tuple[StepProgram, ...]:
    """The step at each place of the pipeline, of a rank than which none there holds more."""
    return tuple(expand(spec, job, s, place=place) for place in range(s.pp))


def pipelined(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> Pipelined:
    """Price every pipeline rank, and the schedule with all of them."""
    grid, m = mesh(s), s.accumulation(job)
    rates = cluster.rates(job.precision.compute, min(s.world, cluster.ranks_per_node))
    seconds: dict[str, dict[int, float]] = {"F": {}, "I": {}, "W": {}}
    communication, seen, optimizer = [], [], []
    for place in range(s.pp):
        found = terms(spec, job, s, place=place)
        of_unit = _units(found, cluster, grid, rates, m)
        for chunk, units in zip(stages.held_chunks(s, place), chunks(stages.stage(spec, s, place)), strict=True):
            for phase in seconds:
                seconds[phase][chunk] = sum(of_unit.get((phase, unit_class(spec, s, unit)), 0.0) for unit in units)
        over_ranks = sum(
            float(measured.seconds(cluster, grid, t.event.op, t.event.axis, t.count, t.bytes))
            for t in found
            if t.event.kind == "collective" and not _inside(t) and t.count
        )
        communication.append(over_ranks)
        last = sum(sum(seconds[p][c] for p in "IW") for c in stages.held_chunks(s, place))
        hidden = last if cluster.device.own_communication_engine else 0.0  # behind the last micro-batch's passes
        beside = sum(
            float(unit_work.beside_seconds(t.work, t.coding, t.code, rates))
            for t in found
            if t.event.kind == "collective" and not _inside(t) and t.count
        )
        seen.append(max(over_ranks - hidden, 0.0) + beside)
        update = next(t for t in found if t.event.op == "optimizer")
        optimizer.append(unit_work.optimizer_seconds(update.work, rates))
    over = link(cluster, grid, "pp")
    size = next(t.bytes / t.count for t in found if t.event.axis == "pp" and t.count)
    forward, inputs, weights = ([seconds[p][c] for c in range(len(stages.rank_of(s)))] for p in "FIW")
    costs = Costs(forward, inputs, weights, over.alpha_s + float(size) * over.beta_s_per_byte)
    priced = price(without(stages.schedule(s, m)), costs)
    return Pipelined(costs, priced, tuple(communication), tuple(seen), tuple(optimizer))


def unit_seconds(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy, place: int) -> dict[str, float]:
    """Of each class of units that a pipeline rank has, all passes of one micro-batch."""
    grid = mesh(s)
    rates = cluster.rates(job.precision.compute, min(s.world, cluster.ranks_per_node))
    found: dict[str, float] = {}
    of_unit = _units(terms(spec, job, s, place=place), cluster, grid, rates, s.accumulation(job))
    for (_, unit), seconds in of_unit.items():
        found[unit] = found.get(unit, 0.0) + float(seconds)
    return found


def seen_beside(cluster: ClusterSpec, rates: KernelRates, term: Term, seconds: Column) -> Column:
    """Of the seconds of a collective inside of layers those that nothing is computed in."""
    if not cluster.device.own_communication_engine:
        return seconds
    by = rates.forward if term.event.phase == "F" else rates.backward
    return np.maximum(seconds - term.beside.seconds(by) * rates.whole, 0.0)


_PHASES = {"forward": "F", "backward": "I", "input_grad": "I", "weight_grad": "W"}
"""What a pass costs is counted under; a backward pass in one is all I."""


def _inside(term: Term) -> bool:
    return term.event.axis in INSIDE and term.event.phase != "opt"


def _units(
    found: tuple[Term, ...], cluster: ClusterSpec, grid: Mesh, rates: KernelRates, m: int
) -> dict[tuple[str, str], Column]:
    """Seconds of a pass of one unit of each class, what is sent inside of it among them."""
    of_unit: dict[tuple[str, str], Column] = {}
    passes: dict[tuple[str, str], int] = {}
    for t in found:
        phase = _PHASES.get(t.event.op) if t.event.kind == "compute" else None
        if phase is not None and t.count:
            by = rates.forward if phase == "F" else rates.backward
            again = t.again.seconds(rates.forward) - t.again.seconds(rates.backward)
            whole = (t.work.seconds(by) + (again if phase != "F" else 0)) * rates.whole
            passes[t.event.phase, t.event.unit] = t.count
            # A backward pass in one takes what its two parts do, where those are known.
            of_unit.setdefault((phase, t.event.unit), whole / t.count)
    for t in found:
        if not _inside(t) or not t.count or t.event.op == "recv":
            continue
        unit = t.event.unit.removesuffix(", then")
        phase = t.event.phase
        if phase == "B":
            if ("I", unit) in passes:
                continue
            phase = "I"
        if t.event.kind == "p2p":
            over = link(cluster, grid, t.event.axis)
            sent = over.alpha_s * t.count + over.beta_s_per_byte * t.bytes
        else:
            sent = measured.seconds(cluster, grid, t.event.op, t.event.axis, t.count, t.bytes)
            sent = seen_beside(cluster, rates, t, sent)
        of_unit[phase, unit] = of_unit.get((phase, unit), 0.0) + sent / passes[t.event.phase, unit]
    return of_unit
