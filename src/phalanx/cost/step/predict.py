"""The price of a strategy on a cluster: step time, memory and traffic, from its terms.

Without a pipeline the memory peak has a closed form; a property test requires it to equal the peak of the expanded
events.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cost.compute import unit_work
from phalanx.cost.ledger.flops import model_flops as ledger_flops
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.rank_layout import layout as ledger_layout
from phalanx.cost.memory.footprint import documents
from phalanx.cost.memory.state import model_state
from phalanx.cost.step.expand import expand
from phalanx.cost.step.predict_pipeline import (
    collective_seconds,
    exposed_outside_layers,
    exposed_seconds,
    message_seconds,
    outer_of_step,
    outer_seconds,
    pass_seconds,
    price_pipeline,
    rates_of,
)
from phalanx.cost.step.term import Term
from phalanx.cost.step.terms import terms
from phalanx.schedule.event import INSIDE
from phalanx.schedule.layout import Layout, RankView
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class StepPrediction:
    """The price of one step on one rank: seconds, FLOPs, bytes.

    If replicas step alone, seconds are the mean over the steps from one synchronisation to the next; bytes and memory
    are of a step that synchronises. With a pipeline, passes have the seconds of the rank that computes longest, other
    seconds are each the longest of any rank, memory is of the fullest rank, bytes are of the first rank, and FLOPs
    are the mean of all ranks."""

    step_time_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    communication_s: float
    exposed_communication_s: float
    flops: int
    model_flops: int
    """FLOPs of the model on one process, without recomputation and with attention over the full square, divided by
    the number of ranks."""
    bytes_per_axis: dict[str, int]
    memory_bytes: int
    activation_bytes: int
    state_bytes: int
    bubble_fraction: float = 0.0
    """Share of time that ranks wait between the first and the last pass of a pipeline."""


def predict(spec: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> StepPrediction:
    """Return the price of a strategy. Raises InputError if the cluster has no rates for the job's compute dtype."""
    layout = Layout(spec, job, s)
    return _price_pipeline(layout, cluster) if s.pp > 1 else _price(layout.stage_view(), cluster)


def _price(view: RankView, cluster: ClusterSpec) -> StepPrediction:
    """Return the price of a strategy without a pipeline."""
    s, rates = view.strategy, rates_of(view.layout, cluster)
    forward = backward = communication = optimizer = 0.0
    inside_layers = 0.0  # seconds of communication in the middle of layers
    exposed_inside = 0.0  # the exposed part of it
    outer: list[tuple[float, float]] = []  # seconds in a synchronisation of replicas that step alone
    sent: list[tuple[Term, float]] = []  # communication outside layers
    flops = 0
    traffic: dict[str, int] = {}
    step_terms = terms(view)
    for term in step_terms:
        kind, phase = term.event.kind, term.event.phase
        if kind == "compute" and phase == "F":
            forward += pass_seconds(term, rates)
        elif kind == "compute" and phase == "B":
            backward += pass_seconds(term, rates)
        elif term.event.op == "optimizer":
            optimizer = unit_work.optimizer_seconds(term.work, rates)
        elif term.event.axis == "dp_local":
            traffic["dp_local"] = traffic.get("dp_local", 0) + term.bytes
            outer.append(outer_seconds(view, term, cluster, rates))
        elif s.world > 1:
            backward += unit_work.around_collective_seconds(term.work, term.coding, term.code, rates)
            axis = term.event.axis
            if kind == "p2p":
                seconds, exposed_part = _ring_seconds(view, cluster, term, step_terms)
            else:
                seconds = collective_seconds(view, term, cluster)
                exposed_part = exposed_seconds(cluster, rates, term, seconds)
            if axis in INSIDE:
                inside_layers += seconds
                exposed_inside += exposed_part
            else:
                communication += seconds
                sent.append((term, seconds))
            traffic[axis] = traffic.get(axis, 0) + term.bytes
        flops += term.work.flops
    exposed = communication
    if cluster.device.own_communication_engine:
        exposed = exposed_outside_layers(sent, view.layout, forward, backward)
    passes = forward + backward + optimizer + exposed + exposed_inside
    synchronised, alone = outer_of_step(view, cluster, outer, passes)
    state = model_state(view).total
    peak = state + _peak(view, step_terms)
    return StepPrediction(
        step_time_s=passes + alone,
        forward_s=forward,
        backward_s=backward,
        optimizer_s=optimizer,
        communication_s=communication + inside_layers + synchronised,
        exposed_communication_s=exposed + exposed_inside + alone,
        flops=flops,
        model_flops=model_flops(view.layout),
        bytes_per_axis=traffic,
        memory_bytes=peak,
        activation_bytes=peak - state,
        state_bytes=state,
    )


