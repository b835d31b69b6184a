"""Why a part of a step takes longer than planned: what in a trace gives it away, and what to do about it.

A rule reads the evidence about a part and returns its reason, or None; the first rule that applies names the cause. A
part that is too long and that no rule explains is named after itself. Some causes lengthen several parts at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.answers.diagnose.planned_parts import PlannedAxis
from phalanx.spec.strategy.mesh import Mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.traces.breakdown import COMPUTING, Breakdown

LARGE = 0.02
"""Share of the step from which a gap is a finding."""
_EXCESS, _SLOWER = 1.5, 1.25
"""Ratios to the plan from which there is a cause: of the numbers of collectives, kernels or cores of attention, and
of the seconds of a transfer."""
_UNEVEN = 0.05
"""Share by which ranks may differ."""
_COMPUTING = (*COMPUTING, "computing")
_INSIDE = ("tp", "cp", "ep")
_REPEATED = (*(f"over {axis}" for axis in _INSIDE), "launches")


@dataclass(frozen=True)
class Evidence:
    """What is known of a run: its measured step and the planned one."""

    strategy: Strategy
    grid: Mesh
    ranks_per_node: int
    own: Breakdown
    """Of the rank whose step is compared."""
    ranks: Sequence[Breakdown]
    """Every rank whose trace was given."""
    gaps: Mapping[str, float]
    """Measured less planned seconds, by part."""
    planned: Mapping[str, float]
    axes: Mapping[str, PlannedAxis]
    spread_out: frozenset[str]
    """Axes with groups on several nodes, where the trace names their ranks."""
    fp32_share: float
    """Share of the products' seconds in fp32, of a run in 16 bits or less."""

    @property
    def computing_gap_s(self) -> float:
        """Seconds by which the rank computes longer than planned."""
        return sum(self.gaps.get(part, 0.0) for part in _COMPUTING)


@dataclass(frozen=True)
class Cause:
    """Why a part takes longer, and what to do about it; `seconds`: how much of the step it explains."""

    name: str
    seconds: float
    why: str
    remedy: str


Reason = tuple[str, str, str]
"""Why one part is long: (name of the cause, why, remedy)."""


def causes(e: Evidence) -> list[Cause]:
    """Return a cause for every part that is too long, the largest first."""
    named: list[Cause] = []
    explained: frozenset[str] = frozenset()
    for whole in (_recomputation, _unbalanced_stages, _slow_stage):
        cause = whole(e)
        if cause is not None and cause.seconds >= LARGE * e.own.step_s:
            named.append(cause)
            explained = frozenset((*_COMPUTING, *_REPEATED))
            break
    for part, gap in e.gaps.items():
        if gap < LARGE * e.own.step_s or part in explained:
            continue
        rules = (*_RULES.get("over" if part.startswith("over ") else part, ()), _unknown_reason)
        name, why, remedy = next(reason for rule in rules if (reason := rule(e, part)) is not None)
        named.append(Cause(name, gap, why, remedy))
    return sorted(named, key=lambda cause: -cause.seconds)


# Causes of several parts.


def _recomputation(e: Evidence) -> Cause | None:
    """Blame recomputation: more cores of attention forward than backward, or a backward pass longer by a forward."""
    planned = e.strategy.recompute
    forward, backward = e.own.counts.get("forward attention", 0.0), e.own.counts.get("backward attention", 0.0)
    once = e.own.parts.get("forward", 0.0)
    remedy = f"the plan has recompute={planned}: set the same in the run, if its memory allows"
    if planned == "none" and backward and forward / backward > _EXCESS:
        why = f"attention's core runs {forward:.0f} times forward and {backward:.0f} times backward in a step"
        longer = sum(max(e.gaps.get(part, 0.0), 0.0) for part in (*_COMPUTING, *_REPEATED))
        return Cause("recomputation", longer, why, remedy)
    if planned != "full" and once and e.planned.get("forward"):
        slower = once / e.planned["forward"]  # a device that is slower throughout recomputes nothing
        longer = e.own.parts.get("backward", 0.0) - slower * e.planned.get("backward", 0.0)
        if 0.6 < longer / once < 1.4:
            why = f"the backward pass is longer than planned by about a forward pass, {once:.3g} s"
            return Cause("recomputation", longer, why, remedy)
    return None


