"""The cluster: equal devices, the tiers of links between them, and measurements of both.

Units are part of the field names and never scaled: bytes, seconds, FLOP/s. Vendors' headline figures often count both
directions of a link, or sparsity; these are per direction and dense. Every part says where its numbers come from:
`measured` on the machine, `published` by the vendor, or `estimated`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

from phalanx.spec.cluster.calibration import Calibration
from phalanx.spec.errors import InputError
from phalanx.spec.job import DType, Transport, is_algorithm_file
from phalanx.spec.ranges import Bytes, Count, Name, Range, Ranks, Rate, Seconds, SecondsPer, require_ranges

Origin = Literal["measured", "published", "estimated"]
"""Origin of a number."""
Wiring = Literal["tree", "rails", "pairs"]
"""tree: switches that all ranks below can reach. rails: a switch for each GPU index of the hosts below, so that GPUs
of different index meet over NVLink in a host, or else one tier further out. pairs: links between every two blocks
below, as the global links between the groups of a dragonfly; a block's uplink is all of its links together."""
GIB = 2**30
TRUSTED = 0.2
"""The largest median relative error of a fit whose line is used."""
Column = Any
"""A number, or a NumPy column of numbers."""


_End = Annotated[float, Range(-1e9, 1e9)]  # of an interval, which may include impossible values


LARGEST_HOST = 16
"""Devices of the largest host (DGX-2): a larger node is a rack or a pod, of which a job takes as much as it needs."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU rank."""

    name: Name
    """The model of the device, for people."""
    kind: Literal["cpu", "cuda"]
    """Device type in PyTorch."""
    memory_bytes: Annotated[int, Range(1, 2**60)]
    """Memory that the driver reports; of a CPU rank, its share of the host's."""
    usable_bytes: Annotated[int, Range(1, 2**60)]
    """Memory left for a job, which decides whether a plan fits."""
    memory_bandwidth_bytes_per_s: Rate
    """Bytes/s of the device's memory, reads and writes together."""
    dense_flops_per_s: dict[DType, Rate]
    """Peak FLOP/s of dense matrix products, by number type; 2 FLOPs per multiply-add."""
    own_communication_engine: bool
    """Whether transfers overlap with compute (DMA, NICs), instead of running on the same cores, as on a CPU."""
    origin: Origin
    """Origin of these numbers."""
    source: Name
    """Source of the numbers, for people."""
    narrow_flops_per_s: dict[str, Rate] = field(default_factory=dict)
    """Peak FLOP/s of dense products of narrow formats, by name. Formats that the device lacks, or without a measured
    rate, are missing."""
    gamma_s_per_byte: SecondsPer | None = None
    """Gamma: seconds to add each byte received in a reduction. None: two reads and a write at memory bandwidth."""

    def __post_init__(self) -> None:
        require_ranges(self, "cluster.device")

    @property
    def is_tpu(self) -> bool:
        """Whether it is a chip of Google, on which JAX's trainers run and the others do not."""
        return self.name.startswith("TPU-")


@dataclass(frozen=True)
class Tier:
    """Links among blocks of neighbouring ranks, such as NVLink in a node or InfiniBand between nodes."""

    name: Name
    """Kind of link, for people."""
    ranks: Ranks
    """Size of the blocks of neighbouring ranks that it connects; lower tiers connect smaller blocks inside."""
    latency_s: Seconds
    """Alpha: seconds of one message of no bytes."""
    bandwidth_bytes_per_s_per_gpu_per_direction: Rate
    """Bytes/s that one rank sends, and receives at the same time."""
    origin: Origin
    """Origin of these numbers."""
    source: Name
    """Source of the numbers, for people."""
    uplink_bandwidth_bytes_per_s_per_direction: Rate | None = None
    """Bytes/s that all ranks of a block of the tier below, such as a host, share into this tier. None: every rank has
    a link of its own."""
    wiring: Wiring = "tree"
    """How the tier connects the blocks below it; `phalanx cluster place` prices the consequences for the GPUs of a
    job."""

    def __post_init__(self) -> None:
        require_ranges(self, f"cluster.tiers.{self.name}")
        if self.wiring == "pairs" and self.uplink_bandwidth_bytes_per_s_per_direction is None:
            field = f"cluster.tiers.{self.name}.uplink_bandwidth_bytes_per_s_per_direction"
            raise InputError(field, None, 'is needed for wiring = "pairs"', "say what all links of a group carry")


