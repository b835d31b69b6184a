"""Which ranks to look at: one of each class, a class being ranks whose events cannot differ.

Data-parallel ranks issue the same events, and so do tensor-parallel ranks, who hold tensors of the same shapes, and
those of a ring, but for the names of their peers. What differs is what they hold: where a bucket is padded to equal
shards, the last shards hold less, maybe nothing at all of some bucket. So there are shards that are full and shards
that are not, of which the last holds least. And in a ring, blocks of keys that stand before a rank's queries have
other shapes than those behind: there are its first rank, its last one, and those between. Every place of a pipeline
has its own units and its own order of actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.schedule.buckets import buckets
from phalanx.schedule.stages import stage
from phalanx.spec.job import Job
from phalanx.spec.mesh import mesh
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
    grid = mesh(s)
    shard, at_pp = grid.along(grid.shard_axis), grid.along("pp")
    in_ring = np.sign(grid.along("ring")) + (grid.along("ring") == s.ring - 1) * (s.ring > 1)
    found = []
    for place in range(s.pp):
        full = s.world  # shards without padding
        if s.stage:
            held = buckets(stage(spec, s, place), job, s)
            full = min(b.numel // (b.padded(s) // s.shards) for b in held)
        for pads in (False, True):
            for at in range(3):
                ranks = np.flatnonzero((at_pp == place) & ((shard >= full) == pads) & (in_ring == at))
                if len(ranks):
                    names = [f"pp {place}"] * (s.pp > 1) + [_PLACES[at]] * (s.ring > 1)
                    names += [_SHARDS[pads]] * bool(0 < full < s.shards or pads)
                    # Of padded shards the last one holds least.
                    found.append(RankClass(int(ranks[-1 if pads else 0]), len(ranks), ", ".join(names) or "alike"))
    return tuple(found)


_PLACES = ("first in the ring", "within the ring", "last in the ring")
_SHARDS = ("full shards", "shards with padding")