def _stages(e: Evidence) -> dict[int, list[Breakdown]]:
    """Return the ranks by pipeline stage; {} where these are not known."""
    if e.strategy.pp == 1 or any(b.rank is None or b.rank >= e.grid.world for b in e.ranks):
        return {}
    stages: dict[int, list[Breakdown]] = {}
    for b in e.ranks:
        stages.setdefault(e.grid.place(b.rank or 0)["pp"], []).append(b)
    return stages if len(stages) > 1 else {}


def _kernels(b: Breakdown) -> float:
    return sum(b.counts.get(kind, 0.0) for kind in ("products", "experts", "attention", "forward"))


def _unbalanced_stages(e: Evidence) -> Cause | None:
    """Blame a stage that computes longer than the mean because it has more to compute."""
    stages = _stages(e)
    if not stages:
        return None
    times = {stage: float(np.median([b.computing_s for b in of])) for stage, of in stages.items()}
    work = {stage: float(np.median([_kernels(b) for b in of])) for stage, of in stages.items()}
    most, mean = max(times, key=lambda stage: times[stage]), float(np.mean(list(times.values())))
    if times[most] < (1 + _UNEVEN) * mean or work[most] < (1 + _UNEVEN) * float(np.mean(list(work.values()))):
        return None
    why = f"stage {most} computes {times[most]:.3g} s, the mean of {len(times)} stages is {mean:.3g} s"
    remedy = "move blocks to other stages: `phalanx plan` lists them as layers=..."
    return Cause("unbalanced stages", e.computing_gap_s, why, remedy)


def _slow_stage(e: Evidence) -> Cause | None:
    """Blame the compared rank if it is slower than ranks with as much to compute."""
    stages = _stages(e)
    alike = [b for b in e.ranks if abs(_kernels(b) - _kernels(e.own)) <= _UNEVEN * _kernels(e.own)]
    others = [b.computing_s for b in alike if b.rank != e.own.rank]
    if not stages or not others or e.own.computing_s < (1 + _UNEVEN) * float(np.median(others)):
        return None
    return Cause("slow rank", e.computing_gap_s, _slow_words(e.own, float(np.median(others))), _SLOW)


_SLOW = "look at its clocks, temperature and neighbours (nvidia-smi -q -d PERFORMANCE), or exclude its node"


def _slow_words(b: Breakdown, usual: float) -> str:
    return f"rank {b.rank} computes {b.computing_s:.3g} s in a step, the others {usual:.3g} s with as many kernels"


# Causes of one part.


def _slowest(e: Evidence) -> tuple[Breakdown, list[Breakdown]] | None:
    """Return the rank that computes longest and the others, if it stands out."""
    if len(e.ranks) < 2:
        return None
    slow, *others = sorted(e.ranks, key=lambda b: -b.computing_s)
    usual = float(np.median([b.computing_s for b in others]))
    return (slow, others) if slow.computing_s - usual > LARGE / 2 * e.own.step_s else None


def _imbalanced_experts(e: Evidence, part: str) -> Reason | None:
    """Blame experts whose products take longer on one rank, while all else takes as long as on the others."""
    slowest = _slowest(e) if e.strategy.ep > 1 else None
    if slowest is None:
        return None
    slow, others = slowest

    def of_experts(b: Breakdown) -> float:
        return b.parts.get("experts", b.parts.get("products", 0.0))

    def longer(seconds: Callable[[Breakdown], float]) -> float:
        return seconds(slow) / max(float(np.median([seconds(b) for b in others])), 1e-12) - 1

    if longer(lambda b: b.computing_s - of_experts(b)) > 0.3 * longer(of_experts):
        return None
    mean = float(np.mean([of_experts(b) for b in e.ranks]))
    why = f"rank {slow.rank}'s experts take {of_experts(slow):.3g} s in a step, the mean of the ranks {mean:.3g} s"
    return "imbalanced experts", why, "a larger balancing loss or bias update, or a capacity factor"


