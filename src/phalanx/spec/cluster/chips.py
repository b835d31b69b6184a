"""Chips by name: ONE table, a row holding every fact that a datasheet gives. Rates are dense; links go one way.

Datasheets like large numbers: FLOP/s with sparsity, links in both directions at once, memory in units of choice. Here
FLOP/s are dense, NVLink is one direction, memory is what the driver reports (or the datasheet, where said). A chip
without a required fact cannot be made. Both engines read this table: `spec/cluster/presets.py` makes devices of
it, and `cost/analytic/chips.py` what kernels reach on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx.spec.cluster.spec import Device
from phalanx.spec.number_formats import COMPUTED, MULTIPLIED, NumberFormat

MIB = 2**20
CONTEXT_BYTES = 2048 * MIB
"""What CUDA's context, cuBLAS's workspaces and NCCL's buffers take of a device, about."""


_MULTIPROCESSORS = {
    "volta": 80,
    "ampere": 108,
    "ampere-gddr": 72,
    "hopper": 132,
    "ada": 128,
    "blackwell": 148,
    "blackwell-ultra": 148,
    "blackwell-gddr": 188,
}
"""By generation: datasheets."""


@dataclass(frozen=True)
class Chip:
    """A chip's datasheet, in bytes, bytes/s and FLOP/s."""

    device: str
    """The product's full name, as a driver would say it."""
    generation: str
    """Which kernels and switches it has: a row of `cost/analytic/chips.py`'s generations."""
    memory_bytes: float
    bandwidth_bytes_per_s: float
    half: float
    """Dense FLOP/s of fp16, and of bf16 where `bf16`, on tensor cores."""
    fp8: float
    """Dense FLOP/s of fp8; of a chip without, those of 16 bits."""
    fp4: float
    """Dense FLOP/s of fp4; of a chip without, those of fp8."""
    link_bytes_per_s: float
    """Of NVLink in one direction; of PCIe where there is none."""
    single: float | None
    """FLOP/s of fp32 outside of tensor cores; None where no source is known: then there is no preset of the chip."""
    double: float | None
    """FLOP/s of fp64, on tensor cores where they have it, since cuBLAS uses them unasked; None without a figure."""
    source: str
    bf16: bool = True
    memory_source: str = "nvidia-smi"
    clock: float = 1.0
    """Sustained clock relative to the generation's first chip; a fitted constant `NAME.clock` overrides it."""
    host_bytes_per_s: float = 64e9
    """Of its link to the host in one direction: PCIe of generation 5 with 16 lanes, or NVLink-C2C."""
    host_memory_bytes_per_s: float = 77e9
    """Its share of the host's memory bandwidth: of two sockets with eight channels of DDR5-4800, an eighth."""
    processors: int | None = None
    """Streaming multiprocessors, where the chip has not as many as its generation."""
    l1_bytes_per_processor: float = 256 * 1024
    """Level-1 cache and shared memory of a multiprocessor; its registers are 256 KiB on all of these chips."""
    l2_bytes: float = 50 * MIB
    """Level-2 cache: whitepapers; of Blackwell as its driver reports it."""

    @property
    def multiprocessors(self) -> int:
        """Streaming multiprocessors."""
        return self.processors or _MULTIPROCESSORS[self.generation]

    def has(self, number_format: NumberFormat) -> bool:
        """Whether it multiplies a format."""
        return number_format.on(self.generation)

    def flops_per_s(self, formats: Iterable[NumberFormat]) -> dict[str, float]:
        """Return the dense FLOP/s of those of these formats that it multiplies and that have a published figure."""
        rates = {f.name: getattr(self, f.peak) for f in formats if f.peak is not None and self.has(f)}
        return {name: rate for name, rate in rates.items() if rate}

    def as_device(self, name: str | None = None, bandwidth_bytes_per_s: float | None = None) -> Device:
        """Return the chip as a Device; a variant has another name and memory bandwidth."""
        mib = int(self.memory_bytes) // MIB
        how = f"memory as {self.memory_source} says, usable: less 2 GiB for context and libraries (estimated)"
        return Device(
            name=name or self.device,
            kind="cuda",
            memory_bytes=mib * MIB,
            usable_bytes=mib * MIB - CONTEXT_BYTES,
            memory_bandwidth_bytes_per_s=bandwidth_bytes_per_s or self.bandwidth_bytes_per_s,
            dense_flops_per_s=self.flops_per_s(COMPUTED),  # type: ignore[arg-type]
            own_communication_engine=True,
            narrow_flops_per_s=self.flops_per_s(MULTIPLIED),
            origin="published",
            source=f"{self.source}, dense; {how}",
        )


