"""What compressed gradients send: the collectives of a bucket in order, and the bytes of each message.

    Codes               all-to-all of codes, each part summed by its owner; at zero 0 all-gather of the sums' codes
    GatheredElements    all-gather of elements and their indices, preceded by their number where gradients decide it
    Summed              all-reduces, e.g. of powersgd's P = M Q and of what is not sent as factors, then of Qᵀ = P̂ᵀ M

The rows of the compressors (spec/strategy/compressors.py) say how much.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.schedule.gradients.buckets import Bucket, slot_sizes
from phalanx.spec.job import DTYPE_BYTES, DType
from phalanx.spec.model.spec import Parameter
from phalanx.spec.strategy.compressors import (
    COUNT_BYTES,
    PLACE_BYTES,
    Codes,
    Compression,
    GatheredElements,
    Reduction,
)
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

PIECE = 1 << 15
"""Elements that are coded at a time, so that they stay in a core's cache."""


@dataclass(frozen=True)
class CompressedMessage:
    """One collective of a compressed bucket. `at_most`: `bytes` is an upper bound, since the amount depends on the
    gradients."""

    op: str
    axis: str
    dtype: str
    bytes: int
    at_most: bool = False


def reduction(cut: Sequence[Bucket], s: Strategy, element_bytes: int) -> Reduction:
    """Describe the reduction of these buckets for a compressor."""
    sizes = tuple(b.padded(s) for b in cut)
    slots = tuple(slot_sizes(list(sizes)))
    return Reduction(sizes, slots, tuple(b.parameters for b in cut), s.gradient_ranks, element_bytes)


def bucket_collectives(c: Compression, bucket: Bucket, s: Strategy, dtype: DType) -> tuple[CompressedMessage, ...]:
    """Return the collectives that reduce a bucket over its axis, in order. `dtype`: the type in which gradients
    accumulate."""
    grid, numel, e, p, row = mesh(s), bucket.padded(s), DTYPE_BYTES[dtype], s.gradient_ranks, c.row
    axis = grid.gradient_axis
    if isinstance(row, Codes):
        parts = s.shards if s.shards > 1 else p
        size = parts * row.message_bytes(numel // parts)
        first = CompressedMessage("all_to_all", grid.shard_axis if s.shards > 1 else axis, "uint8", size)
        return (first,) if s.shards > 1 else (first, CompressedMessage("all_gather", axis, "uint8", size))
    if isinstance(row, GatheredElements):
        size = p * row.elements(c, numel, p) * (e + PLACE_BYTES)
        elements = CompressedMessage("all_gather", axis, "uint8", size, at_most=row.counted)
        return (
            (CompressedMessage("all_gather", axis, "int64", p * COUNT_BYTES), elements)
            if row.counted
            else (elements,)
        )
    return tuple(CompressedMessage("all_reduce", axis, dtype, n * e) for n in row.sums(c, numel, bucket.parameters))


def replica_collectives(c: Compression, bucket: Bucket, s: Strategy) -> tuple[CompressedMessage, ...]:
    """Return the collectives that reduce a bucket's shard over its replicas (HSDP), in order: none if the bucket's
    own reduction includes the replicas."""
    if s.shards == 1 or s.dp_replicate == 1 or not c.quantised:
        return ()
    part = bucket.padded(s) // s.shards
    size = s.dp_replicate * c.codes.message_bytes(part // s.dp_replicate)
    return (
        CompressedMessage("all_to_all", "dp_replicate", "uint8", size),
        CompressedMessage("all_gather", "dp_replicate", "uint8", size),
    )


def outer_reduction(cut: Sequence[Bucket], s: Strategy) -> tuple[Strategy, tuple[Bucket, ...]]:
    """Return the reduction with which replicas that take steps alone synchronise, as (a strategy without shards,
    whose ranks are the replicas; its buckets). The change of a shard is one vector, whatever parameters it has parts
    of."""
    alone = Strategy(dp=s.dp_local, compression=s.compression)
    if s.shards == 1:
        return alone, tuple(cut)
    shards = ((b, Parameter(b.name, (b.padded(s) // b.parts(s),), "norm", b.unit)) for b in cut)
    return alone, tuple(replace(b, parameters=(part,)) for b, part in shards)


def outer_collectives(bucket: Bucket, alone: Strategy, dtype: DType) -> tuple[CompressedMessage, ...]:
    """Return the collectives that reduce a bucket of `outer_reduction` over the replicas, in order."""
    assert alone.compressor is not None
    messages = bucket_collectives(alone.compressor, bucket, alone, dtype)
    return tuple(replace(x, axis="dp_local") for x in messages)