@dataclass(frozen=True)
class Rates:
    """Seconds per unit of each kind of work, in one phase (cost/compute/unit_work.py defines the counts)."""

    per_gemm_flop: SecondsPer
    """Seconds per FLOP of matrix products outside attention's core."""
    per_attention_flop: SecondsPer
    """Seconds per FLOP of attention's core."""
    per_byte: SecondsPer
    """Seconds per byte read or written in memory."""
    per_kernel: SecondsPer
    """Seconds to launch a kernel."""
    per_narrow_flop: dict[str, SecondsPer] = field(default_factory=dict)
    """Seconds per FLOP of products of narrow formats, by name, without rounding to them. Formats that the device
    lacks, or without a measured rate, are missing."""
    fused_norms: bool = False
    """Whether an RMS norm is one kernel, as on GPUs, instead of several passes over memory."""


MEASURED_PRODUCT = 4096
"""Rows and columns of the square product whose rate `phalanx measure` records as a GPU's peak_flops_per_s."""


@dataclass(frozen=True)
class KernelRates:
    """Compute rates of one rank while `concurrent` ranks of its host do the same."""

    dtype: DType
    """Compute type."""
    concurrent: Ranks
    """Ranks of the host that computed at the same time, including this one."""
    threads: Count
    """CPU threads per rank."""
    forward: Rates
    """Rates of the forward pass."""
    backward: Rates
    """Rates of the backward pass."""
    optimizer_per_byte: SecondsPer
    """Seconds of an optimizer step per byte it reads or writes."""
    pass_slowdown: Annotated[float, Range(1e-3, 1e6)]
    """Time of an entire pass over the sum of its units, each timed alone: cold caches, and ranks that wait for the
    slowest. 1: no loss."""
    peak_flops_per_s: Rate
    """FLOP/s of the best matrix product measured, or the datasheet's: the denominator of MFU."""
    fit_error: Annotated[float, Range(0, 1e9)]
    """Median relative error of the fit over the measured points; 0 where nothing was fitted."""
    origin: Origin
    """Origin of these rates."""
    compression_per_byte: dict[str, SecondsPer] = field(default_factory=dict)
    """Seconds per byte of compressing gradients, by compressor; cost/compute/compression.py counts the bytes. A
    compressor that is missing is priced as passes over memory."""

    def __post_init__(self) -> None:
        where = f"cluster.kernels.{self.dtype}"
        require_ranges(self, where)
        for name, rates in (("forward", self.forward), ("backward", self.backward)):
            require_ranges(rates, f"{where}.{name}")
            if not any(_costs(rates)):
                raise InputError(f"{where}.{name}", None, "takes no time: all of its rates are 0", "measure again")


def _costs(r: Rates) -> tuple[float, ...]:
    return (r.per_gemm_flop, r.per_attention_flop, r.per_byte, r.per_kernel)


@dataclass(frozen=True)
class CollectiveFit:
    """Measured time of one collective: the line α + β x bytes, and the points behind it. Bytes as nccl-tests counts
    them: all_reduce's buffer, the gathered buffer of all_gather and reduce_scatter, all_to_all's send buffer."""

    op: Name
    """The collective, such as `all_reduce`."""
    group_size: Ranks
    """Ranks in the group."""
    alpha_s: Seconds
    """Alpha: seconds at size 0."""
    beta_s_per_byte: SecondsPer
    """Beta: seconds per byte."""
    fit_error: Annotated[float, Range(0, 1e9)]
    """Median relative error of the line over the points."""
    transport: Transport
    """Transport."""
    algorithm: Name = ""
    """Algorithm, for transport p2p only."""
    points: tuple[tuple[Bytes, Annotated[float, Range(1e-12, 1e9)]], ...] = ()
    """(bytes, seconds) as measured, ascending."""
    hosts: Ranks = 1
    """Hosts that the group spans, with the same number of ranks on each."""
    alpha_range: tuple[_End, _End] | None = None
    """90 % interval of alpha_s, from lines through resampled points (bootstrap)."""
    beta_range: tuple[_End, _End] | None = None
    """90 % interval of beta_s_per_byte."""

    def __post_init__(self) -> None:
        where = f"cluster.collectives.{self.op}"
        require_ranges(self, where)
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)):
            raise InputError(f"{where}.points", None, "their bytes do not ascend", "list each size once, in order")

    def seconds(self, size: Column) -> Column:
        """Seconds for `size` bytes.

        Between points: interpolated on logarithmic axes. Beyond the last: along the line from α through that point,
        because β averages all points and may promise more than the link has. Without points: α + β x size.
        """
        if not self.points:
            return self.alpha_s + self.beta_s_per_byte * size
        sizes, times = (np.array(column, dtype=float) for column in zip(*self.points, strict=True))
        inside = np.exp(np.interp(np.log(np.maximum(size, 1)), np.log(sizes), np.log(times)))
        slope = (times[-1] - self.alpha_s) / sizes[-1]
        return inside + (slope if slope > 0 else self.beta_s_per_byte) * np.maximum(size - sizes[-1], 0)

    @property
    def way(self) -> str:
        """Transport and algorithm, as charts and tables name them."""
        return f"{self.transport} {self.algorithm}".strip()

    @property
    def trusted(self) -> bool:
        """Whether the line may replace its points, by its error. The points themselves are always trusted."""
        return self.fit_error <= TRUSTED


