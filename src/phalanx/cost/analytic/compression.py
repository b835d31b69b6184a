"""Compressed gradients of a step: the collective that each kind needs, the cost of coding, and when it saves time.

    dense        all-reduce of n g bytes, g of an element               2 (p-1)/p n g / busbw
    codes        fp16, bf16, int8, int4: all-to-all, and at zero=0      2 (p-1)/p n x / busbw
                 an all-gather of the sums
    sparse       topk, threshold: all-gather of every rank's            (p-1) n (v g + x) / busbw
                 elements and their places
    smaller      randk, powersgd: all-reduce of what remains            2 (p-1)/p n v g / busbw

v: elements sent per gradient element; x: further bytes per element (4 for an index, scales, codes). The received
bytes grow with p for sparse kinds, but not for a dense all-reduce: by bytes alone, sparse pays up to p = 2 g / (v g +
x).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic.profile import Profile
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.compressed import CODES, Compressed

LARGEST_GROUP = 4096
"""The largest group for which `payment` computes whether compression pays."""


def coding_s(c: Compressed, n: Column, g: Column, p: Column, system: System) -> Column:
    """Return seconds of coding n elements of g bytes and decoding the received ones; if sparse, the elements from all
    p ranks are added one by one."""
    received = np.where(c.sparse, p * (c.sent(g) + 2 * c.values * g), 0.0)
    return n * (c.passes * g + received) / (system.memory_bytes_per_s * system.memory)


Over = Callable[[str, Column, Column, Column, Column], Column]
"""Seconds of an operation on all gradients, from: op, bytes per element, ranks, their distance, and bytes per element
by which buckets are cut."""


def compressed_reduction(
    c: Compressed,
    over: Over,
    g: Column,
    sharded: Column,
    all_ranks: tuple[Column, Column],
    shards: tuple[Column, Column],
    replicas: tuple[Column, Column],
) -> tuple[Column, Column]:
    """Return seconds of reduction among shards, and among all replicas. Groups are (ranks, distance). Codes are
    reduced as ZeRO's gradients are; sparse and smaller gradients are reduced unsharded, and each rank keeps its
    shard."""
    size, unsharded = c.sent(g), ~np.asarray(sharded)
    parts = np.where(unsharded, 1, shards[0])
    ranks, distance = (np.where(unsharded, a, r) for a, r in zip(all_ranks, replicas, strict=True))
    codes = [over(op, size / parts, ranks, distance, g / parts) for op in ("all_to_all", "all_gather")]
    sums = np.where(ranks > 1, codes[0] + codes[1], 0.0)
    scatter = np.where(unsharded, 0.0, over("all_to_all", size, *shards, g))
    sparse = over("all_gather", all_ranks[0] * size, *all_ranks, g)
    smaller = over("all_reduce", size, *all_ranks, g)
    kind = np.asarray(c.kind, dtype=int)
    return np.where(kind == CODES, scatter, 0.0), np.choose(kind, [0.0 * sums, sums, sparse, smaller])


@dataclass(frozen=True)
class Payment:
    """The gradient exchange of a step, compressed or not. `dense_s`: without compression; `sent_s`, `coding_s`: with
    it. `ranks`: the fewest and the most ranks, from 2 to LARGEST_GROUP, with which it pays, or None. `by_bytes`: for
    sparse kinds, the most ranks with which it pays by bytes alone."""

    dense_s: float
    sent_s: float
    coding_s: float
    ranks: tuple[int, int] | None
    by_bytes: float | None


def payment(c: Compressed, n: float, p: int, stride: float, system: System, profile: Profile) -> Payment:
    """Compare the compressed exchange of n gradients over p ranks with a dense all-reduce."""
    g = profile.gradient_bytes

    def over(op: str, size: Column, ranks: Column, distance: Column, cut: Column) -> Column:
        buckets = np.maximum(np.ceil(n * cut / profile.bucket_bytes), 1)
        return buckets * collective_s(op, n * size / buckets, ranks, distance, system)

    def all_of(ranks: Column) -> tuple[Column, Column, Column]:
        group = (ranks, stride)
        _, sent = compressed_reduction(c, over, g, False, group, group, group)
        return over("all_reduce", g, *group, g), sent, coding_s(c, n, g, ranks, system)

    many = np.arange(2, LARGEST_GROUP + 1)
    dense, sent, coding = all_of(many)
    pays = many[sent + coding < dense]
    ranks = (int(pays[0]), int(pays[-1])) if len(pays) else None
    dense_s, sent_s, code_s = (float(part) for part in all_of(p))
    return Payment(dense_s, sent_s, code_s, ranks, float(c.pays_by_bytes(g)) if c.sparse else None)
