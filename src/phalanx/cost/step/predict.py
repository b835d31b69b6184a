"""The price of a strategy on a cluster: step time, memory, traffic, from its terms.

`predict` takes one Strategy, `predict_all` many. The memory peak, a walk over instants, has a closed form here; a
property test holds it equal to the walk over the expanded events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from phalanx.cost.collectives.link import link
from phalanx.cost.collectives.measured import seconds as collective_seconds
from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import NO_WORK, Column
from phalanx.cost.memory.footprint import documents
from phalanx.cost.memory.state import model_state
from phalanx.cost.step.predict_pipeline import exposed_seconds, price_pipeline, programs
from phalanx.cost.step.term import Columns, Term, columns, highest, unit_classes
from phalanx.cost.step.terms import terms
from phalanx.schedule.event import INSIDE
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.routing import routed
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, as_seen_by
from phalanx.spec.strategy.mesh import Mesh, mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local_model


@dataclass(frozen=True)
class Prediction:
    """The price of one step on one rank: seconds, FLOPs, bytes. Fields are numbers, or columns where columns were
    given.

    With a pipeline: the seconds of the rank that computes longest, the memory of the fullest rank, the bytes of the
    first rank, and the mean FLOPs of all ranks."""

    step_time_s: Column
    forward_s: Column
    backward_s: Column
    optimizer_s: Column
    communication_s: Column
    exposed_communication_s: Column
    flops: Column
    model_flops: Column
    """This rank's part of the model FLOPs of one process: without recomputation, attention over the full square."""
    bytes_per_axis: dict[str, Column]
    memory_bytes: Column
    activation_bytes: Column
    state_bytes: Column
    bubble_fraction: Column = 0.0
    """Share of all ranks' time, between the first and the last pass of a pipeline, in which they wait."""


