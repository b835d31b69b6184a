"""The cost of compressing gradients on a rank: memory throughout the step, and work added to the backward pass.

Both follow runtime/compression tensor by tensor: e is the size of an element of the accumulate type, N a bucket's
padded elements, p the ranks that reduce it.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cost.compute.unit_work import Work
from phalanx.schedule.gradients.buckets import Bucket, slot_sizes
from phalanx.schedule.gradients.compression import (
    COUNT_BYTES,
    PIECE,
    PLACE_BYTES,
    coded,
    elements_sent,
    factors,
    max_elements,
)
from phalanx.spec.strategy.compression import BLOCK, Compression
from phalanx.spec.strategy.spec import Strategy

_INDEX_BYTES = 8  # of torch's index tensors


def held_bytes(c: Compression, cut: Sequence[Bucket], s: Strategy, e: int) -> int:
    """Return bytes held throughout the step: residuals, messages of two neighbouring buckets, scratch."""
    sizes = [b.padded(s) for b in cut]
    total, largest, slots = sum(sizes), max(sizes), slot_sizes(sizes)
    residual = total * e * c.feedback
    if c.quantised:
        return residual + _quantised(c, sizes, s, e)
    if c.name == "powersgd":
        sent = 0
        for b in cut:
            matrices, rest = factors(c, b)
            sent += sum((f.n + f.m) * f.r for f in matrices) + sum(p.numel for p in rest)
        return residual + sent * e
    element = e + PLACE_BYTES
    if c.name == "topk":
        messages = sum(s.gradient_ranks * elements_sent(c, n) * element for n in slots)
        return residual + messages + largest * e + 3 * elements_sent(c, largest) * (e + _INDEX_BYTES)
    if c.name == "randk":
        return residual + sum(elements_sent(c, n) * (e + _INDEX_BYTES) for n in slots) + elements_sent(c, largest) * 8
    p = s.gradient_ranks
    limits = [max_elements(n, p) for n in slots]
    counts = p * COUNT_BYTES * sum(n > 0 for n in limits)
    return residual + sum(limits) * (p * element + e + _INDEX_BYTES) + counts + largest * e


def scratch_bytes(c: Compression, cut: Sequence[Bucket], e: int) -> int:
    """Return the most bytes that coding allocates temporarily: a piece of 2^15 elements and its copies; with
    PowerSGD, also the orthonormal factor of a matrix and the workspace of its decomposition."""
    if c.name != "powersgd":
        return 8 * PIECE
    return 8 * PIECE + 3 * e * max((f.n * f.r for b in cut for f in factors(c, b)[0]), default=0)


def _quantised(c: Compression, sizes: list[int], s: Strategy, e: int) -> int:
    """Return bytes of scratch, messages and second residuals of a quantising compressor."""
    p = s.shards if s.effective_zero else s.gradient_ranks
    part = sum(sizes) // p
    scratch = (PIECE * (1 + c.stochastic) + PIECE // BLOCK) * e
    messages = 2 * sum(slot_sizes([p * coded(c, n // p) for n in sizes]))
    if s.effective_zero == 0:
        return scratch + messages + part * e * c.feedback
    if s.dp_replicate == 1:
        return scratch + messages
    across = sum(2 * s.dp_replicate * coded(c, n // p // s.dp_replicate) for n in sizes)
    return scratch + messages + across + (part + part // s.dp_replicate) * e * c.feedback


def work(c: Compression, cut: Sequence[Bucket], s: Strategy, e: int) -> Work:
    """Return the work of coding for one reduction of all these buckets."""
    n = sum(b.padded(s) for b in cut)
    return Work(traffic_bytes=passes(c, s) * n * e, kernels=20 * len(cut))


def passes(c: Compression, s: Strategy) -> float:
    """Return the passes over the reduced elements that coding takes: reads and writes of its operations, weighted by
    the time of each on a CPU relative to a plain pass over memory, with scratch in cache."""
    feedback = 3 if c.feedback else 0  # adding the residual; writing it back is counted with each kind
    if c.quantised:
        p = s.shards if s.effective_zero else s.gradient_ranks
        narrow = 4 if c.name == "int4" else 0  # two codes per byte
        write = (8 if c.scaled else 4) + narrow + ((5 + narrow) if c.feedback else 0)
        add, read = 4 + narrow, 3 + narrow
        total: float = feedback + write + add
        if s.effective_zero == 0:
            total += (feedback + write) / p + read
        elif s.dp_replicate > 1:
            total += (feedback + write + add + (feedback + write) / s.dp_replicate + read) / p
        return total
    if c.name == "powersgd":  # M is read for P and for Q, the result and the residual written
        return 5 + feedback + (3 if c.feedback else 0)
    return {"topk": 23, "randk": 1, "threshold": 20}[c.name] + feedback + (2 if c.feedback else 0) + 1
