"""Hardware as a step meets it: a chip's rates for each kind of work, and tiers of links with what is lost on them.

Peaks come from a ClusterSpec (datasheets); the shares of them that kernels and NCCL reach are constants of a
generation of chips and links, fitted on published runs (`python -m calibration`).
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.hardware.columns import Column


@dataclass(frozen=True)
class TierRates:
    """Links that join `ranks` neighbours: bytes/s of one rank in one direction, and seconds per hop of a small chunk,
    and of a large one by op."""

    ranks: Column
    bytes_per_s_per_gpu_per_direction: Column
    hop_s: Column
    bulk_hop_s: Column
    bulk_reduce_hop_s: Column


@dataclass(frozen=True)
class System:
    """`peak_*`: dense FLOP/s. `gemm`, `attention`, `memory`: shares of the peak that long kernels reach.
    `gemm_half`: the inner size at which a matrix product reaches half of that. `tiers` from the innermost."""

    peak_bf16: Column
    peak_fp8: Column
    peak_fp4: Column
    memory_bytes_per_s: Column
    memory_bytes: Column
    processors: Column
    gemm: Column
    gemm_half: Column
    gemm8: Column
    gemm4: Column
    misaligned: Column
    """Of tensor cores' rate, where rows are no multiple of 8 elements."""
    attention: Column
    portable_gemm: Column
    """What products reach of that as plain library calls, which eager PyTorch and XLA make."""
    portable_attention: Column
    """The same of kernels that are not written for this generation (FlashAttention 2)."""
    portable_backward: Column
    """Backward over forward, of the same."""
    attention_narrow: Column
    """Exponent of head_dim / 128 in what attention reaches with narrow heads."""
    attention_backward: Column
    """Backward over forward, in FLOP/s."""
    attention_half: Column
    memory: Column
    reduce_gain: Column
    """In the innermost tier, all-reduce by the switch (NVLS) against a ring: busbw over the ring's."""
    reduce_across: Column
    """Between nodes, all-reduce against what the NICs carry."""
    tree: Column
    """bytes/s of an all-reduce that a tree of two nodes carries through each; 0: switches reduce."""
    held_up: Column
    """1: a job's own measurements show that its CPUs hold its collectives up."""
    cut_off: Column
    """1: they show that the ranks of a node do not reach each other over NVLink."""
    bulk_bytes: Column
    bulk_reduce_bytes: Column
    """The chunk of which a hop takes the mean of a small and a large one's; of an all-reduce."""
    tiers: tuple[TierRates, ...]
