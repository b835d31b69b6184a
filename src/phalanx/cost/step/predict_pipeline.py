"""The price of a strategy with a pipeline: the terms of every pipeline rank, in the times of its schedule.

    step = max over ranks (end of its last action + exposed communication) + optimizer

The schedule is run with each chunk's own seconds (cost/pipeline_time.py), which include the communication inside
layers. Memory is that of the fullest rank, from its expanded step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.collectives.link import link
from phalanx.cost.collectives.measured import seconds as collective_seconds
from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import Column
from phalanx.cost.pipeline_time import Costs, PricedSchedule, price
from phalanx.cost.step.expand import expand
from phalanx.cost.step.program import StepProgram
from phalanx.cost.step.term import Term, unit_class
from phalanx.cost.step.terms import terms
from phalanx.schedule.event import INSIDE
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.sends import strip_sends
from phalanx.spec.cluster.spec import ClusterSpec, KernelRates
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, chunks
from phalanx.spec.strategy.mesh import Mesh, mesh
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Pipelined:
    """A priced pipeline: `costs` of each chunk, and the schedule `priced` with them. By pipeline rank, in seconds:
    communication of gradients and parameters, the exposed part of it, and the optimizer."""

    costs: Costs
    priced: PricedSchedule
    communication_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]

    @property
    def step_time_s(self) -> float:
        """Seconds of the step on the slowest pipeline rank."""
        ends = [times[-1][1] if times else 0.0 for times in self.priced.times]
        return max(end + exposed for end, exposed in zip(ends, self.exposed_s, strict=True)) + max(self.optimizer_s)


def programs(spec: ModelSpec, job: Job, s: Strategy) -> tuple[StepProgram, ...]:
    """Return the expanded step of each pipeline rank; of the ranks there, the one that holds the most memory."""
    return tuple(expand(spec, job, s, place=place) for place in range(s.pp))


def price_pipeline(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> Pipelined:
    """Price the chunks of every pipeline rank and run the schedule with them."""
    grid, m = mesh(s), s.accumulation(job)
    rates = cluster.rates(job.precision.compute, min(s.world, cluster.ranks_per_node))
    seconds: dict[str, dict[int, float]] = {"F": {}, "I": {}, "W": {}}
    communication, exposed, optimizer = [], [], []
    for place in range(s.pp):
        rank_terms = terms(spec, job, s, place=place)
        of_unit = _units(rank_terms, cluster, grid, rates, m)
        for chunk, units in zip(stages.held_chunks(s, place), chunks(stages.stage(spec, s, place)), strict=True):
            for phase in seconds:
                seconds[phase][chunk] = sum(of_unit.get((phase, unit_class(spec, s, unit)), 0.0) for unit in units)
        sent_seconds = sum(
            float(collective_seconds(cluster, grid, t.event.op, t.event.axis, t.count, t.bytes))
            for t in rank_terms
            if t.event.kind == "collective" and not _inside(t) and t.count
        )
        communication.append(sent_seconds)
        last_passes = sum(sum(seconds[p][c] for p in "IW") for c in stages.held_chunks(s, place))
        # Communication overlaps the last micro-batch's backward passes.
        hidden = last_passes if cluster.device.own_communication_engine else 0.0
        coding_seconds = sum(
            float(unit_work.around_collective_seconds(t.work, t.coding, t.code, rates))
            for t in rank_terms
            if t.event.kind == "collective" and not _inside(t) and t.count
        )
        exposed.append(max(sent_seconds - hidden, 0.0) + coding_seconds)
        update = next(t for t in rank_terms if t.event.op == "optimizer")
        optimizer.append(unit_work.optimizer_seconds(update.work, rates))
    pp_link = link(cluster, grid, "pp")
    size = next(t.bytes / t.count for t in rank_terms if t.event.axis == "pp" and t.count)
    forward, inputs, weights = ([seconds[p][c] for c in range(len(stages.rank_of(s)))] for p in "FIW")
    costs = Costs(forward, inputs, weights, pp_link.alpha_s + float(size) * pp_link.beta_s_per_byte)
    priced = price(strip_sends(stages.schedule(s, m)), costs)
    return Pipelined(costs, priced, tuple(communication), tuple(exposed), tuple(optimizer))


def unit_seconds(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy, place: int) -> dict[str, float]:
    """Return seconds of all passes of one micro-batch, by unit class, on pipeline rank `place`."""
    grid = mesh(s)
    rates = cluster.rates(job.precision.compute, min(s.world, cluster.ranks_per_node))
    totals: dict[str, float] = {}
    of_unit = _units(terms(spec, job, s, place=place), cluster, grid, rates, s.accumulation(job))
    for (_, unit), seconds in of_unit.items():
        totals[unit] = totals.get(unit, 0.0) + float(seconds)
    return totals


def exposed_seconds(cluster: ClusterSpec, rates: KernelRates, term: Term, seconds: Column) -> Column:
    """Return the exposed part of the `seconds` of a collective inside layers."""
    if not cluster.device.own_communication_engine:
        return seconds
    by = rates.forward if term.event.phase == "F" else rates.backward
    return np.maximum(seconds - term.overlapping.seconds(by) * rates.pass_slowdown, 0.0)


_PHASES = {"forward": "F", "backward": "I", "input_grad": "I", "weight_grad": "W"}
"""The phase that a pass is priced under; an undivided backward pass counts as I."""


def _inside(term: Term) -> bool:
    """Whether a term communicates in the middle of a layer's pass."""
    return term.event.axis in INSIDE and term.event.phase != "opt"


def _units(
    step_terms: tuple[Term, ...], cluster: ClusterSpec, grid: Mesh, rates: KernelRates, m: int
) -> dict[tuple[str, str], Column]:
    """Return seconds of one pass by (phase, unit class), with the communication inside it."""
    of_unit: dict[tuple[str, str], Column] = {}
    passes: dict[tuple[str, str], int] = {}
    for t in step_terms:
        phase = _PHASES.get(t.event.op) if t.event.kind == "compute" else None
        if phase is not None and t.count:
            by = rates.forward if phase == "F" else rates.backward
            difference = t.recomputed.seconds(rates.forward) - t.recomputed.seconds(rates.backward)
            seconds = (t.work.seconds(by) + (difference if phase != "F" else 0)) * rates.pass_slowdown
            passes[t.event.phase, t.event.unit] = t.count
            # Where I and W are known, they price the undivided backward pass too.
            of_unit.setdefault((phase, t.event.unit), seconds / t.count)
    for t in step_terms:
        if not _inside(t) or not t.count or t.event.op == "recv":
            continue
        unit = t.event.unit.removesuffix(", then")
        phase = t.event.phase
        if phase == "B":
            if ("I", unit) in passes:
                continue
            phase = "I"
        if t.event.kind == "p2p":
            ring_link = link(cluster, grid, t.event.axis)
            sent = ring_link.alpha_s * t.count + ring_link.beta_s_per_byte * t.bytes
        else:
            sent = collective_seconds(cluster, grid, t.event.op, t.event.axis, t.count, t.bytes)
            sent = exposed_seconds(cluster, rates, t, sent)
        of_unit[phase, unit] = of_unit.get((phase, unit), 0.0) + sent / passes[t.event.phase, unit]
    return of_unit
