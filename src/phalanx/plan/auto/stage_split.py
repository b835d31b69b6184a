"""Which blocks lie in which chunk of a pipeline: `layers = auto`, resolved on a cluster.

Every unit's seconds are those of its forward and backward pass there, its bytes on a rank those of its parameters'
state and of what it keeps of the micro-batches that the rank holds at once; the partition (schedule/partition.py) is
the one whose slowest rank is fastest among those that fit.
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
from phalanx.schedule.pipeline.schedules import held
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, StageSpec, units
from phalanx.spec.strategy.spec import Strategy


def resolve(model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> tuple[Strategy, str]:
    """The strategy with `layers = auto` as blocks of each chunk, and why; as it is, and "", where they were given or
    there is no pipeline. Raises InputError where no partition fits."""
    if s.pp == 1 or s.layers != "auto":
        return s, ""
    seconds, limits = costs(model, cluster, job, s)
    try:
        found = partition(seconds, stages.rank_of(s), limits)
    except InputError:  # what it needs is said by the price of the strategy
        found = partition(seconds, stages.rank_of(s))
    best = "" if found.optimal else f"; no partition is faster by more than {found.slowest / found.bound - 1:.1%}"
    reason = f"the slowest rank computes {found.slowest * 1e3:.3g} ms per micro-batch{best}"
    return replace(s, layers="/".join(map(str, found.blocks))), reason


def explained(model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy, reason: str) -> dict[str, Any] | None:
    """What each chunk of a pipeline holds and costs for a micro-batch, and why it is cut so; None without one."""
    if s.pp == 1:
        return None
    seconds, limits = costs(model, cluster, job, s)
    found = explain(seconds, stages.rank_of(s), stages.blocks_of(model, s), limits)
    return {"reason": reason, "imbalance": found.imbalance, "chunks": [asdict(chunk) for chunk in found.chunks]}


def costs(model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> tuple[Units, Limits]:
    """Seconds of every unit's passes for a micro-batch, and its bytes on every pipeline rank."""
    passes: dict[str, float] = {}
    kept: dict[str, float] = {}
    for place in range(s.pp):
        passes |= unit_seconds(model, cluster, job, s, place)
        for t in terms(model, job, s, place=place):
            if t.event.op == "forward":
                kept[t.event.unit] = float(t.alloc - t.free)
    actions = stages.schedule(s, s.accumulation(job)).actions
    # The live activations of a rank are of any of its chunks.
    live = [max(held(own)) / len(stages.held_chunks(s, place)) for place, own in enumerate(actions)]
    names = units(model)
    state = {kind: _state(model, job, s, unit) for kind, unit in {unit_class(model, s, u): u for u in names}.items()}
    fixed = model_state(StageSpec.of(model, (("blocks.0",),)), job, s)
    most = [float(cluster.device.usable_bytes - fixed.tables - fixed.batch)] * s.pp
    by_rank = tuple(
        _units([state[unit_class(model, s, u)] + n * kept[unit_class(model, s, u)] for u in names]) for n in live
    )
    return _units([passes[unit_class(model, s, u)] for u in names]), Limits(by_rank, tuple(most))


def _state(model: ModelSpec, job: Job, s: Strategy, unit: str) -> float:
    found = model_state(StageSpec.of(model, ((unit,),)), job, s)
    return float(found.total - found.tables - found.batch)


def _units(each: list[float]) -> Units:
    first, *blocks, last = each
    return Units(first, tuple(blocks), last)
