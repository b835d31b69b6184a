"""Which ranks to look at: one of each class, a class being ranks whose events cannot differ.

Data-parallel ranks issue the same events, and so do tensor-parallel ranks, who hold tensors of the same shapes. What
differs is what they hold: where a bucket is padded to equal shards, the last shards hold less, maybe nothing at all
of some bucket. So there are at most two classes, shards that are full and shards that are not, of which the last
holds least.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.schedule.buckets import buckets
from phalanx.spec.job import Job
from phalanx.spec.model import ModelSpec
from phalanx.spec.strategy import Strategy


@dataclass(frozen=True)
class RankClass:
    """`rank` stands for `count` ranks, for they `are` so."""

    rank: int
    count: int
    are: str


def classes(spec: ModelSpec, job: Job, s: Strategy) -> tuple[RankClass, ...]:
    """The classes of a strategy's ranks, each with the rank that stands for it."""
    if s.stage == 0:
        return (RankClass(0, s.world, "alike"),)
    sizes = [(b.numel, b.padded(s) // s.dp_shard) for b in buckets(spec, job, s)]
    full = min(numel // part for numel, part in sizes)  # shards without padding
    if full == s.dp_shard:
        return (RankClass(0, s.world, "alike"),)
    of_each = s.world // s.dp_shard
    found = [RankClass(0, full * of_each, "full shards")] if full else []
    return (*found, RankClass(s.world - 1, (s.dp_shard - full) * of_each, "shards with padding"))
