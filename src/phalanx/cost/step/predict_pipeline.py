"""The seconds of a strategy with a pipeline: from the terms of every pipeline rank and the times of its schedule.

    step = max over ranks (end of its last action + exposed communication) + optimizer

The times of the schedule (cost/pipeline_time.py) follow from each chunk's own seconds, including the communication
inside its layers.

On devices that transfer concurrently with compute, a collective of gradients or parameters overlaps the passes that
run before its result is needed; the rest is exposed:

    gradients reduced after every micro-batch (ZeRO 2, 3)    all backward passes
    gradients reduced once a step                            the last micro-batch's backward pass
    parameters gathered for every pass (ZeRO 3)              half by all forward, half by all backward passes
    parameters gathered once a step (ZeRO 3, reshard=step)   the first micro-batch's forward pass
    parameters gathered after the update (ZeRO 1, 2)         the next step's first forward pass
    metrics, scales of 8-bit gathers, whole matrices         nothing

Gathers and reductions of the backward pass share links, so the sum of their seconds overlaps it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from phalanx.cost.collectives import measured
from phalanx.cost.collectives.link import link
from phalanx.cost.compute import unit_work
from phalanx.cost.pipeline_time import Costs, PricedSchedule, price
from phalanx.cost.step.layer_terms import layer_terms
from phalanx.cost.step.pass_terms import pass_terms
from phalanx.cost.step.term import Term
from phalanx.schedule.event import INSIDE
from phalanx.schedule.gradients.buckets import SCALES
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.gradients.whole_matrices import MATRICES
from phalanx.schedule.layout import Layout, RankView
from phalanx.schedule.pipeline.simulate import strip_sends
from phalanx.spec.cluster.spec import ClusterSpec, KernelRates
from phalanx.spec.errors import InputError


def exposed_outside_layers(
    sent: Iterable[tuple[Term, float]], layout: Layout, forward_s: float, backward_s: float
) -> float:
    """Return the exposed seconds of collectives outside layers. `sent`: their terms, each with the seconds of all its
    collectives; `forward_s`, `backward_s`: seconds of a rank's passes of all micro-batches."""
    sharding, m = sharding_of(layout.strategy), layout.micro_batches
    reduced = gathered = updated = exposed = 0.0
    for term, seconds in sent:
        if term.event.phase == "B":
            reduced += seconds
        elif term.event.phase == "F":
            gathered += seconds
        elif term.event.unit.startswith(("metrics", SCALES, MATRICES)):
            exposed += seconds
        else:
            updated += seconds
    if not sharding.gathers_each:
        exposed += max(gathered - forward_s / m, 0.0)
    else:
        exposed += max(gathered / 2 - forward_s, 0.0)
        reduced += gathered / 2
    exposed += max(reduced - backward_s / (1 if sharding.reduces_each else m), 0.0)
    return exposed + max(updated - forward_s / m, 0.0)


@dataclass(frozen=True)
class PricedPipeline:
    """A schedule with its times, and other seconds of each pipeline rank."""

    costs: Costs
    """Seconds of each chunk's passes."""
    priced: PricedSchedule
    """The schedule with the times that follow from `costs`."""
    communication_s: tuple[float, ...]
    """Seconds of collectives outside layers: of gradients, parameters and metrics."""
    exposed_s: tuple[float, ...]
    """The exposed part of `communication_s`, and the work around these collectives."""
    optimizer_s: tuple[float, ...]

    @property
    def step_time_s(self) -> float:
        """Seconds of the step on the slowest pipeline rank."""
        ends = [times[-1][1] if times else 0.0 for times in self.priced.times]
        return max(end + exposed for end, exposed in zip(ends, self.exposed_s, strict=True)) + max(self.optimizer_s)