def predict(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> Prediction:
    """Price one strategy. Raises InputError if the cluster has no rates for the job's compute dtype."""
    if s.pp > 1:
        return _price_pipeline(spec, cluster, job, s)
    return _price(spec, cluster, job, s, s)


def predict_all(spec: ModelSpec, cluster: ClusterSpec, job: Job, strategies: Sequence[Strategy]) -> Prediction:
    """Price many strategies at once, as columns. Raises InputError if the cluster has no rates for the compute
    dtype."""
    rows = len(strategies)
    names = [f.name for f in fields(Prediction) if f.name != "bytes_per_axis"]
    out = {name: np.zeros(rows) for name in names}
    traffic: dict[str, Column] = {}
    unpiped = np.array([i for i, s in enumerate(strategies) if s.pp == 1], dtype=int)
    priced = [
        (_price(spec, cluster, job, group, group.like), unpiped[rows_of_group])
        for group, rows_of_group in columns([strategies[i] for i in unpiped])
    ]
    # Pipeline schedules are run one by one; they have no closed form.
    priced += [(predict(spec, cluster, job, s), np.array([i])) for i, s in enumerate(strategies) if s.pp > 1]
    for part, here in priced:
        for name in names:
            out[name][here] = getattr(part, name)
        for axis, column in part.bytes_per_axis.items():
            traffic.setdefault(axis, np.zeros(rows))[here] = column
    return Prediction(**out, bytes_per_axis=traffic)


def _price(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy | Columns, like: Strategy) -> Prediction:
    """Price one strategy without a pipeline, or columns that share the mesh and `zero` of `like`."""
    rates = cluster.rates(job.precision.compute, min(like.world, cluster.ranks_per_node))
    grid = mesh(like)
    forward: Column = 0.0
    backward: Column = 0.0
    communication: Column = 0.0
    optimizer = 0.0
    flops: Column = 0
    traffic: dict[str, Column] = {}
    step_terms = terms(spec, job, s)
    inside_layers: Column = 0.0  # seconds of communication in the middle of layers
    exposed_inside: Column = 0.0  # the part of it that no compute overlaps
    for term in step_terms:
        kind, phase = term.event.kind, term.event.phase
        if kind == "compute" and phase == "F":
            forward = forward + term.work.seconds(rates.forward) * rates.pass_slowdown
        elif kind == "compute" and phase == "B":
            # Recomputed forward passes run at forward rates.
            difference = term.recomputed.seconds(rates.forward) - term.recomputed.seconds(rates.backward)
            backward = backward + (term.work.seconds(rates.backward) + difference) * rates.pass_slowdown
        elif term.event.op == "optimizer":
            optimizer = unit_work.optimizer_seconds(term.work, rates)
        elif like.world > 1:
            backward = backward + unit_work.around_collective_seconds(term.work, term.coding, term.code, rates)
            axis = term.event.axis
            exposed_part: Column | None = None
            if term.event.kind == "p2p":
                seconds, exposed_part = _ring_seconds(cluster, grid, like, term, step_terms)
            else:
                seconds = collective_seconds(cluster, grid, term.event.op, axis, term.count, term.bytes)
                exposed_part = exposed_seconds(cluster, rates, term, seconds)
            if axis in INSIDE:
                inside_layers = inside_layers + seconds
                exposed_inside = exposed_inside + (seconds if exposed_part is None else exposed_part)
            else:
                communication = communication + seconds
            traffic[axis] = traffic.get(axis, 0) + term.bytes
        flops = flops + term.work.flops
    exposed = communication
    if cluster.device.own_communication_engine:
        # Buckets travel during the last micro-batch's backward pass; what does not fit there is exposed.
        exposed = np.maximum(communication - backward / s.accumulation(job), 0.0)
    state = _state(spec, job, s)
    part = Context(job.seq, like.ring, like.ulysses)
    peak = state + _peak(spec, like, step_terms, documents(spec, job, s.micro_batch * part.tokens, part))
    return Prediction(
        step_time_s=forward + backward + optimizer + exposed + exposed_inside,
        forward_s=forward,
        backward_s=backward,
        optimizer_s=optimizer,
        communication_s=communication + inside_layers,
        exposed_communication_s=exposed + exposed_inside,
        flops=flops,
        model_flops=_model_flops(spec, job, s, like),
        bytes_per_axis=traffic,
        memory_bytes=peak,
        activation_bytes=peak - state,
        state_bytes=state,
    )


def _price_pipeline(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> Prediction:
    """Price one strategy with a pipeline: its schedule is run, and its memory read off the expanded steps."""
    pipeline, steps = price_pipeline(spec, cluster, job, s), programs(spec, job, s)
    busiest = max(range(s.pp), key=lambda rank: pipeline.priced.work[rank])
    fullest = max(steps, key=lambda step: step.peak_bytes)
    actions = zip(pipeline.priced.schedule.actions[busiest], pipeline.priced.times[busiest], strict=True)
    forward = sum(stop - start for action, (start, stop) in actions if action.kind == "F")
    return Prediction(
        step_time_s=pipeline.step_time_s,
        forward_s=forward,
        backward_s=pipeline.priced.work[busiest] - forward,
        optimizer_s=max(pipeline.optimizer_s),
        communication_s=max(pipeline.communication_s),
        exposed_communication_s=max(pipeline.exposed_s),
        flops=sum(e.flops for step in steps for e in step.events) // s.pp,
        model_flops=_model_flops(spec, job, s, s) // s.pp,
        bytes_per_axis=steps[0].bytes_per_axis(),
        memory_bytes=fullest.peak_bytes,
        activation_bytes=fullest.peak_bytes - fullest.state.total,
        state_bytes=fullest.state.total,
        bubble_fraction=pipeline.priced.bubble_fraction,
    )


def _model_flops(spec: ModelSpec, job: Job, s: Strategy | Columns, like: Strategy) -> Column:
    """Return the model FLOPs of one rank's step: forward and backward passes, nothing recomputed."""
    local_spec, total = local_model(spec, like), NO_WORK
    tokens: Column = s.micro_batch * job.seq // like.cp
    if isinstance(s, Columns):
        tokens = tokens.astype(float)
    rows = routed(spec.experts, like, tokens) if spec.experts is not None else None
    for name, members in unit_classes(spec, like).items():
        unit, unit_spec = name.split(",")[0], as_seen_by(local_spec, members[0])
        for work in (unit_work.forward, unit_work.backward):
            total += work(unit_spec, unit, tokens, job.seq, 1, routed=rows) * len(members)
    return total.flops * s.accumulation(job)


def _ring_seconds(
    cluster: ClusterSpec, grid: Mesh, like: Strategy, term: Term, step_terms: Sequence[Term]
) -> tuple[Column, Column]:
    """Return seconds of a ring's messages (keys and values, or their gradients), and the exposed part of them.

    Each hop overlaps attention over the block received before. Of the R + 1 equal parts of attention over a ring of R
    ranks, two are over the rank's own block; the rest have a hop beside them. Receives overlap sends and cost 0."""
    if term.event.op == "recv":
        return 0.0, 0.0
    over = link(cluster, grid, term.event.axis)
    seconds = over.alpha_s * term.count + over.beta_s_per_byte * term.bytes
    if not cluster.device.own_communication_engine:
        return seconds, seconds
    event = term.event
    rates = cluster.rates(event.dtype, min(like.world, cluster.ranks_per_node))  # type: ignore[arg-type]
    computes = (t for t in step_terms if t.event.kind == "compute")
    pass_ = next(t for t in computes if (t.event.unit, t.event.phase) == (event.unit, event.phase))
    recomputed = pass_.recomputed.attention_flops
    forward = (pass_.work.attention_flops if event.phase == "F" else recomputed) * rates.forward.per_attention_flop
    backward = (pass_.work.attention_flops - recomputed) * (event.phase == "B") * rates.backward.per_attention_flop
    overlapping = (forward + backward) * rates.pass_slowdown * (like.ring - 1) / (like.ring + 1)
    # No compute is left to overlap the gradients' last hop.
    hops = term.count / pass_.count
    last = seconds / hops if event.phase == "B" else 0.0
    return seconds, np.maximum(seconds - last - overlapping, 0.0) + last


def _peak(spec: ModelSpec, like: Strategy, step_terms: tuple[Term, ...], masks: dict[int, Column]) -> Column:
    """Return the peak above the state, in closed form.

    Blocks of a class have equal passes, so live bytes only grow from one to the next in the forward pass and only
    fall in the backward pass. The peak is therefore at the last block of some class, or, where that block frees masks
    (`masks`: bytes by block), at the one before it."""
    t = {(term.event.phase, term.event.unit): term for term in step_terms if term.event.kind == "compute"}
    classes = {name: members for name, members in unit_classes(spec, like).items() if name.startswith("blocks")}
    first, last = t["F", "embed"], t["F", "head"]
    base = first.alloc - first.free

    def before(index: int) -> Column:
        """Return live bytes when the forward pass of block `index` begins. When the backward pass of the next block
        has ended, the gradient of the output is live on top."""
        counts = [
            (t["F", name], sum(int(u.split(".")[1]) < index for u in members)) for name, members in classes.items()
        ]
        return base + sum(n * (term.alloc - term.free) for term, n in counts)

    peak = first.alloc
    end = before(spec.layers)
    peak = np.maximum(peak, end + last.alloc)
    live = end + last.alloc - last.free
    backward = t["B", "head"]
    peak = np.maximum(peak, live + backward.alloc)
    live = live + backward.alloc - backward.free
    for name, members in classes.items():
        f, b = t["F", name], t["B", name]
        for unit in reversed(members):
            at = int(unit.split(".")[1])
            freed = end - before(at + 1) + sum(size for block, size in masks.items() if block > at)
            peak = np.maximum(peak, before(at) + f.alloc)
            peak = np.maximum(peak, live - freed + highest(b, masks.get(at, 0)))
            if at not in masks:
                break
    backward = t["B", "embed"]
    peak = np.maximum(peak, live - (end - base) - backward.before + backward.alloc)
    return np.maximum(peak, t["opt", ""].alloc)


def _state(spec: ModelSpec, job: Job, s: Strategy | Columns) -> Column:
    """Return bytes of the model state of one rank."""
    if isinstance(s, Strategy):
        return model_state(spec, job, s).total
    kinds, where = np.unique(np.stack([s.bucket_bytes, s.micro_batch]), axis=1, return_inverse=True)
    if spec.experts is None:  # then the state does not depend on the micro-batch
        kinds, where = np.unique(s.bucket_bytes, return_inverse=True)
        kinds = np.stack([kinds, np.ones_like(kinds)])
    like = [replace(s.like, bucket=int(size) / 2**20, micro_batch=int(n)) for size, n in kinds.T]
    return np.array([model_state(spec, job, one).total for one in like])[where.reshape(-1)]
