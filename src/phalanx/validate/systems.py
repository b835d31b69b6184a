"""The hardware of a row: a System from its source, corrected by microbenchmarks run along with it."""

from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.analytic.chips import chip_name as by_device
from phalanx.cost.analytic.chips import system
from phalanx.cost.analytic.kernels import product_s
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.spec.errors import InputError
from phalanx.validate.models import Unspecified
from phalanx.validate.records import Row

# GPUs by the names in the rows; the longest prefix wins.
_GPUS = {
    "V100": "V100",
    "V100-SXM2-16GB": "V100-16GB",
    "A100-SXM-40GB": "A100-40GB",
    "A100": "A100",
    "H100-96GB-HBM2e-500W": "H100-500W",
    "H100": "H100",
    "H800": "H800",
    "H200": "H200",
    "B200": "B200",
    "GB200": "GB200",
    "B300": "B300",
    "GB300": "GB300",
}
_NICS = {
    # bytes/s between nodes per GPU, in one direction, by the words of the source
    "4x Omni-Path": 6.25e9,
    "Omni-Path 100 (4 links/node)": 12.5e9,
    "Omni-Path": 12.5e9,
    "1600 Gbps/node": 25e9,
    "800 Gb/s per node": 12.5e9,
    "400G": 50e9,
    "400Gb/s": 50e9,
    "8x HDR": 25e9,
    "NVLink + EFA/IB": 50e9,
    "10 GbE per node": 1.25e9 / 8,
}
_CHIP_RATES = {"V100": 12.5e9, "V100-16GB": 12.5e9, "A100-40GB": 25e9, "A100": 25e9}
"""Bytes/s between nodes per GPU by chip, for sources that state nothing; 50e9 for any other chip."""
_RACK = 72
"""GPUs in the NVLink domain of a GB200 or GB300."""


def chip_name(row: Row) -> str:
    """Name the chip of a row, as cost/hardware does. Raises Unspecified for hardware that is not modelled."""
    if row.family == "torchao" and row["gpu"] == "H100":
        return "H100-500W"  # run by torchtitan's authors, on their machines
    if not row["gpu"]:
        raise Unspecified("the GPU is not stated")
    matches = [known for known in _GPUS if row["gpu"].startswith(known)]
    if matches:
        return _GPUS[max(matches, key=len)]
    try:
        return by_device(row["gpu"])
    except InputError:
        raise Unspecified(f"hardware {row['gpu']} is not modelled") from None


def description(row: Row) -> tuple[str, int, float, bool]:
    """Describe a row's hardware, as `system` takes it: (chip, ranks per node or NVLink domain, bytes/s of a rank's
    NIC, whether the network is a cloud's own). Raises Unspecified."""
    chip = chip_name(row)
    stated = [rate for words, rate in _NICS.items() if words in row["interconnect"]]
    nic = stated[0] if stated else _CHIP_RATES.get(chip, 50e9)
    node = row.count("gpus_per_node", 8) or 8
    return chip, _RACK if chip.startswith("GB") else node, nic, "EFA" in row["interconnect"]


_PRODUCT = (4096, 57344, 8192)
"""(m, n, k) of the matrix product that `Benched` refers to."""


@dataclass(frozen=True)
class Benched:
    """Microbenchmarks run along with a row, by its own job or on its machine. 0 means not measured."""

    ranks: Column = 0.0
    """Ranks of the collectives."""
    reduce: Column = 0.0
    """Bus bandwidth of all-reduce over all ranks, in bytes/s."""
    gather: Column = 0.0
    """Bus bandwidth of all-gather over all ranks, in bytes/s."""
    reduce_inside: Column = 0.0
    """Bus bandwidth of all-reduce inside a node, in bytes/s."""
    gather_inside: Column = 0.0
    """Bus bandwidth of all-gather inside a node, in bytes/s."""
    product_flops_per_s: Column = 0.0
    """FLOP/s of `_PRODUCT` in a format of 2 bytes."""
    memory_bytes_per_s: Column = 0.0
    """Bytes/s of memory-bound kernels."""


_MACHINES = {
    # SimuMax, configs/system/b200_bf16_ceperm.json: 0.742 and 0.673 of 900 GB/s; of 2,250 TFLOP/s the product and
    # both its gradients reach 0.487, 0.483 and 0.454, which is their mean; 0.666 of 8 TB/s.
    "simumax-b200": Benched(8, 668e9, 606e9, 668e9, 606e9, 1067e12, 5.33e12),
}
"""Benchmarks of the machine, for families whose rows all ran on one machine that its owners measured."""


