"""Chips by name: chips.toml, ONE table, a row holding every fact that a datasheet gives.

Datasheets like large numbers: FLOP/s with sparsity, links in both directions at once, memory in units of choice. Here
FLOP/s are dense, NVLink is one direction, memory is what the driver reports (or the datasheet, where said). A chip
without a required fact cannot be made. Both engines read this table: `spec/cluster/presets.py` makes devices of
it, and `cost/analytic/chips.py` what kernels reach on them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.spec.cluster.spec import Device
from phalanx.spec.number_formats import COMPUTED, MULTIPLIED, NumberFormat
from phalanx.spec.rows import Rows, record

MIB = 2**20
BRIDGE_LINK, BRIDGE_LINKS = 14.0625e9, 4
"""Bytes/s of one link in one direction of an NVLink bridge between two cards, and links of a bridge: 112.5 GB/s both
ways (NVIDIA A40 datasheet)."""
CONTEXT_BYTES = 2048 * MIB
"""What CUDA's context, cuBLAS's workspaces and NCCL's buffers take of a device, about."""
ALONE_BYTES = 1024 * MIB
"""The same of a single GPU, which has no buffers of NCCL: the driver keeps up to 0.8 GiB of the nominal memory (an
A100 of 80 GiB reports 79.2), and processes out of memory held 0.42 and 0.46 GiB outside of PyTorch's allocator
(DINGYANB/MTVCrafter#21, RTX 6000 Ada; pinokiofactory/flux-webui#11, RTX 4090)."""


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
    """Dense FLOP/s of fp8; without fp8, of 16 bits."""
    fp4: float
    """Dense FLOP/s of fp4; without fp4, of fp8."""
    link_bytes_per_s: float
    """Of NVLink in one direction; of PCIe where there is none."""
    single: float | None
    """FLOP/s of fp32 outside of tensor cores; None where no source is known: then there is no preset of the chip."""
    double: float | None
    """FLOP/s of fp64, on tensor cores where they have it, since cuBLAS uses them unasked; None without a figure."""
    source: str
    processors: int
    """Streaming multiprocessors, or AMD's compute units, from datasheets; 8 for chips with few large matrix units,
    whose tiles are not scheduled in waves as a GPU's are."""
    bf16: bool = True
    links: int = 0
    """NVLinks or XGMI links, which have `link_bytes_per_s` together; 0: none, or not known."""
    memory_source: str = "nvidia-smi"
    clock: float = 1.0
    """Sustained clock relative to the generation's first chip; a fitted constant `NAME.clock` overrides it. Of TPUs:
    what products reach of the datasheet, relative to NVIDIA's average share."""
    devices: int = 1
    """Devices that JAX sees of it: TensorCores that are not joined to a megacore (docs.jax.dev,
    jax.experimental.pallas.tpu.ChipVersion)."""
    product: float = 0.0
    """FLOP/s of a bf16 product in the best of many shapes, as measured on a chip without published trainings and on
    the H100, to which it is compared; 0: no such figure."""
    host_bytes_per_s: float = 64e9
    """Of its link to the host in one direction: PCIe of generation 5 with 16 lanes, or NVLink-C2C."""
    host_memory_bytes_per_s: float = 77e9
    """Its share of the host's memory bandwidth: of two sockets with eight channels of DDR5-4800, an eighth."""
    host_sharers: int = 8
    """GPUs that have these shares of a host's memory. Fewer of them at work have more each."""
    l1_bytes_per_processor: float = 256 * 1024
    """Level-1 cache and shared memory of a multiprocessor; its registers are 256 KiB on all of these chips."""
    l2_bytes: float = 50 * MIB
    """Level-2 cache: whitepapers; of Blackwell as its driver reports it."""

    @property
    def tf32(self) -> float:
        """Dense FLOP/s of fp32 products in TF32: half of 16 bits', on every generation that has it (datasheets of
        A100, L40S, H100, B200)."""
        return self.half / 2

    def has(self, number_format: NumberFormat) -> bool:
        """Whether it multiplies a format."""
        return number_format.on(self.generation)

    def flops_per_s(self, formats: Iterable[NumberFormat]) -> dict[str, float]:
        """Return the dense FLOP/s of the formats that the chip multiplies and that have a published figure."""
        rates = {f.name: getattr(self, f.peak) for f in formats if f.peak is not None and self.has(f)}
        return {name: rate for name, rate in rates.items() if rate}

    def as_device(self, name: str | None = None, bandwidth_bytes_per_s: float | None = None) -> Device:
        """Return the chip as a Device; a variant has another name and memory bandwidth."""
        mib = int(self.memory_bytes) // MIB
        memory_origin = (
            f"memory as {self.memory_source} says, usable: less 2 GiB for context and libraries (estimated)"
        )
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
            source=f"{self.source}, dense; {memory_origin}",
        )


def jax_devices(device: Device) -> int:
    """Return the devices that JAX sees of a rank's device."""
    return next((chip.devices for chip in CHIPS.values() if chip.device == device.name), 1)


def alone(device: Device) -> Device:
    """Return the device of a job on a single GPU. One whose usable memory someone states is unchanged."""
    if device.kind != "cuda" or device.memory_bytes - device.usable_bytes != CONTEXT_BYTES:
        return device
    source = device.source.replace("less 2 GiB for context and libraries", "less 1 GiB for context, without NCCL")
    return replace(device, usable_bytes=device.memory_bytes - ALONE_BYTES, source=source)


CHIPS: Mapping[str, Chip] = Rows(Path(__file__).with_suffix(".toml"), record(Chip))
"""Every chip that Phalanx knows, by the name that predictions use."""
