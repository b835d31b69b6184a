"""Seconds of collectives on the tiers of links that their groups really span.

A group of p ranks at distance `stride` has r of them in each block of the innermost tier. Inside, each rank has its
own link; across, the r of a block use r NICs side by side, for all groups of an axis communicate at once:

    all-gather, reduce-scatter   n (p-1)/p / busbw             busbw = min(inner, r x NIC)
    all-reduce                   twice that; between blocks once per block: 2 n (b-1)/b / (r x NIC), b blocks
    + hops x latency, growing from a protocol of small messages to one of large ones (LL, Simple; NCCL tuning.cc)
"""

from __future__ import annotations

import numpy as np

from phalanx.cost.stack.columns import Column
from phalanx.cost.stack.system import System, TierRates

_LARGE = 4.0
"""Latency per hop of a large message over that of a small one: chunks that fill the pipeline of copies."""


def together(p: Column, stride: Column, tier: TierRates) -> Column:
    """Ranks of a group in one block of a tier."""
    return np.minimum(p, np.maximum(np.floor(tier.ranks / stride), 1))


def collective_s(op: str, n: Column, p: Column, stride: Column, system: System) -> Column:
    """One all_reduce, all_gather, reduce_scatter or all_to_all of n bytes (DESIGN.md's counting); 0 for one rank."""
    p = np.maximum(p, 1)
    share = (p - 1) / p
    passes = 2 if op == "all_reduce" else 1
    inner = system.tiers[0]
    rate = inner.bytes_per_s_per_gpu_per_direction
    inside = together(p, stride, inner)
    gain = np.where(p >= 4, system.reduce_gain, 1.0) if op == "all_reduce" else 1.0
    seconds = passes * n * share / (rate * gain)
    hops = (p - np.ceil(p / inside)) * inner.hop_s
    members = inside
    for tier in system.tiers[1:]:
        blocks = np.ceil(p / members)
        rate = tier.bytes_per_s_per_gpu_per_direction
        if op == "all_to_all":
            across = n * (blocks - 1) / blocks / rate
        elif op == "all_reduce":
            across = 2 * n * (blocks - 1) / blocks / (members * rate)
        else:
            across = n * share / (members * rate)
        crossing = blocks > 1
        seconds = np.where(crossing, np.maximum(seconds, across), seconds)
        hops = hops + np.where(crossing, blocks, 0) * tier.hop_s
        members = together(p, stride, tier)
    small = passes * hops
    large = _LARGE * small
    ramp = small + (large - small) * seconds / np.maximum(seconds + large, 1e-30)
    return np.where(p > 1, seconds + ramp, 0.0)


def message_s(n: Column, stride: Column, system: System) -> Column:
    """n bytes from one rank to the one `stride` away."""
    found = n / system.tiers[0].bytes_per_s_per_gpu_per_direction + system.tiers[0].hop_s
    for below, tier in zip(system.tiers, system.tiers[1:], strict=False):
        beyond = n / tier.bytes_per_s_per_gpu_per_direction + tier.hop_s
        found = np.where(stride >= below.ranks, beyond, found)
    return found