@dataclass(frozen=True)
class Figure:
    """A microbenchmark's result for people: the figure of one rank while all others of the host did the same."""

    name: Name
    """Name and shape of the benchmark."""
    value: Annotated[float, Range(-1e30, 1e30)]
    """The result, in `unit`."""
    unit: Name
    """Unit of `value`, `low` and `high`."""
    low: Annotated[float, Range(-1e30, 1e30)]
    """Lower end of the range of most rounds."""
    high: Annotated[float, Range(-1e30, 1e30)]
    """Upper end of the range of most rounds."""
    note: Name = ""
    """A remark, for people."""

    def __post_init__(self) -> None:
        require_ranges(self, f"cluster.figures.{self.name}")


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster of nodes x ranks_per_node equal devices. Raises InputError for counts below 1 or no tier of links."""

    name: Name
    """The preset's name, or what the user calls it."""
    device: Device
    """The device of each rank."""
    ranks_per_node: Ranks
    """Ranks per node, which are neighbours in the numbering of ranks."""
    nodes: Ranks
    """Nodes (hosts)."""
    tiers: tuple[Tier, ...]
    """Links, from the innermost tier outwards."""
    kernels: tuple[KernelRates, ...]
    """Compute rates, by number type and by number of ranks that compute at once."""
    collectives: tuple[CollectiveFit, ...] = field(default=())
    """Measured collectives; others are priced from the tiers."""
    figures: tuple[Figure, ...] = field(default=())
    """Microbenchmarks, shown to people and not used for prices."""
    calibration: Calibration | None = None
    """Measured against predicted seconds of a user's own steps; None: none were measured."""
    host_memory_bytes: Annotated[int, Range(1, 2**60)] | None = None
    """Memory of a node's host, for state that is offloaded to it; None: unknown."""

    def __post_init__(self) -> None:
        require_ranges(self, "cluster")
        if not self.tiers:
            raise InputError("cluster.tiers", None, "must name at least one tier of links")

    @property
    def ranks(self) -> int:
        """Ranks of the cluster: nodes x ranks_per_node."""
        return self.nodes * self.ranks_per_node

    def rates(self, dtype: DType, concurrent: int) -> KernelRates:
        """Return the compute rates of a number type at the measured concurrency closest to `concurrent` ranks per
        host.

        Raises InputError if the type was neither measured nor published for this cluster.
        """
        candidates = [k for k in self.kernels if k.dtype == dtype]
        if not candidates:
            have = sorted({k.dtype for k in self.kernels})
            remedy = f"it has {', '.join(have)}"
            raise InputError("job.precision.compute", dtype, f"cluster {self.name} has no rates for it", remedy)
        return min(candidates, key=lambda k: abs(k.concurrent - concurrent))

    def fits(self, op: str, group_size: int, hosts: int = 1) -> list[CollectiveFit]:
        """Return the fits of a collective over groups of this size; on one host, if there are none, of the next
        larger size."""
        candidates = [
            f
            for f in self.collectives
            if (f.op, f.hosts) == (op, hosts)
            and (f.group_size == group_size or (f.group_size > group_size and not is_algorithm_file(f.algorithm)))
        ]
        nearest = min((f.group_size for f in candidates), default=0) if hosts == 1 else group_size
        return [f for f in candidates if f.group_size == nearest]