def _slow_rank(e: Evidence, part: str) -> Reason | None:
    slowest = _slowest(e)
    if slowest is None:
        return None
    slow, others = slowest
    usual = float(np.median([b.computing_s for b in others]))
    return "slow rank", _slow_words(slow, usual), _SLOW


def _late_rank(e: Evidence, part: str) -> Reason | None:
    """Blame the rank that computes as long as the others but is idle longest, so that they wait for it."""
    if len(e.ranks) < 2:
        return None
    idle = {
        b.rank: {k: b.parts.get(k, 0.0) for k in ("loading", "checkpoint", "host", "launches", "copy")}
        for b in e.ranks
    }
    late = max(idle, key=lambda rank: sum(idle[rank].values()))
    what = max(idle[late], key=lambda k: idle[late][k])
    why = f"rank {late} comes last: {idle[late][what]:.3g} s of its step are {_IDLE_WORDS[what]}"
    name = {"loading": "slow data loading", "checkpoint": "saving of checkpoints"}.get(what, "slow rank")
    return name, why, _REMEDIES.get(what, _SLOW)


_IDLE_WORDS = {
    "loading": "data loading",
    "checkpoint": "saving",
    "host": "the host's",
    "launches": "gaps between kernels",
    "copy": "copies from and to the host",
}


def _single_precision(e: Evidence, part: str) -> Reason | None:
    if e.fp32_share < 0.2:
        return None
    why = f"{e.fp32_share:.0%} of the products' time is in fp32"
    return "products in fp32", why, "run them under autocast, or in the plan's precision"


def _many_launches(e: Evidence, part: str) -> Reason | None:
    kernels = sum(e.own.counts.get(k, 0.0) for k in COMPUTING)
    why = f"the device waits for the CPU between {kernels:,.0f} kernels of a step"
    return "too many launches", why, "compile or fuse the blocks, capture CUDA graphs, or take a larger micro-batch"


def _across_nodes(e: Evidence, part: str) -> Reason | None:
    axis = part.removeprefix("over ")
    if axis not in e.spread_out or axis not in _INSIDE or not e.grid.within(axis, e.ranks_per_node):
        return None
    why = f"its groups span nodes of {e.ranks_per_node} ranks, and the plan keeps them inside one"
    return f"{axis} across nodes", why, f"number the ranks so that {axis} is innermost"


def _small_buckets(e: Evidence, part: str) -> Reason | None:
    axis = part.removeprefix("over ")
    use, planned = e.own.axes.get(axis), e.axes.get(axis, PlannedAxis())
    if axis != "dp" or use is None or use.calls < max(2 * planned.calls, planned.calls + 4):
        return None
    size = f" of {use.bytes / use.calls / 2**20:.2g} MiB" if use.bytes else ""
    why = f"{use.calls:.0f} collectives{size} in a step, {planned.calls:.0f} planned"
    return "small buckets", why, "larger buckets (DDP's bucket_cap_mb, Megatron's --ddp-bucket-size)"


def _no_overlap(e: Evidence, part: str) -> Reason | None:
    axis = part.removeprefix("over ")
    use, alone = e.own.axes.get(axis), e.axes.get(axis, PlannedAxis()).alone_s
    if use is None or axis != "dp" or not use.moving_s:
        return None
    shown, planned = e.own.parts.get(part, 0.0) / use.moving_s, e.planned.get(part, 0.0) / alone if alone else 1.0
    if shown < 0.8 or planned > 0.7 or use.moving_s > _SLOWER * alone:
        return None
    why = f"{shown:.0%} of {use.moving_s:.3g} s is exposed, {planned:.0%} planned"
    return "no overlap", why, "overlap the reduction with the backward pass (--overlap-grad-reduce, FSDP's prefetch)"