def price_pipeline(
    views: Sequence[RankView], terms_of: Sequence[Sequence[Term]], cluster: ClusterSpec
) -> PricedPipeline:
    """Return the schedule of a pipeline with its times. `views`: all pipeline ranks in order; `terms_of`: their
    terms."""
    layout = views[0].layout
    rates = rates_of(layout, cluster)
    seconds: dict[str, dict[int, float]] = {"F": {}, "I": {}, "W": {}}
    communication, exposed, optimizer = [], [], []
    # Seconds of each chunk's passes, and of each rank's collectives and update.
    for view, rank_terms in zip(views, terms_of, strict=True):
        of_pass = _seconds_of_passes(view, rank_terms, cluster, rates)
        for chunk, units in zip(view.chunk_indices, view.chunks, strict=True):
            for phase in seconds:
                seconds[phase][chunk] = sum(of_pass.get((phase, view.class_of[unit]), 0.0) for unit in units)
        collectives = [t for t in rank_terms if t.event.kind == "collective" and not _is_inside_layer(t) and t.count]
        outer = [t for t in collectives if t.event.axis == "dp_local"]
        passes_s = layout.micro_batches * sum(seconds[p][c] for p in seconds for c in view.chunk_indices)
        parts = [outer_seconds(view, t, cluster, rates) for t in outer]
        outer_s, exposed_outer_s = outer_of_step(view, cluster, parts, passes_s)
        collectives = [t for t in collectives if t not in outer]
        sent = [(t, collective_seconds(view, t, cluster)) for t in collectives]
        exposed_s = sent_s = sum(seconds for _, seconds in sent)
        communication.append(sent_s + outer_s)
        if cluster.device.own_communication_engine:
            forward_s, backward_s = (
                layout.micro_batches * sum(seconds[p][c] for p in phases for c in view.chunk_indices)
                for phases in ("F", "IW")
            )
            exposed_s = exposed_outside_layers(sent, layout, forward_s, backward_s)
        coding_seconds = sum(
            float(unit_work.around_collective_seconds(t.work, t.coding, t.code, rates)) for t in collectives
        )
        exposed.append(exposed_s + coding_seconds + exposed_outer_s)
        update = next(t for t in rank_terms if t.event.op == "optimizer")
        optimizer.append(unit_work.optimizer_seconds(update.work, rates))
    # Times of the schedule.
    pp_link = link(cluster, layout.mesh, "pp")
    size = next(t.bytes / t.count for t in terms_of[-1] if t.event.axis == "pp" and t.count)
    forward, inputs, weights = ([seconds[p][c] for c in range(len(layout.rank_of))] for p in "FIW")
    message = pp_link.alpha_s + float(size) * pp_link.beta_s_per_byte
    overhead = 0.0 if cluster.device.own_communication_engine else message
    costs = Costs(forward, inputs, weights, message, overhead, pace(layout, terms_of, cluster, len(views)))
    priced = price(strip_sends(layout.schedule), costs)
    return PricedPipeline(costs, priced, tuple(communication), tuple(exposed), tuple(optimizer))


def pace(layout: Layout, terms_of: Iterable[Iterable[Term]], cluster: ClusterSpec, stages: int) -> tuple[float, ...]:
    """Return the speed of passes with 1, 2, ... of `stages` pipeline ranks active over the speed with all active,
    from rates measured with as many active ranks of a host; between measurements, seconds are interpolated. Empty if
    ranks have their own cores, or only one rate is known."""
    if cluster.device.own_communication_engine:
        return ()
    computed = [(t, t.event.phase == "F") for own in terms_of for t in own if t.event.kind == "compute"]
    most = min(layout.strategy.world, cluster.ranks_per_node)
    seconds = {
        k.concurrent: sum(t.work.seconds(k.forward if forward else k.backward) for t, forward in computed)
        * k.pass_slowdown
        for k in cluster.kernels
        if k.dtype == layout.job.precision.compute and k.concurrent <= most
    }
    if len(seconds) < 2:
        return ()
    levels = sorted(seconds)
    # Another active rank cannot make a rank faster: such measurements are noise.
    slower = np.maximum.accumulate([float(seconds[level]) for level in levels])
    at_work = np.arange(1, stages + 1) * most / stages
    taken = np.interp(at_work, levels, slower)
    return tuple(float(x) for x in taken[-1] / taken)


def unit_seconds(view: RankView, cluster: ClusterSpec) -> dict[str, float]:
    """Return the seconds of all passes of one micro-batch by one unit of each class on a pipeline rank."""
    totals: dict[str, float] = {}
    step_terms = chain(pass_terms(view), layer_terms(view))
    for (_, unit), seconds in _seconds_of_passes(view, step_terms, cluster, rates_of(view.layout, cluster)).items():
        totals[unit] = totals.get(unit, 0.0) + float(seconds)
    return totals


def rates_of(layout: Layout, cluster: ClusterSpec) -> KernelRates:
    """Return the rates of the job's compute dtype with as many active ranks per node as the layout has. Raises
    InputError if the cluster lacks them, or has no rate of the job's narrow products."""
    p = layout.job.precision
    rates = cluster.rates(p.compute, min(layout.strategy.world, cluster.ranks_per_node))
    if p.operands is not None and p.products not in rates.forward.per_narrow_flop:
        reason = (
            f"has no rate on {cluster.device.name}: it has no products of {p.operands.title}, or none were measured"
        )
        raise InputError("job.precision.products", p.products, reason, "leave it out, or run phalanx measure again")
    return rates