def benchmarks_of(row: Row) -> Benched:
    """Return the microbenchmarks of a row: by its own job, else on its family's machine, else empty."""
    names = ("busbw_ar_gbs", "busbw_ag_gbs", "busbw_ar_intra_gbs", "busbw_ag_intra_gbs")
    rates = [row.number(name) for name in names]
    if not all(rates):
        return _MACHINES.get(row.family, Benched())
    return Benched(float(row.count("gpus") or 1), *(rate * 1e9 for rate in rates if rate))


_BENCHED = 1.5e9
"""Approximate buffer, in bytes, of the benchmarked collectives: at this size they agree with the times of
tensor-parallel collectives over the same nodes."""


_CPU_S = 2.5e-4
"""Seconds per rank beyond a node above which the CPU must be the cause: no network is as slow."""
_CUT_OFF = 0.25
"""Share of NVLink's bandwidth below which traffic cannot have gone over NVLink."""


def corrected_system(system: System, by: Benched) -> System:
    """Return a system corrected by microbenchmarks (columns, one entry per row). Links: the rate inside a node; the
    rate of all-reduce between nodes, less its tree's hops; whether CPUs hold up all-gather, which has a hop to each
    node (n / busbw - n / busbw inside a node = the cost of ranks beyond it); whether the ranks of a node are cut off
    from each other. Matrix products and memory: their shares of the peak."""
    # Rows without measured links get neutral values, and keep the system's.
    inner, outer = system.tiers
    has_links = np.asarray(by.gather_inside) > 0
    inside, reduce_inside = np.where(has_links, by.gather_inside, 1.0), np.where(has_links, by.reduce_inside, 1.0)
    gather, reduce = np.where(has_links, by.gather, 1.0), np.where(has_links, by.reduce, 1.0)
    ranks = np.maximum(by.ranks, inner.ranks + 1)
    blocks = np.maximum(ranks / inner.ranks, 1.001)
    # All-gather: the excess over the rate inside a node, per rank beyond it, shows CPUs that hold it up.
    cpu_wait_s = np.maximum(_BENCHED * (1 / gather - 1 / inside), 0.0)
    rank_s = cpu_wait_s / np.maximum(ranks - inner.ranks, 1.0)  # a row may state any node, even one of 10^18
    # All-reduce: the rate between nodes, without the hops of its tree.
    tree = np.minimum(blocks - 1, 2 * np.log2(blocks))
    between_s_per_byte = (
        np.maximum(1 / reduce - tree * outer.bulk_reduce_hop_s / _BENCHED, 0.1 / reduce) * blocks / (blocks - 1)
    )
    beyond_node = has_links & (by.ranks > inner.ranks)
    across = 1 / between_s_per_byte / (inner.ranks * outer.bytes_per_s_per_gpu_per_direction)
    # Products: measured over predicted.
    predicted_flops_per_s = 2.0 * np.prod(_PRODUCT) / product_s(*_PRODUCT, system, system.peak_bf16 * system.gemm, 2)
    has_product = np.asarray(by.product_flops_per_s) > 0
    node_rate = np.where(has_links, inside, inner.bytes_per_s_per_gpu_per_direction)
    return replace(
        system,
        gemm=system.gemm * np.where(has_product, by.product_flops_per_s / predicted_flops_per_s, 1.0),
        memory=np.where(has_product, by.memory_bytes_per_s / system.memory_bytes_per_s, system.memory),
        tiers=(replace(inner, bytes_per_s_per_gpu_per_direction=node_rate), outer),
        reduce_gain=np.where(has_links, reduce_inside / inside, system.reduce_gain),
        reduce_across=np.where(beyond_node, across, system.reduce_across),
        observed=1.0 * has_links,
        held_up=1.0 * (beyond_node & (rank_s > _CPU_S)),
        cut_off=1.0 * (has_links & (inside < _CUT_OFF * inner.bytes_per_s_per_gpu_per_direction)),
    )


def system_of_row(row: Row) -> System:
    """Return the system of a row, corrected by its microbenchmarks. Raises Unspecified."""
    return corrected_system(system(*description(row)), benchmarks_of(row))
