"""The price of a strategy on a cluster: step time, memory, traffic, from its terms.

`predict` takes one Strategy, `predict_all` many; the walk over instants that gives the memory peak has a closed form
here, which a property test holds equal to the walk over the expanded events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from phalanx.cost.collectives import measured
from phalanx.cost.collectives.link import link
from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import NO_WORK, Column
from phalanx.cost.memory import footprint
from phalanx.cost.memory.state import model_state
from phalanx.cost.step.predict_pipeline import pipelined, programs, seen_beside
from phalanx.cost.step.term import Columns, Term, columns, highest, unit_classes
from phalanx.cost.step.terms import terms
from phalanx.schedule.event import INSIDE
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.routing import routed
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, seen_from
from phalanx.spec.strategy.mesh import Mesh, mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local


@dataclass(frozen=True)
class Prediction:
    """Of one step on one rank; each field a number, or a column where columns were given. Of a pipeline: seconds of
    the rank that computes longest, memory of the fullest, bytes of the first, FLOPs of all on average."""

    step_time_s: Column
    forward_s: Column
    backward_s: Column
    optimizer_s: Column
    communication_s: Column
    exposed_communication_s: Column
    flops: Column
    model_flops: Column
    """Those of one process, this rank's part of them: nothing repeated, attention over the full square."""
    bytes_per_axis: dict[str, Column]
    memory_bytes: Column
    activation_bytes: Column
    state_bytes: Column
    bubble_fraction: Column = 0.0
    """The share of all ranks' time between the first and the last pass of a pipeline in which they wait."""


