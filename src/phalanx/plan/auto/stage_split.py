"""How many blocks each chunk of a pipeline holds: `layers = auto`, resolved on a cluster.

A unit costs the seconds of its forward and backward pass on the cluster, and on a rank the bytes of its model state
and of the activations it keeps for the micro-batches that are live at once. Of all partitions that fit
(schedule/partition/balance.py), the one with the fastest slowest rank is chosen.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from phalanx.cost.memory.state import model_state
from phalanx.cost.step.predict_pipeline import unit_seconds
from phalanx.cost.step.term import unit_class
from phalanx.cost.step.terms import terms
from phalanx.schedule.partition.balance import Limits, Units, explain, partition
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.schedules import live_activations
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, StageSpec, units
from phalanx.spec.strategy.spec import Strategy


def resolve(model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> tuple[Strategy, str]:
    """Replace `layers = auto` by the number of blocks of each chunk; return the strategy and the reason.

    Returns the strategy unchanged and "" if the blocks are set or there is no pipeline. If no partition fits, memory
    is ignored: the price of the strategy then says what it lacks."""
    if s.pp == 1 or s.layers != "auto":
        return s, ""
    seconds, limits = costs(model, cluster, job, s)
    try:
        split = partition(seconds, stages.rank_of(s), limits)
    except InputError:  # nothing fits: the strategy's price says what it needs
        split = partition(seconds, stages.rank_of(s))
    best = "" if split.optimal else f"; no partition is faster by more than {split.slowest / split.bound - 1:.1%}"
    reason = f"the slowest rank computes {split.slowest * 1e3:.3g} ms per micro-batch{best}"
    return replace(s, layers="/".join(map(str, split.blocks))), reason


def explained(model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy, reason: str) -> dict[str, Any] | None:
    """Return what each chunk holds and costs for a micro-batch, with the reason; None without a pipeline."""
    if s.pp == 1:
        return None
    seconds, limits = costs(model, cluster, job, s)
    shares = explain(seconds, stages.rank_of(s), stages.blocks_of(model, s), limits)
    return {"reason": reason, "imbalance": shares.imbalance, "chunks": [asdict(chunk) for chunk in shares.chunks]}


def costs(model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> tuple[Units, Limits]:
    """Return every unit's seconds for a micro-batch, and its bytes and the limit on every pipeline rank."""
    passes: dict[str, float] = {}
    activations: dict[str, float] = {}
    for place in range(s.pp):
        passes |= unit_seconds(model, cluster, job, s, place)
        for t in terms(model, job, s, place=place):
            if t.event.op == "forward":
                activations[t.event.unit] = float(t.alloc - t.free)
    actions = stages.schedule(s, s.accumulation(job)).actions
    # Live activations are counted over all chunks of a rank; a unit is charged for the mean chunk.
    live = [max(live_activations(own)) / len(stages.held_chunks(s, place)) for place, own in enumerate(actions)]
    names = units(model)
    state = {kind: _state(model, job, s, unit) for kind, unit in {unit_class(model, s, u): u for u in names}.items()}
    fixed = model_state(StageSpec.of(model, (("blocks.0",),)), job, s)
    usable = [float(cluster.device.usable_bytes - fixed.tables - fixed.batch)] * s.pp
    by_rank = tuple(
        _units([state[unit_class(model, s, u)] + n * activations[unit_class(model, s, u)] for u in names])
        for n in live
    )
    return _units([passes[unit_class(model, s, u)] for u in names]), Limits(by_rank, tuple(usable))


def _state(model: ModelSpec, job: Job, s: Strategy, unit: str) -> float:
    state = model_state(StageSpec.of(model, ((unit,),)), job, s)
    return float(state.total - state.tables - state.batch)


def _units(each: list[float]) -> Units:
    first, *blocks, last = each
    return Units(first, tuple(blocks), last)