def pass_seconds(term: Term, rates: KernelRates) -> float:
    """Return the seconds of all passes of a term. Recomputed forward passes have forward rates."""
    if term.event.phase == "F":
        return float(term.work.seconds(rates.forward) * rates.pass_slowdown)
    difference = term.recomputed.seconds(rates.forward) - term.recomputed.seconds(rates.backward)
    return float((term.work.seconds(rates.backward) + difference) * rates.pass_slowdown)


def collective_seconds(view: RankView, term: Term, cluster: ClusterSpec) -> float:
    """Return the seconds of all collectives of a term."""
    return float(measured.seconds(cluster, view.mesh, term.event.op, term.event.axis, term.count, term.bytes))


def message_seconds(view: RankView, term: Term, cluster: ClusterSpec) -> float:
    """Return the seconds of all messages of a term between two ranks."""
    over = link(cluster, view.mesh, term.event.axis)
    return over.alpha_s * term.count + over.beta_s_per_byte * term.bytes


def exposed_seconds(cluster: ClusterSpec, rates: KernelRates, term: Term, seconds: float) -> float:
    """Return the exposed part of the `seconds` of a collective inside layers."""
    if not cluster.device.own_communication_engine:
        return seconds
    by = rates.forward if term.event.phase == "F" else rates.backward
    return max(seconds - float(term.overlapping.seconds(by)) * rates.pass_slowdown, 0.0)


def outer_seconds(view: RankView, term: Term, cluster: ClusterSpec, rates: KernelRates) -> tuple[float, float]:
    """Return the seconds of a term in which replicas that step alone synchronise: of its collectives, and of the work
    around them."""
    work = unit_work.around_collective_seconds(term.work, term.coding, term.code, rates)
    return collective_seconds(view, term, cluster), float(work)


def outer_of_step(
    view: RankView, cluster: ClusterSpec, terms: Sequence[tuple[float, float]], step_s: float
) -> tuple[float, float]:
    """Return a step's share of the seconds of a synchronisation, and the exposed part of the share. `terms`: what
    outer_seconds returned. On devices that transfer concurrently with compute, changes of fragments overlap the steps
    of `step_s` seconds until they are applied."""
    outer, local = view.job.outer, max(1, view.strategy.local)
    sent, work = (sum(seconds) for seconds in zip(*terms, strict=True)) if terms else (0.0, 0.0)
    cover = outer.cover(view.strategy.outer_compressor is not None)
    steps = cover if cluster.device.own_communication_engine else 0
    return (sent + work) / local, (max(sent - steps * step_s, 0.0) + work) / local


_PHASES = {"forward": "F", "backward": "I", "input_grad": "I", "weight_grad": "W"}
"""The phase that a pass is priced under; an undivided backward pass counts as I."""


def _is_inside_layer(term: Term) -> bool:
    """Whether a term is communication in the middle of a layer's pass."""
    return term.event.axis in INSIDE and term.event.phase != "opt"


def _seconds_of_passes(
    view: RankView, step_terms: Iterable[Term], cluster: ClusterSpec, rates: KernelRates
) -> dict[tuple[str, str], float]:
    """Return the seconds of one pass by (phase, unit class), including the communication inside it."""
    seconds_of: dict[tuple[str, str], float] = {}
    passes: dict[tuple[str, str], int] = {}
    sent = []
    for t in step_terms:
        if _is_inside_layer(t) and t.count and t.event.op != "recv":
            sent.append(t)
        phase = _PHASES.get(t.event.op) if t.event.kind == "compute" else None
        if phase is not None and t.count:
            passes[t.event.phase, t.event.unit] = t.count
            # If I and W are known, they price the undivided backward pass too.
            seconds_of.setdefault((phase, t.event.unit), pass_seconds(t, rates) / t.count)
    for t in sent:
        unit, phase = t.event.unit.removesuffix(", then"), t.event.phase
        if phase == "B":
            if ("I", unit) in passes:
                continue
            phase = "I"
        if t.event.kind == "p2p":
            sent_s = message_seconds(view, t, cluster)
        else:
            sent_s = exposed_seconds(cluster, rates, t, collective_seconds(view, t, cluster))
        seconds_of[phase, unit] = seconds_of.get((phase, unit), 0.0) + sent_s / passes[t.event.phase, unit]
    return seconds_of
