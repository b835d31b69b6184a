"""Number of blocks in each chunk of a pipeline: `layers = auto`, resolved on a cluster.

A unit costs the seconds of its forward and backward pass on the cluster, and on a rank the bytes of its model state
and of the activations it keeps for the micro-batches that are live at once. Of all partitions that fit
(schedule/partition/balance.py), the one with the fastest slowest rank is chosen.
"""

from dataclasses import asdict, replace
from typing import Any

from phalanx.cost.memory.state import model_state
from phalanx.cost.step.pass_terms import pass_terms
from phalanx.cost.step.predict_pipeline import unit_seconds
from phalanx.schedule.layout import Layout, RankView, unit_class
from phalanx.schedule.partition.balance import MemoryLimits, Units, explain, partition
from phalanx.schedule.pipeline.actions import live_activations
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, blocks_among, units
from phalanx.spec.strategy.spec import Strategy


def resolve(model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy) -> tuple[Strategy, str]:
    """Replace `layers = auto` by the number of blocks of each chunk; return the strategy and the reason, or the
    strategy unchanged and "" if the blocks are set or there is no pipeline. If no partition fits, memory is ignored:
    the price of the strategy then reports the shortage."""
    if s.pp == 1 or s.layers != "auto":
        return s, ""
    layout = Layout(model, job, s)
    seconds, limits = costs(layout, cluster)
    try:
        split = partition(seconds, layout.rank_of, limits)
    except InputError:  # nothing fits: the strategy's price reports what it needs
        split = partition(seconds, layout.rank_of)
    best = "" if split.optimal else f"; no partition is faster by more than {split.slowest / split.bound - 1:.1%}"
    reason = f"the slowest rank computes {split.slowest * 1e3:.3g} ms per micro-batch{best}"
    return replace(s, layers="/".join(map(str, split.blocks))), reason


def explanation(model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy, reason: str) -> dict[str, Any] | None:
    """Return the blocks and cost of each chunk for a micro-batch, with the reason; None without a pipeline."""
    if s.pp == 1:
        return None
    layout = Layout(model, job, s)
    seconds, limits = costs(layout, cluster)
    blocks = tuple(len(blocks_among(units)) for units in layout.chunks)
    shares = explain(seconds, layout.rank_of, blocks, limits)
    return {"reason": reason, "imbalance": shares.imbalance, "chunks": [asdict(chunk) for chunk in shares.chunks]}


def costs(layout: Layout, cluster: ClusterSpec) -> tuple[Units, MemoryLimits]:
    """Return every unit's seconds for a micro-batch, and its bytes and the limit on every pipeline rank."""
    passes: dict[str, float] = {}
    activations: dict[str, float] = {}
    live = []
    for view in layout.stage_views():
        passes |= unit_seconds(view, cluster)
        for t in pass_terms(view):
            if t.event.op == "forward":
                activations[t.event.unit] = float(t.alloc - t.free)
        # Live activations are counted over all chunks of a rank; a unit is charged for the mean chunk.
        live.append(max(live_activations(view.actions)) / len(view.chunks))
    classes = [unit_class(layout.model, layout.strategy, unit) for unit in units(layout.model)]
    members = dict(zip(classes, units(layout.model), strict=True))  # one unit of each class
    state = {name: _state(layout, unit) for name, unit in members.items()}
    fixed = model_state(RankView(layout, units=(("blocks.0",),)))
    usable = [float(cluster.device.usable_bytes - fixed.tables - fixed.batch)] * layout.strategy.pp
    by_rank = tuple(_units([state[name] + n * activations[name] for name in classes]) for n in live)
    return _units([passes[name] for name in classes]), MemoryLimits(by_rank, tuple(usable))


def _state(layout: Layout, unit: str) -> float:
    """Return the bytes of a unit's model state on one rank."""
    state = model_state(RankView(layout, units=((unit,),)))
    return float(state.total - state.tables - state.batch)


def _units(each: list[float]) -> Units:
    """Split the values of all units into the first unit's, the blocks' and the last unit's."""
    first, *blocks, last = each
    return Units(first, tuple(blocks), last)
