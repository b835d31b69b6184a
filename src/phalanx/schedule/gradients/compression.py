"""What compressed gradients send: the collectives of a bucket in order, and the bytes of each message.

fp16, bf16, int8, int4   all-to-all of codes, each part summed by its owner; at zero 0 all-gather of the sums' codes
topk                     all-gather of the largest elements and their indices
randk                    all-reduce of the drawn elements, whose indices every rank knows
threshold                all-gather of the counts, then of the elements and their indices
powersgd                 all-reduce of P = M Q and of what is not sent as factors, then of Qᵀ = P̂ᵀ M
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from phalanx.schedule.gradients.buckets import Bucket
from phalanx.spec.job import DTYPE_BYTES, DType
from phalanx.spec.model.spec import Parameter
from phalanx.spec.strategy.compression import BLOCK, Compression
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

SCALE_BYTES = 4
PLACE_BYTES = 4
COUNT_BYTES = 8
PIECE = 1 << 15
"""Elements that are coded at a time, so that they stay in a core's cache."""


@dataclass(frozen=True)
class Sent:
    """One collective. `at_most`: `bytes` is a bound, since the gradients decide how much is sent."""

    op: str
    axis: str
    dtype: str
    bytes: int
    at_most: bool = False


def coded(c: Compression, numel: int) -> int:
    """Return the bytes of the codes (and scales) of `numel` elements, a multiple of BLOCK."""
    return numel // BLOCK * SCALE_BYTES * c.scaled + numel * c.bits // 8


def elements_sent(c: Compression, numel: int) -> int:
    """Return how many elements of a bucket topk and randk send: an even number, so that what follows is aligned."""
    return min(numel + numel % 2, 2 * ceil(c.value * numel / 2))


def max_elements(numel: int, ranks: int) -> int:
    """Return the most elements that a rank sends under threshold: one in `ranks`. More would cost more than sending
    everything: p messages of n/p indices and values outweigh the 2 (p-1)/p n values of an all-reduce."""
    return 2 * ceil(numel / ranks / 2)


@dataclass(frozen=True)
class Factors:
    """A gradient matrix (n, m), sent as the product of factors (n, r) and (r, m)."""

    parameter: Parameter
    n: int
    m: int
    r: int


def factors(c: Compression, bucket: Bucket) -> tuple[tuple[Factors, ...], tuple[Parameter, ...]]:
    """Split a bucket into the parameters that are sent as factors, and those that are sent as they are: vectors, and
    matrices whose factors would not be smaller."""
    matrices, rest = [], []
    for p in bucket.parameters:
        n, m = (p.shape[0], prod(p.shape[1:])) if len(p.shape) > 1 else (1, 1)
        r = min(int(c.value), n, m)
        if r * (n + m) < n * m:
            matrices.append(Factors(p, n, m, r))
        else:
            rest.append(p)
    return tuple(matrices), tuple(rest)


def bucket_collectives(c: Compression, bucket: Bucket, s: Strategy, dtype: DType) -> tuple[Sent, ...]:
    """Return the collectives that reduce a bucket over its axis, in order. `dtype`: what gradients accumulate in."""
    grid, numel, e = mesh(s), bucket.padded(s), DTYPE_BYTES[dtype]
    axis = grid.gradient_axis
    if c.quantised:
        parts = s.shards if s.effective_zero else s.gradient_ranks
        size = parts * coded(c, numel // parts)
        first = Sent("all_to_all", grid.shard_axis if s.effective_zero else axis, "uint8", size)
        return (first,) if s.effective_zero else (first, Sent("all_gather", axis, "uint8", size))
    if c.name == "topk":
        return (Sent("all_gather", axis, "uint8", s.gradient_ranks * elements_sent(c, numel) * (e + PLACE_BYTES)),)
    if c.name == "randk":
        return (Sent("all_reduce", axis, dtype, elements_sent(c, numel) * e),)
    if c.name == "threshold":
        p = s.gradient_ranks
        return (
            Sent("all_gather", axis, "int64", p * COUNT_BYTES),
            Sent("all_gather", axis, "uint8", p * max_elements(numel, p) * (e + PLACE_BYTES), at_most=True),
        )
    matrices, rest = factors(c, bucket)
    left = sum(f.n * f.r for f in matrices) + sum(p.numel for p in rest)
    right = sum(f.m * f.r for f in matrices)
    return tuple(Sent("all_reduce", axis, dtype, n * e) for n in (left, right) if n)


def replica_collectives(c: Compression, bucket: Bucket, s: Strategy) -> tuple[Sent, ...]:
    """Return the collectives that reduce a bucket's shard over its replicas (HSDP), in order: none if the bucket's
    own reduction includes the replicas."""
    if s.effective_zero == 0 or s.dp_replicate == 1 or not c.quantised:
        return ()
    part = bucket.padded(s) // s.shards
    size = s.dp_replicate * coded(c, part // s.dp_replicate)
    return (Sent("all_to_all", "dp_replicate", "uint8", size), Sent("all_gather", "dp_replicate", "uint8", size))