def _price_pipeline(layout: Layout, cluster: ClusterSpec) -> StepPrediction:
    """Return the price of a strategy with a pipeline, whose memory is the peak of the expanded steps."""
    views = layout.stage_views()
    terms_of = [terms(view) for view in views]
    pipeline = price_pipeline(views, terms_of, cluster)
    steps = [expand(view, own) for view, own in zip(views, terms_of, strict=True)]
    busiest = max(range(len(views)), key=lambda place: pipeline.priced.work[place])
    fullest = max(steps, key=lambda step: step.peak_bytes)
    actions = zip(pipeline.priced.schedule.actions[busiest], pipeline.priced.times[busiest], strict=True)
    forward = sum(stop - start for action, (start, stop) in actions if action.kind == "F")
    return StepPrediction(
        step_time_s=pipeline.step_time_s,
        forward_s=forward,
        backward_s=pipeline.priced.work[busiest] - forward,
        optimizer_s=max(pipeline.optimizer_s),
        communication_s=max(pipeline.communication_s),
        exposed_communication_s=max(pipeline.exposed_s),
        flops=sum(e.flops for step in steps for e in step.events) // len(steps),
        model_flops=model_flops(layout),
        bytes_per_axis=steps[0].bytes_per_axis(),
        memory_bytes=fullest.peak_bytes,
        activation_bytes=fullest.peak_bytes - fullest.state.total,
        state_bytes=fullest.state.total,
        bubble_fraction=pipeline.priced.bubble_fraction,
    )


def model_flops(layout: Layout) -> int:
    """Return StepPrediction.model_flops: the analytic engine's numerator of MFU over the number of ranks, in which
    nothing is recomputed, padded or computed on several ranks."""
    s, job = layout.strategy, layout.job
    columns = ledger_layout(s, job, layout.model.layers)
    return int(ledger_flops(shape(layout.model), columns) / s.world)


def _ring_seconds(
    view: RankView, cluster: ClusterSpec, term: Term, step_terms: Sequence[Term]
) -> tuple[float, float]:
    """Return the seconds of a ring's messages (keys and values, or their gradients), and their exposed seconds.

    A hop overlaps attention over the block received before. Of the R + 1 equal parts of attention in a ring of R
    ranks, two are over the rank's own block; each of the others overlaps a hop. Receives overlap sends and cost 0."""
    if term.event.op == "recv":
        return 0.0, 0.0
    seconds = message_seconds(view, term, cluster)
    if not cluster.device.own_communication_engine:
        return seconds, seconds
    event, rates, ring = term.event, rates_of(view.layout, cluster), view.strategy.ring
    computes = (t for t in step_terms if t.event.kind == "compute")
    pass_ = next(t for t in computes if (t.event.unit, t.event.phase) == (event.unit, event.phase))
    recomputed = pass_.recomputed.attention_flops
    forward = (pass_.work.attention_flops if event.phase == "F" else recomputed) * rates.forward.per_attention_flop
    backward = (pass_.work.attention_flops - recomputed) * (event.phase == "B") * rates.backward.per_attention_flop
    overlapping = (forward + backward) * rates.pass_slowdown * (ring - 1) / (ring + 1)
    # The gradients' last hop overlaps nothing.
    hops = term.count / pass_.count
    last = seconds / hops if event.phase == "B" else 0.0
    return seconds, max(seconds - last - overlapping, 0.0) + last


def _peak(view: RankView, step_terms: Sequence[Term]) -> int:
    """Return the peak of live bytes above the state, for a rank with the entire model.

    Blocks of a class have equal passes, so live bytes grow from block to block in the forward pass and fall in the
    backward pass. The peak is therefore at the last block of some class or, if that block frees masks between
    documents, at the block before it."""
    masks = documents(view.stage, view.job, view.tokens, view.context)  # bytes by block
    t = {(term.event.phase, term.event.unit): term for term in step_terms if term.event.kind == "compute"}
    classes = {name: members for name, members in view.unit_classes.items() if name.startswith("blocks")}
    first, last = t["F", "embed"], t["F", "head"]
    base = first.alloc - first.free

    def before(index: int) -> int:
        """Return live bytes when the forward pass of block `index` begins."""
        counts = [
            (t["F", name], sum(int(u.split(".")[1]) < index for u in members)) for name, members in classes.items()
        ]
        return base + sum(n * (term.alloc - term.free) for term, n in counts)

    # Through the forward pass to the head and back.
    peak = first.alloc
    end = before(view.model.layers)
    peak = max(peak, end + last.alloc)
    live = end + last.alloc - last.free
    backward = t["B", "head"]
    peak = max(peak, live + backward.alloc)
    live = live + backward.alloc - backward.free
    # The last block of each class, and the one before it if that frees masks.
    for name, members in classes.items():
        f, b = t["F", name], t["B", name]
        for unit in reversed(members):
            at = int(unit.split(".")[1])
            freed = end - before(at + 1) + sum(size for block, size in masks.items() if block > at)
            peak = max(peak, before(at) + f.alloc)
            peak = max(peak, live - freed + b.peak(masks.get(at, 0)))
            if at not in masks:
                break
    # The embedding, and the update.
    backward = t["B", "embed"]
    peak = max(peak, live - (end - base) - backward.before + backward.alloc)
    return max(peak, t["opt", ""].alloc)
