"""A chip's rates for each kind of work, and tiers of links with the latency of their hops.

Peaks come from a ClusterSpec (datasheets); the achieved shares of peaks are constants of a generation of chips and
links, fitted on published runs (`python -m calibration`).
"""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column


@dataclass(frozen=True)
class TierRates:
    """Links that join `ranks` neighbours: bytes/s of one rank in one direction; `hop_s`, seconds per hop of a small
    chunk; and of a large chunk, `bulk_hop_s` in gathers and `bulk_reduce_hop_s` in all-reduces."""

    ranks: Column
    bytes_per_s_per_gpu_per_direction: Column
    hop_s: Column
    bulk_hop_s: Column
    bulk_reduce_hop_s: Column


@dataclass(frozen=True)
class System:
    """A chip and its links. `peak_*`: dense FLOP/s. `gemm`, `attention`, `memory`: shares of the peak that long
    kernels reach. `gemm_half`: inner size at which a matrix product reaches half of that; `attention_half`: the same
    for attention, in sequence length. `tiers`: innermost first."""

    peak_bf16: Column
    peak_fp8: Column
    peak_fp4: Column
    peak_fp32: Column
    """FLOP/s outside of tensor cores."""
    peak_tf32: Column
    """FLOP/s of fp32 products on tensor cores."""
    peak_fp64: Column
    memory_bytes_per_s: Column
    memory_bytes: Column
    processors: Column
    gemm: Column
    gemm_half: Column
    gemm8: Column
    gemm4: Column
    misaligned: Column
    """Share of tensor cores' rate if rows are not a multiple of 8 elements."""
    odd: Column
    """Share of `gemm` that long products of 2-byte elements reach where rows have an odd number of them."""
    attention: Column
    portable_gemm: Column
    """Share of `gemm` reached by plain library calls, as made by eager PyTorch and XLA."""
    portable_attention: Column
    """`attention` for kernels that are not written for this generation (FlashAttention 2)."""
    portable_backward: Column
    """Backward over forward, for these kernels, in FLOP/s."""
    attention_narrow: Column
    """Exponent of head_dim / 128 in the rate of attention with narrow heads."""
    attention_backward: Column
    """Backward over forward, in FLOP/s."""
    attention_half: Column
    vendor_first: Column
    """Highest value of Profile.portable for which torch itself chooses the vendor's attention; else FlashAttention
    2."""
    memory: Column
    reduce_gain: Column
    """In the innermost tier, the busbw of an all-reduce by the switch (NVLS) over that of a ring."""
    reduce_across: Column
    """Between nodes, the all-reduce's rate over the NICs' rate."""
    tree: Column
    """bytes/s that a tree of two nodes carries through each node in an all-reduce; 0: switches reduce."""
    observed: Column
    """1: collectives were measured on the machine or along with the job, so that `held_up` is known."""
    held_up: Column
    """1: a job's own measurements show that its CPUs delay its collectives."""
    cut_off: Column
    """1: a job's own measurements show that the ranks of a node do not reach each other over NVLink."""
    bulk_bytes: Column
    bulk_reduce_bytes: Column
    """Bytes of a chunk at which a hop takes the mean of a small and a large chunk's time, in all-reduces;
    `bulk_bytes`: the same in gathers."""
    tiers: tuple[TierRates, ...]
    host: Column = 1.0
    """Seconds of a launch relative to the stack's own constant, as calibrated."""
    start_s: Column = 0.0
    """Seconds from the start of a large collective until the first byte moves, whatever the number of ranks."""
    host_bytes_per_s: Column = 64e9
    """Bytes/s of a GPU's link to its host, in one direction."""
    host_memory_bytes_per_s: Column = 77e9
    """Bytes/s of one GPU's share of the host's memory bandwidth, which `host_sharers` GPUs have."""
    host_sharers: Column = 8

    def peak(self, element_bytes: Column) -> Column:
        """Return the peak FLOP/s of products with elements of 2, 4 or 8 bytes."""
        size = np.asarray(element_bytes)
        if not np.any(size > 2):
            return self.peak_bf16
        return np.where(size > 4, self.peak_fp64, np.where(size > 2, self.peak_fp32, self.peak_bf16))