def _slow_link(e: Evidence, part: str) -> Reason | None:
    axis = part.removeprefix("over ")
    use, planned = e.own.axes.get(axis), e.axes.get(axis, PlannedAxis())
    if use is None or not planned.alone_s or use.moving_s < _SLOWER * planned.alone_s:
        return None
    if use.calls > _EXCESS * planned.calls + 1 or (use.bytes and use.bytes > _SLOWER * planned.bytes):
        return None
    why = f"its collectives take {use.moving_s:.3g} s, {planned.alone_s:.3g} s planned for the same bytes"
    remedy = "run nccl-tests on these nodes; look at NCCL_DEBUG=INFO for sockets, at the ports' rates and errors"
    return f"slow link under {axis}", why, remedy


def _more_bytes(e: Evidence, part: str) -> Reason | None:
    axis = part.removeprefix("over ")
    use, planned = e.own.axes.get(axis), e.axes.get(axis, PlannedAxis())
    if use is None or not planned.bytes or use.bytes < _SLOWER * planned.bytes:
        return None
    why = f"{use.bytes / 2**20:,.0f} MiB in a step, {planned.bytes / 2**20:,.0f} planned"
    return f"more bytes over {axis}", why, "compare the run's sharding, and the type that gradients are reduced in"


def _unknown_reason(e: Evidence, part: str) -> Reason:
    name, why, remedy = _UNEXPLAINED.get(part, ("", "", ""))
    if not name:
        alone = "" if len(e.ranks) > 1 else "; the traces of other ranks would tell waiting from moving"
        name, why = f"communication {part}", f"exposed for longer than planned{alone}"
        remedy = "more overlap, fewer bytes, or a smaller degree of the axis"
    return name, why, remedy


_CLOCKS = "compare clocks under load and power limits, sizes that are no multiple of 8, and kernels' names"
_REMEDIES = {
    "loading": "more loader workers, prefetching, or tokens prepared ahead",
    "checkpoint": "save asynchronously, or less often",
    "copy": "pin the host's memory, copy without blocking, and do not read tensors on the host",
    "host": "look for .item(), print, logging and garbage collection between kernels",
}
_UNEXPLAINED = {
    "products": ("slow products", "they take longer than planned", _CLOCKS),
    "experts": ("slow products", "the experts' take longer than planned", _CLOCKS),
    "attention": ("slow attention", "its core takes longer than planned", "is it the flash kernel of the plan?"),
    "memory": ("memory-bound kernels", "they take longer than planned", "fuse norms, activations and casts"),
    "optimizer": ("slow optimizer", "its step takes longer than planned", "fuse it; shard its state"),
    "loading": ("slow data loading", "nothing runs while the next batch is read", _REMEDIES["loading"]),
    "checkpoint": ("saving of checkpoints", "nothing runs while one is written", _REMEDIES["checkpoint"]),
    "allocation": ("allocator", "cudaMalloc and cudaFree within the step", "expandable_segments, or less memory"),
    "copy": ("copies to the host", "nothing hides them", _REMEDIES["copy"]),
    "host": ("host", "nothing runs, half a millisecond or more at a time", _REMEDIES["host"]),
    "pipeline": ("waiting in the pipeline", "longer than the schedule's bubble", "more micro-batches or chunks"),
    "stragglers": ("stragglers", "collectives wait for their last rank", _SLOW),
    "forward": ("slow forward passes", "they take longer than planned", _CLOCKS),
    "backward": ("slow backward passes", "they take longer than planned", _CLOCKS),
    "computing": ("slow computing", "it takes longer than planned", _CLOCKS),
}  # fmt: skip
_RULES: dict[str, tuple[Callable[[Evidence, str], Reason | None], ...]] = {
    "products": (_single_precision,),
    "computing": (_single_precision,),
    "launches": (_many_launches,),
    "over": (_across_nodes, _small_buckets, _no_overlap, _slow_link, _more_bytes),
    "stragglers": (_imbalanced_experts, _slow_rank, _late_rank),
}
