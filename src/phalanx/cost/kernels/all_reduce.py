"""All-reduces among GPUs of a node: in one step, in which each reads all others' buffers, or in two (reduce-scatter,
all-gather).

    one = (n - 1) S / rate1          two = sync + 2 (n - 1)/n S / rate2 + S0/rate2 S / (S + S0)
    t   = start + hop log2(n) + (one^-4 + two^-4)^(-1/4)

`rate` is a share of NVLink's or PCIe's rate in one direction; with switches that reduce it may exceed 1.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.kernels.chip import KernelChip

BUS_BYTES_PER_S = 100e9
"""Maximum bytes/s of a link that counts as PCIe."""


@dataclass(frozen=True)
class LinkConstants:
    """Rates of all-reduces on a generation's links."""

    rate: Column = 0.75
    """Share of NVLink's rate, between two GPUs."""
    rate8: Column = 1.0
    """Factor of the NVLink rate between more GPUs: the gain by switches that reduce."""
    bus: Column = 0.5
    """Share of PCIe's rate, between two GPUs."""
    bus8: Column = 0.4
    """Factor of the PCIe rate between more GPUs, which share the host's links."""
    bus_latency: Column = 1.5
    """Factor of latencies over PCIe."""
    latency: Column = 1.0
    """Factor of all latencies: launches on this host and chip."""


@dataclass(frozen=True)
class AllReduceLibrary:
    """One implementation: NCCL, or an engine's own kernel, launched by the host (eager) or from a CUDA graph."""

    start_s: Column = 5e-6
    hop_s: Column = 1e-6
    """Seconds per doubling of GPUs."""
    one_step: Column = 0.6
    """Rate of reading in one step over the rate in two."""
    sync_s: Column = 6e-6
    """Seconds by which two steps start later."""
    rate: Column = 1.0
    ramp_bytes: Column = 0.5e6
    """S0: bytes at which half of a fixed loss is reached."""


def node_all_reduce_s(size: Any, ranks: Any, chip: KernelChip, c: LinkConstants, lib: AllReduceLibrary) -> Any:
    """Return seconds of an all-reduce of `size` bytes over `ranks` GPUs of one node."""
    bus = chip.link_bytes_per_s < BUS_BYTES_PER_S
    many = ranks > 2
    share = np.where(bus, c.bus * np.where(many, c.bus8, 1.0), c.rate * np.where(many, c.rate8, 1.0))
    rate = chip.link_bytes_per_s * share * lib.rate
    slower = np.where(bus, c.bus_latency, 1.0)
    one = (ranks - 1) * size / (rate * lib.one_step)
    two = lib.sync_s * slower + 2 * (ranks - 1) / ranks * size / rate
    two = two + lib.ramp_bytes / rate * size / (size + lib.ramp_bytes)
    body = (one**-4 + two**-4) ** -0.25
    return (lib.start_s + lib.hop_s * np.log2(ranks)) * slower * c.latency + body