_V100 = Chip(
    device="V100-SXM2-32GB",
    generation="volta",
    l1_bytes_per_processor=128 * 1024,
    l2_bytes=6 * MIB,
    memory_bytes=32510 * MIB,
    bandwidth_bytes_per_s=900e9,
    half=125e12,
    fp8=125e12,
    fp4=125e12,
    link_bytes_per_s=150e9,
    single=15.7e12,
    double=7.8e12,
    source="NVIDIA V100 datasheet",
    host_bytes_per_s=16e9,  # PCIe 3
    host_memory_bytes_per_s=32e9,  # two sockets of six channels of DDR4-2666, an eighth
    bf16=False,
)
_A100 = Chip(
    device="A100-SXM4-80GB",
    generation="ampere",
    l1_bytes_per_processor=192 * 1024,
    l2_bytes=40 * MIB,
    memory_bytes=81920 * MIB,
    bandwidth_bytes_per_s=2.039e12,
    half=312e12,
    fp8=312e12,
    fp4=312e12,
    link_bytes_per_s=300e9,
    single=19.5e12,
    double=19.5e12,
    source="NVIDIA A100 datasheet",
    host_bytes_per_s=32e9,  # PCIe 4
    host_memory_bytes_per_s=51e9,  # two sockets of eight channels of DDR4-3200, an eighth
)
_H100 = Chip(
    device="H100-SXM5-80GB",
    generation="hopper",
    memory_bytes=81559 * MIB,
    bandwidth_bytes_per_s=3.35e12,
    half=989.4e12,
    fp8=1978.9e12,
    fp4=1978.9e12,
    link_bytes_per_s=450e9,
    single=66.9e12,
    double=66.9e12,
    source="NVIDIA H100 datasheet",
)
_B200 = Chip(
    device="B200-SXM-180GB",
    generation="blackwell",
    l2_bytes=126 * MIB,
    memory_bytes=183359 * MIB,
    bandwidth_bytes_per_s=7.7e12,
    half=2250e12,
    fp8=4500e12,
    fp4=9000e12,
    link_bytes_per_s=900e9,
    single=75e12,
    double=37e12,
    source="NVIDIA HGX B200 datasheet",
)
# Blackwell's datasheets give fp64 the same rate on tensor cores and outside of them.
_GB200 = replace(
    _B200,
    device="GB200-186GB",
    memory_bytes=189471 * MIB,
    bandwidth_bytes_per_s=8e12,
    half=2500e12,
    fp8=5000e12,
    fp4=10000e12,
    single=80e12,
    double=40e12,
    source="NVIDIA GB200 NVL72 datasheet",
    # NVLink-C2C: 900 GB/s in both directions to a Grace, whose 512 GB/s of memory two GPUs share.
    host_bytes_per_s=225e9,
    host_memory_bytes_per_s=256e9,
)
CHIPS: dict[str, Chip] = {
    "V100": _V100,
    "V100-16GB": replace(_V100, device="V100-SXM2-16GB", memory_bytes=16160 * MIB),
    "A100-40GB": replace(_A100, device="A100-SXM4-40GB", memory_bytes=40960 * MIB, bandwidth_bytes_per_s=1.555e12),
    "A100": _A100,
    "H100": _H100,
    # HBM2e and 500 W, of 700: power goes with the third power of the clock.
    "H100-500W": replace(
        _H100,
        device="H100-SXM5-96GB-HBM2e",
        memory_bytes=97871 * MIB,
        bandwidth_bytes_per_s=2.4e12,
        clock=(5 / 7) ** (1 / 3),
    ),
    "H800": replace(
        _H100,
        device="H800-SXM5-80GB",
        link_bytes_per_s=200e9,
        source="NVIDIA H800: H100 with 400 GB/s of NVLink; fp64 as there",
    ),
    "H200": replace(
        _H100,
        device="H200-SXM5-141GB",
        memory_bytes=143771 * MIB,
        bandwidth_bytes_per_s=4.8e12,
        source="NVIDIA H200 datasheet",
    ),
    "B200": _B200,
    "GB200": _GB200,
    "B300": replace(
        _B200,
        device="B300-SXM-270GB",
        generation="blackwell-ultra",
        memory_bytes=275040 * MIB,
        bandwidth_bytes_per_s=8e12,
        fp4=13500e12,
        source="NVIDIA HGX B300 datasheet",
        single=None,  # no source at hand: so there is no preset of it
        double=None,
    ),
    "GB300": replace(
        _GB200,
        device="GB300-279GB",
        generation="blackwell-ultra",
        memory_bytes=284208 * MIB,
        fp4=15000e12,
        source="NVIDIA GB300 NVL72 datasheet",
        single=None,  # no source at hand: so there is no preset of it
        double=None,
    ),
    "A10": Chip(
        device="A10-24GB",
        generation="ampere-gddr",
        l1_bytes_per_processor=128 * 1024,
        l2_bytes=6 * MIB,
        memory_bytes=23028 * MIB,
        bandwidth_bytes_per_s=600e9,
        half=125e12,
        fp8=125e12,
        fp4=125e12,
        link_bytes_per_s=32e9,
        single=31.2e12,
        double=None,
        source="NVIDIA A10 datasheet",
    ),
    "L4": Chip(
        device="L4-24GB",
        generation="ada",
        l1_bytes_per_processor=128 * 1024,
        l2_bytes=48 * MIB,
        memory_bytes=23034 * MIB,
        bandwidth_bytes_per_s=300e9,
        half=121e12,
        fp8=242.5e12,
        fp4=242.5e12,
        link_bytes_per_s=32e9,
        single=30.3e12,
        double=None,
        source="NVIDIA L4 datasheet",
        processors=58,
    ),
    "L40S": Chip(
        device="L40S-48GB",
        generation="ada",
        l1_bytes_per_processor=128 * 1024,
        l2_bytes=96 * MIB,
        memory_bytes=46068 * MIB,
        bandwidth_bytes_per_s=864e9,
        half=362e12,
        fp8=733e12,
        fp4=733e12,
        link_bytes_per_s=32e9,
        single=91.6e12,
        double=None,
        source="NVIDIA L40S datasheet",
        processors=142,
    ),
    "H20": replace(
        _H100,
        device="H20-96GB",
        l2_bytes=60 * MIB,
        memory_bytes=97871 * MIB,
        bandwidth_bytes_per_s=4.0e12,
        half=148e12,
        fp8=296e12,
        fp4=296e12,
        single=44e12,
        double=None,
        source="NVIDIA H20 datasheet",
        processors=78,
    ),
    "RTX-PRO-6000": Chip(
        device="RTX-PRO-6000-96GB",
        generation="blackwell-gddr",
        l1_bytes_per_processor=128 * 1024,
        l2_bytes=128 * MIB,
        memory_bytes=97887 * MIB,
        bandwidth_bytes_per_s=1.597e12,
        half=503.8e12,
        fp8=1007.6e12,
        fp4=2015.2e12,
        link_bytes_per_s=64e9,
        single=126e12,
        double=None,
        source="NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet",
        processors=188,
    ),
    "RTX-4090": Chip(
        device="RTX-4090-24GB",
        generation="ada",
        l1_bytes_per_processor=128 * 1024,
        l2_bytes=72 * MIB,
        memory_bytes=24564 * MIB,
        bandwidth_bytes_per_s=1.008e12,
        half=165.2e12,
        fp8=330.3e12,
        fp4=330.3e12,
        link_bytes_per_s=32e9,
        single=82.6e12,
        double=None,
        source="NVIDIA Ada whitepaper, fp32 sums",
    ),
}
"""Every chip that Phalanx knows, by the name that predictions use."""
