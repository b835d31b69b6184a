"""Classes of ranks: ranks whose events cannot differ form a class, and verifying one of them verifies all.

Ranks of a data-parallel, tensor-parallel or ring group issue the same events but for the names of their peers. They
differ in

    shards      where a bucket is padded to equal shards, the last ones hold fewer elements or none: full shards and
                shards with padding, of which the last holds least; for experts likewise, over their own ranks
    ring        key blocks before a rank's queries have other shapes than those after: first, last, and between
    pipeline    every stage has its own units and its own order of actions
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from phalanx.schedule.layout import Layout, RankView


@dataclass(frozen=True)
class RankClass:
    """A class of `count` ranks, of which `rank` is examined; `description` says which they are."""

    rank: int
    count: int
    description: str


def classes(layout: Layout) -> tuple[RankClass, ...]:
    """Return the classes of a layout's ranks, each with the rank that stands for it."""
    s, grid = layout.strategy, layout.mesh
    shard, of_experts, at_pp = grid.along(grid.shard_axis), grid.along("edp"), grid.along("pp")
    in_ring = np.sign(grid.along("ring")) + (grid.along("ring") == s.ring - 1) * (s.ring > 1)
    result = []
    for place in range(s.pp):
        full, full_experts = _full(layout.stage_view(place))
        for pads, experts_pad, at in product((False, True), (False, True), range(3)):
            alike = ((shard >= full) == pads) & ((of_experts >= full_experts) == experts_pad)
            ranks = np.flatnonzero((at_pp == place) & alike & (in_ring == at))
            if len(ranks):
                names = [f"pp {place}"] * (s.pp > 1) + [_PLACES[at]] * (s.ring > 1)
                names += [_SHARDS[pads]] * bool(0 < full < s.shards or pads)
                names += [_EXPERTS[experts_pad]] * bool(0 < full_experts < s.edp or experts_pad)
                # The last padded shard holds least.
                last = pads or experts_pad
                result.append(RankClass(int(ranks[-1 if last else 0]), len(ranks), ", ".join(names) or "alike"))
    return tuple(result)


def _full(view: RankView) -> tuple[int, int]:
    """Return how many shards of a pipeline stage have no padding: (those of ordinary buckets, those of experts)."""
    s = view.strategy
    full = [s.world, s.world]
    for b in view.buckets if s.shards > 1 else ():
        full[b.experts] = min(full[b.experts], b.numel // (b.padded(s) // b.parts(s)))
    return full[0], full[1]


_PLACES = ("first in the ring", "within the ring", "last in the ring")
_SHARDS = ("full shards", "shards with padding")
_EXPERTS = ("full shards of experts", "shards of experts with padding")
