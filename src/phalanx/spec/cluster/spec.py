"""The cluster: devices, tiers of links between them, and what was measured of both.

Units stand in the field names and are never scaled: bytes, seconds, FLOP/s. Vendors' headline figures are often
for both directions of a link, or count sparsity; these are per direction and dense. Every part says where its
numbers come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from phalanx.spec.cluster.collective_choice import Transport
from phalanx.spec.errors import InputError
from phalanx.spec.job import DType

Origin = Literal["measured", "published", "estimated"]
GIB = 2**30
TRUSTED = 0.2
"""The median relative error up to which a fit is to be trusted."""
Column = Any  # a number, or a NumPy column of them


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU rank). `usable_bytes` is what "fits" is judged against."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    usable_bytes: int
    memory_bandwidth_bytes_per_s: float
    dense_flops_per_s: dict[DType, float]
    own_communication_engine: bool
    """Whether transfers run beside compute (DMA, NICs) or take the same cores, as on a CPU."""
    origin: Origin
    source: str
    gamma_s_per_byte: float | None = None
    """Of adding what has arrived; None: two reads and a write at the memory's bandwidth."""


@dataclass(frozen=True)
class Tier:
    """Links that join `ranks` neighbouring ranks: α and the rate of one rank, in one direction."""

    name: str
    ranks: int
    latency_s: float
    bandwidth_bytes_per_s_per_gpu_per_direction: float
    origin: Origin
    source: str
    uplink_bandwidth_bytes_per_s_per_direction: float | None = None
    """What all ranks below this tier, those of a host, share towards it. None: every rank has a link of its own."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.latency_s < 0 or self.bandwidth_bytes_per_s_per_gpu_per_direction <= 0:
            raise InputError(
                f"cluster.tiers.{self.name}", None, "needs ranks >= 1, latency >= 0 and a positive bandwidth"
            )
        uplink = self.uplink_bandwidth_bytes_per_s_per_direction
        if uplink is not None and uplink <= 0:
            name = f"cluster.tiers.{self.name}.uplink_bandwidth_bytes_per_s_per_direction"
            raise InputError(name, uplink, "must be positive", "leave it out where every rank has a link of its own")


@dataclass(frozen=True)
class Rates:
    """Seconds per unit of each kind of work, for one phase (cost/kernel.py says what the kinds count)."""

    per_gemm_flop: float
    per_attention_flop: float
    per_byte: float
    per_kernel: float


@dataclass(frozen=True)
class KernelRates:
    """What one rank computes while `concurrent` ranks of its host do the same."""

    dtype: DType
    concurrent: int
    threads: int
    forward: Rates
    backward: Rates
    optimizer_per_byte: float
    whole: float
    """A whole pass over its units priced alone: cold caches, and ranks that wait for the slowest. 1: no loss."""
    peak_flops_per_s: float
    """The best matrix product measured (or the datasheet's): what MFU is a share of."""
    residual: float
    """Median relative error of the fit over the points that were measured; 0 where nothing was fitted."""
    origin: Origin
    coding: dict[str, float] = field(default_factory=dict)
    """Of compressing gradients, by the name of the compressor: seconds of each byte that cost/compression.py counts.
    One that is not there is priced as passes over memory."""

    def __post_init__(self) -> None:
        r = (*_costs(self.forward), *_costs(self.backward), self.optimizer_per_byte, *self.coding.values())
        if min(r) < 0 or not all(map(any, (_costs(self.forward), _costs(self.backward)))):
            raise InputError("cluster.kernels", None, "rates must be 0 or more seconds, and not all 0")
        if self.peak_flops_per_s <= 0 or self.whole <= 0 or self.concurrent < 1:
            raise InputError("cluster.kernels", None, "needs concurrent >= 1, and a positive peak and whole")


def _costs(r: Rates) -> tuple[float, ...]:
    return (r.per_gemm_flop, r.per_attention_flop, r.per_byte, r.per_kernel)


@dataclass(frozen=True)
class CollectiveFit:
    """Measured time of one collective over a group on `hosts` hosts, as many ranks on each: α + β x bytes (bytes as
    DESIGN.md counts them), and the `points` (bytes, seconds) behind it, ascending. `algorithm` is of transport p2p
    alone. `alpha_range`, `beta_range`: where nine tenths of the lines through other draws of the points lie."""

    op: str
    group_size: int
    alpha_s: float
    beta_s_per_byte: float
    residual: float
    transport: Transport
    algorithm: str = ""
    points: tuple[tuple[int, float], ...] = ()
    hosts: int = 1
    alpha_range: tuple[float, float] | None = None
    beta_range: tuple[float, float] | None = None

    def seconds(self, size: Column) -> Column:
        """Of one collective: between points log-log, beyond the last one along the line from α through it, for β
        is of all points and may promise more than the link has; without points α + β n."""
        if not self.points:
            return self.alpha_s + self.beta_s_per_byte * size
        sizes, times = (np.array(column, dtype=float) for column in zip(*self.points, strict=True))
        inside = np.exp(np.interp(np.log(np.maximum(size, 1)), np.log(sizes), np.log(times)))
        slope = (times[-1] - self.alpha_s) / sizes[-1]
        return inside + (slope if slope > 0 else self.beta_s_per_byte) * np.maximum(size - sizes[-1], 0)

    @property
    def way(self) -> str:
        return f"{self.transport} {self.algorithm}".strip()

    @property
    def trusted(self) -> bool:
        """Whether the line stands for the points. The points themselves do, wherever they are."""
        return self.residual <= TRUSTED


@dataclass(frozen=True)
class Figure:
    """Something that was measured of a rank while all others did the same: what, of which shape, and the range in
    which most of the rounds lie."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    note: str = ""


@dataclass(frozen=True)
class ClusterSpec:
    """`nodes` x `ranks_per_node` equal devices; tiers from the innermost outwards."""

    name: str
    device: Device
    ranks_per_node: int
    nodes: int
    tiers: tuple[Tier, ...]
    kernels: tuple[KernelRates, ...]
    collectives: tuple[CollectiveFit, ...] = field(default=())
    figures: tuple[Figure, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "nodes"):
            if getattr(self, name) < 1:
                raise InputError(f"cluster.{name}", getattr(self, name), "must be at least 1")
        if not self.tiers:
            raise InputError("cluster.tiers", None, "must name at least one tier of links")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def rates(self, dtype: DType, concurrent: int) -> KernelRates:
        """The rates of a type under the nearest measured concurrency.

        Raises InputError where the type was neither measured nor published for this cluster.
        """
        found = [k for k in self.kernels if k.dtype == dtype]
        if not found:
            have = sorted({k.dtype for k in self.kernels})
            raise InputError(
                "job.precision.compute",
                dtype,
                f"cluster {self.name} has no rates for it",
                f"it has {', '.join(have)}",
            )
        return min(found, key=lambda k: abs(k.concurrent - concurrent))

    def fits(self, op: str, group_size: int, hosts: int = 1) -> list[CollectiveFit]:
        """What was measured of an operation over groups of this size, or else, on one host, of the next larger
        one."""
        found = [f for f in self.collectives if (f.op, f.hosts) == (op, hosts) and f.group_size >= group_size]
        nearest = min((f.group_size for f in found), default=0) if hosts == 1 else group_size
        return [f for f in found if f.group_size == nearest]
