"""The size of a gradient bucket: `bucket = auto`, resolved on a cluster.

A reduction of b bytes takes α + β b. G bytes of gradients in buckets of b bytes take

    G/b α     latency of all G/b buckets
    G β       on the links, whatever b is; overlapped with the backward pass, except for the last bucket
    b β       for the last bucket, which fills when the backward pass ends: it is exposed

The part that depends on b is T(b) = G α/b + b β. T' = 0 at b = sqrt(G α/β) = sqrt(G n*), where n* = α/β is the
crossover: the size that spends as long on latency as on the links. sqrt(G n*) lies between n* and G; with fewer
gradients than n*, one bucket holds them all.

α and β belong to the collective. For a measured one they are its fitted line. A ring of p ranks sends p - 1 messages
of n/p bytes in each pass, so α = passes (p-1) α_link, β = passes (p-1)/p β_link and n* = p α_link/β_link: the larger
the group, the larger the bucket.

That holds for devices that communicate while they compute. Where the computing cores also move the messages, all
communication is exposed wherever it happens, and only latency can be saved: one bucket for everything, or 25 MiB
(never less than n*) where that bounds the memory of gradients in flight. Measured on 2 cores over Gloo, 4 ranks, 29.7
MB of gradients: buckets of 1, 4, 25 and 100 MiB ran at 0.83, 0.96, 1.00 and 0.97 of DistributedDataParallel.
"""

import math
from dataclasses import dataclass, replace

from phalanx.cost.collectives.link import ring_link
from phalanx.cost.collectives.measured import measured_fits, ring_seconds
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layout import Layout
from phalanx.spec.byte_sizes import write_bytes
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import Mesh
from phalanx.spec.strategy.spec import DEFAULT_BUCKET_MIB, Strategy

USER_CHOICE = "given"  # the recorded reason for a user's bucket
_LEAST_BYTES = 2**16  # bytes: the host's time per bucket is in no link's α


@dataclass(frozen=True)
class CollectiveTime:
    """The time of a collective of n bytes over a group, α + β n seconds."""

    alpha_s: float
    beta_s_per_byte: float
    way: str
    """The measured transport and algorithm, or a description of the ring."""

    @property
    def crossover_bytes(self) -> float:
        """n* = α/β."""
        return self.alpha_s / self.beta_s_per_byte if self.beta_s_per_byte else math.inf


def best_bytes(gradient_bytes: float, crossover_bytes: float) -> float:
    """Return b = sqrt(G n*) in bytes, at least `_LEAST_BYTES` and at most G = `gradient_bytes`."""
    return min(max(math.sqrt(gradient_bytes * crossover_bytes), _LEAST_BYTES), gradient_bytes)


def has_buckets(strategy: Strategy) -> bool:
    """Whether `bucket` has an effect: gradients are reduced, but not unit by unit as in ZeRO-3."""
    return strategy.gradient_ranks > 1 and not sharding_of(strategy).parameters


def resolve(model: ModelSpec, cluster: ClusterSpec, job: Job, strategy: Strategy) -> tuple[Strategy, str]:
    """Replace `bucket = auto` by a size in MiB with two digits; return the strategy and the reason, or the strategy
    unchanged and "" if the bucket is set or has no effect."""
    if strategy.bucket != "auto" or not has_buckets(strategy):
        return strategy, ""
    view = Layout(model, job, strategy).stage_view(0)  # the first of a pipeline; the others hold about as much
    grid = view.mesh
    op, axis = ("reduce_scatter", grid.shard_axis) if strategy.shards > 1 else ("all_reduce", grid.gradient_axis)
    total = view.local.parameter_count * DTYPE_BYTES[job.precision.reduce_dtype]
    line = _line(cluster, grid, op, axis, total)
    overlaps = cluster.device.own_communication_engine
    default = DEFAULT_BUCKET_MIB * 2**20
    best = best_bytes(total, line.crossover_bytes) if overlaps else min(total, max(default, line.crossover_bytes))
    crossover = write_bytes(line.crossover_bytes) if line.beta_s_per_byte else "without bound"
    if best == total:
        why = "all at once"
    elif not overlaps:
        why = "no smaller: this device hides none of them"
    else:
        why = f"no less than {write_bytes(_LEAST_BYTES)}" if best == _LEAST_BYTES else "sqrt(G n*)"
    if strategy.compressor is not None:
        why += ", as without compression"
    reason = f"G = {write_bytes(total)} of gradients by {op} over {line.way}, n* = {crossover}; {why}"
    return replace(strategy, bucket=_two_digits_up(best / 2**20)), reason


def _two_digits_up(x: float) -> float:
    """Round up to two digits, 2.81 -> 2.9: rounded down, gradients meant for one bucket would need two."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    return float(f"{math.ceil(x / unit * (1 - 1e-12)) * unit:.2g}")


def _line(cluster: ClusterSpec, grid: Mesh, op: str, axis: str, total: float) -> CollectiveTime:
    """Return the α and β of the measured transport and algorithm that is fastest for `total` bytes in its best
    buckets; of a ring if the collective was not measured."""
    ranks = grid.size(axis)
    if fits := measured_fits(cluster, grid, op, axis):
        lines = [CollectiveTime(fit.alpha_s, fit.beta_s_per_byte, fit.way) for fit in fits]
        sizes = [best_bytes(total, line.crossover_bytes) for line in lines]
        times = [total / size * float(fit.seconds(size)) for fit, size in zip(fits, sizes, strict=True)]
        return lines[times.index(min(times))]
    over = ring_link(cluster, grid, axis)
    alpha, beta = ring_seconds(op, ranks, 1, 0, over), ring_seconds(op, ranks, 0, 1, over)
    return CollectiveTime(float(alpha), float(beta), f"a ring of {ranks} on {grid.tier(axis, cluster).name}")