def predict(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> Prediction:
    """Price the terms. Raises InputError where the cluster has no rates for the job's compute type."""
    if s.pp > 1:
        return _of_pipeline(spec, cluster, job, s)
    return _price(spec, cluster, job, s, s)


def predict_all(spec: ModelSpec, cluster: ClusterSpec, job: Job, strategies: Sequence[Strategy]) -> Prediction:
    """The same for many at once, as columns. Raises InputError likewise."""
    rows = len(strategies)
    names = [f.name for f in fields(Prediction) if f.name != "bytes_per_axis"]
    out = {name: np.zeros(rows) for name in names}
    traffic: dict[str, Column] = {}
    whole = np.array([i for i, s in enumerate(strategies) if s.pp == 1], dtype=int)
    found = [
        (_price(spec, cluster, job, group, group.like), whole[own])
        for group, own in columns([strategies[i] for i in whole])
    ]
    # A schedule is run, and not a formula.
    found += [(predict(spec, cluster, job, s), np.array([i])) for i, s in enumerate(strategies) if s.pp > 1]
    for part, here in found:
        for name in names:
            out[name][here] = getattr(part, name)
        for axis, column in part.bytes_per_axis.items():
            traffic.setdefault(axis, np.zeros(rows))[here] = column
    return Prediction(**out, bytes_per_axis=traffic)


def _price(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy | Columns, like: Strategy) -> Prediction:
    """One strategy, or columns of some that are as `like` is in all that the mesh and the stage depend on."""
    rates = cluster.rates(job.precision.compute, min(like.world, cluster.ranks_per_node))
    grid = mesh(like)
    forward: Column = 0.0
    backward: Column = 0.0
    communication: Column = 0.0
    optimizer = 0.0
    flops: Column = 0
    traffic: dict[str, Column] = {}
    found = terms(spec, job, s)
    inside: Column = 0.0  # of layers
    waited: Column = 0.0  # for it, where nothing else can be done meanwhile
    for term in found:
        kind, phase = term.event.kind, term.event.phase
        if kind == "compute" and phase == "F":
            forward = forward + term.work.seconds(rates.forward) * rates.whole
        elif kind == "compute" and phase == "B":
            again = term.again.seconds(rates.forward) - term.again.seconds(rates.backward)
            backward = backward + (term.work.seconds(rates.backward) + again) * rates.whole
        elif term.event.op == "optimizer":
            optimizer = unit_work.optimizer_seconds(term.work, rates)
        elif like.world > 1:
            backward = backward + unit_work.beside_seconds(term.work, term.coding, term.code, rates)
            axis = term.event.axis
            seen: Column | None = None
            if term.event.kind == "p2p":
                seconds, seen = _passed_on(cluster, grid, like, term, found)
            else:
                seconds = measured.seconds(cluster, grid, term.event.op, axis, term.count, term.bytes)
                seen = seen_beside(cluster, rates, term, seconds)
            if axis in INSIDE:
                inside = inside + seconds
                waited = waited + (seconds if seen is None else seen)
            else:
                communication = communication + seconds
            traffic[axis] = traffic.get(axis, 0) + term.bytes
        flops = flops + term.work.flops
    exposed = communication
    if cluster.device.own_communication_engine:
        # Buckets travel beside the last micro-batch's backward pass; what does not fit there is seen.
        exposed = np.maximum(communication - backward / s.accumulation(job), 0.0)
    held = _state(spec, job, s)
    part = Context(job.seq, like.ring, like.ulysses)
    peak = held + _peak(spec, like, found, footprint.documents(spec, job, s.micro_batch * part.tokens, part))
    return Prediction(
        step_time_s=forward + backward + optimizer + exposed + waited,
        forward_s=forward,
        backward_s=backward,
        optimizer_s=optimizer,
        communication_s=communication + inside,
        exposed_communication_s=exposed + waited,
        flops=flops,
        model_flops=_model_flops(spec, job, s, like),
        bytes_per_axis=traffic,
        memory_bytes=peak,
        activation_bytes=peak - held,
        state_bytes=held,
    )


def _of_pipeline(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> Prediction:
    found, steps = pipelined(spec, cluster, job, s), programs(spec, job, s)
    busiest = max(range(s.pp), key=lambda rank: found.priced.work[rank])
    fullest = max(steps, key=lambda step: step.peak_bytes)
    actions = zip(found.priced.schedule.actions[busiest], found.priced.times[busiest], strict=True)
    forward = sum(stop - start for action, (start, stop) in actions if action.kind == "F")
    return Prediction(
        step_time_s=found.step_time_s,
        forward_s=forward,
        backward_s=found.priced.work[busiest] - forward,
        optimizer_s=max(found.optimizer_s),
        communication_s=max(found.communication_s),
        exposed_communication_s=max(found.exposed_s),
        flops=sum(e.flops for step in steps for e in step.events) // s.pp,
        model_flops=_model_flops(spec, job, s, s) // s.pp,
        bytes_per_axis=steps[0].bytes_per_axis(),
        memory_bytes=fullest.peak_bytes,
        activation_bytes=fullest.peak_bytes - fullest.state.total,
        state_bytes=fullest.state.total,
        bubble_fraction=found.priced.bubble_fraction,
    )


def _model_flops(spec: ModelSpec, job: Job, s: Strategy | Columns, like: Strategy) -> Column:
    own, found = local(spec, like), NO_WORK
    tokens: Column = s.micro_batch * job.seq // like.cp
    if isinstance(s, Columns):
        tokens = tokens.astype(float)
    rows = routed(spec.experts, like, tokens) if spec.experts is not None else None
    for name, alike in unit_classes(spec, like).items():
        unit, seen = name.split(",")[0], seen_from(own, alike[0])
        for work in (unit_work.forward, unit_work.backward):
            found += work(seen, unit, tokens, job.seq, 1, routed=rows) * len(alike)
    return found.flops * s.accumulation(job)


def _passed_on(
    cluster: ClusterSpec, grid: Mesh, like: Strategy, term: Term, found: Sequence[Term]
) -> tuple[Column, Column]:
    """Seconds of keys and values that travel, and of their gradients; and what is seen of them beside attention over
    the blocks before: of its R + 1 equal parts two are over the own block. What comes travels beside what goes."""
    if term.event.op == "recv":
        return 0.0, 0.0
    over = link(cluster, grid, term.event.axis)
    seconds = over.alpha_s * term.count + over.beta_s_per_byte * term.bytes
    if not cluster.device.own_communication_engine:
        return seconds, seconds
    event = term.event
    rates = cluster.rates(event.dtype, min(like.world, cluster.ranks_per_node))  # type: ignore[arg-type]
    computes = (t for t in found if t.event.kind == "compute")
    pass_ = next(t for t in computes if (t.event.unit, t.event.phase) == (event.unit, event.phase))
    again = pass_.again.attention_flops
    forward = (pass_.work.attention_flops if event.phase == "F" else again) * rates.forward.per_attention_flop
    backward = (pass_.work.attention_flops - again) * (event.phase == "B") * rates.backward.per_attention_flop
    beside = (forward + backward) * rates.whole * (like.ring - 1) / (like.ring + 1)
    # The gradients' last hop has nothing left beside it.
    hops = term.count / pass_.count
    last = seconds / hops if event.phase == "B" else 0.0
    return seconds, np.maximum(seconds - last - beside, 0.0) + last


def _peak(spec: ModelSpec, like: Strategy, found: tuple[Term, ...], masks: dict[int, Column]) -> Column:
    """The fullest instant above the state, in closed form. Blocks of a class are alike, and from one to the next of
    them memory only grows forward, and only falls backward: the last of each class can be it, and where that frees
    `masks`, by block, the one before it."""
    t = {(term.event.phase, term.event.unit): term for term in found if term.event.kind == "compute"}
    classes = {name: alike for name, alike in unit_classes(spec, like).items() if name.startswith("blocks")}
    first, last = t["F", "embed"], t["F", "head"]
    base = first.alloc - first.free

    def before(index: int) -> Column:
        """Live when the forward pass of a block begins; it is the output's gradient more when the one after it is
        over."""
        kept = [(t["F", name], sum(int(u.split(".")[1]) < index for u in alike)) for name, alike in classes.items()]
        return base + sum(n * (term.alloc - term.free) for term, n in kept)

    peak = first.alloc
    end = before(spec.layers)
    peak = np.maximum(peak, end + last.alloc)
    live = end + last.alloc - last.free
    back = t["B", "head"]
    peak = np.maximum(peak, live + back.alloc)
    live = live + back.alloc - back.free
    for name, alike in classes.items():
        f, b = t["F", name], t["B", name]
        for unit in reversed(alike):
            at = int(unit.split(".")[1])
            freed = end - before(at + 1) + sum(size for block, size in masks.items() if block > at)
            peak = np.maximum(peak, before(at) + f.alloc)
            peak = np.maximum(peak, live - freed + highest(b, masks.get(at, 0)))
            if at not in masks:
                break
    back = t["B", "embed"]
    peak = np.maximum(peak, live - (end - base) - back.before + back.alloc)
    return np.maximum(peak, t["opt", ""].alloc)


def _state(spec: ModelSpec, job: Job, s: Strategy | Columns) -> Column:
    if isinstance(s, Strategy):
        return model_state(spec, job, s).total
    kinds, where = np.unique(np.stack([s.bucket_bytes, s.micro_batch]), axis=1, return_inverse=True)
    if spec.experts is None:  # micro-batches of all sizes have one state
        kinds, where = np.unique(s.bucket_bytes, return_inverse=True)
        kinds = np.stack([kinds, np.ones_like(kinds)])
    like = [replace(s.like, bucket=int(size) / 2**20, micro_batch=int(n)) for size, n in kinds.T]
    return np.array([model_state(spec, job, one).total for one in like])[where.reshape(-1)]
