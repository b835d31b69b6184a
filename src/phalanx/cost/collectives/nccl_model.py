"""Seconds of NCCL's collectives on the tiers of links that their groups span.

A group of p ranks at distance `stride` has r of them in each block of the innermost tier. Inside a block, each rank
has its own link; between blocks, the r ranks of a block use r NICs side by side, since all groups of an axis
communicate at once:

    all-gather, reduce-scatter   n (p-1)/p / busbw             busbw = min(inner, r x NIC)
    all-reduce, a ring           both of these
    all-reduce, a tree           2 n / (r x NIC), up and down; two blocks send both at once: n / min(r x NIC, tree)
    all-reduce, switches (NVLS)  reduce in each block first: 2 n (b-1)/b / (r x NIC)
    + hops x latency             p-1 hops of a ring; the slowest chunk takes one out of every block; from
                                 block to block of a tree

If switches do not reduce, the faster of ring and tree is used, as NCCL does: between two nodes with slow ports the
tree, with fast ones the ring, because a tree's channel carries little (NCCL, src/graph/tuning.cc, perChMaxTreeBws). A
hop of a small chunk (n/p) takes `hop_s`, of a large one `bulk_hop_s`: NCCL's protocols for small messages (LL) and
for large ones (Simple), which waits for a receiver's memory at every hop. A large message starts `start_s` later,
whatever the number of ranks.
"""

import itertools

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System, TierRates


def ranks_per_block(p: Column, stride: Column, tier: TierRates) -> Column:
    """Return the number of ranks of a group of p at distance `stride` in one block of a tier."""
    return np.minimum(p, np.maximum(np.floor(tier.ranks / stride), 1))


def collective_s(op: str, n: Column, p: Column, stride: Column, system: System) -> Column:
    """Return seconds of one all_reduce, all_gather, reduce_scatter or all_to_all of n bytes (counted as Event.bytes)
    over p ranks at distance `stride`; 0 for one rank."""
    result = _spanning(op, n, p, stride, system)
    if op != "all_reduce" or not np.any(system.tree):
        return result
    ring = 2 * _spanning("reduce_scatter", n, p, stride, system)
    return np.where(np.asarray(system.tree) > 0, np.minimum(result, ring), result)


def _spanning(op: str, n: Column, p: Column, stride: Column, system: System) -> Column:
    """Return the seconds of a collective over one or several blocks; an all-reduce by switches, or by a tree."""
    p = np.maximum(p, 1)
    share, chunk = (p - 1) / p, n / p
    reduces = op == "all_reduce"
    passes = 2 if reduces else 1
    # Inside the innermost tier.
    inner = system.tiers[0]
    members = per_block = ranks_per_block(p, stride, inner)
    gain = np.where(per_block >= 4, system.reduce_gain, 1.0) if reduces else 1.0
    seconds = passes * n * share / (inner.bytes_per_s_per_gpu_per_direction * gain)
    latency = (
        passes * np.maximum(p - 1 - _leaving(np.ceil(p / per_block), p), 0) * _hop_s(inner, chunk, reduces, system)
    )
    if reduces:
        latency = passes * (per_block - 1) * _hop_s(inner, chunk, reduces, system)
    # Across each further tier that the group spans; the slowest tier sets the rate.
    for tier in system.tiers[1:]:
        blocks = np.ceil(p / members)
        crossing = blocks > 1
        if not np.any(crossing):  # as for most groups of tensor parallelism
            members = ranks_per_block(p, stride, tier)
            continue
        rate = tier.bytes_per_s_per_gpu_per_direction
        if op == "all_to_all":
            across = n * (blocks - 1) / blocks / rate
        elif reduces:
            ports = members * rate * system.reduce_across
            tree = np.where(blocks > 2, 2 * n / ports, n / np.minimum(ports, np.maximum(system.tree, 1.0)))
            across = np.where(np.asarray(system.tree) > 0, tree, 2 * n * (blocks - 1) / blocks / ports)
        else:
            across = n * share / (members * rate)
        hops = np.minimum(blocks - 1, 2 * np.log2(blocks)) if reduces else _leaving(blocks, p)
        seconds = np.where(crossing, np.maximum(seconds, across), seconds)
        latency = latency + passes * hops * _hop_s(tier, chunk, reduces, system)
        members = ranks_per_block(p, stride, tier)
    start = system.start_s * n / (n + system.bulk_reduce_bytes) if np.any(system.start_s) else 0.0
    return np.where(p > 1, seconds + latency + start, 0.0)


def _leaving(blocks: Column, p: Column) -> Column:
    """Return the hops between blocks of a ring's slowest chunk: one out of every block, or p - 1 if a block is one
    rank."""
    return np.where(blocks > 1, np.minimum(blocks, p - 1), 0)


def _hop_s(tier: TierRates, chunk: Column, reduces: bool, system: System) -> Column:
    """Return seconds of one hop of a chunk, between the latencies of small and of large chunks."""
    bulk = tier.bulk_reduce_hop_s if reduces else tier.bulk_hop_s
    half = system.bulk_reduce_bytes if reduces else system.bulk_bytes
    return tier.hop_s + (bulk - tier.hop_s) * chunk / (chunk + half)


def message_s(n: Column, stride: Column, system: System, chain: Column = 1) -> Column:
    """Return seconds of a message of n bytes between ranks `stride` apart, over the slowest hop of a chain of `chain`
    such ranks: a chain longer than a block leaves it somewhere, however close neighbours are."""
    inner = system.tiers[0]
    result = _sent(n, inner, system)
    for below, tier in itertools.pairwise(system.tiers):
        leaves = (stride >= below.ranks) | (stride * chain > below.ranks)
        result = np.where(leaves, _sent(n, tier, system), result)
    return result


def _sent(n: Column, tier: TierRates, system: System) -> Column:
    """Return seconds of n bytes over one link of a tier."""
    return n / tier.bytes_per_s_per_gpu_per_direction + _hop_s(tier, n, False, system)
