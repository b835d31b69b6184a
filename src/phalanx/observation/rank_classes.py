"""Classes of ranks: ranks whose steps cannot differ form a class, and one of them is examined for all.

The classes of our own strategies are known in advance (`classes`): ranks of a data-parallel, tensor-parallel or ring
group issue the same events with other peers. They differ in

    shards      where a bucket is padded to equal shards, the last ones hold fewer elements or none: full shards and
                shards with padding, of which the last holds least; for experts likewise, over their own ranks
    ring        key blocks before a rank's queries have other shapes than those after: first, last, and between
    pipeline    every stage has its own units and its own order of actions

An optimizer that needs whole matrices sends other bytes from every rank, by the matrices that it owns: of a class the
bytes of one rank are examined, and all are cut by the same function (schedule/gradients/whole_matrices.py).

The classes of an unknown program are found by following its messages (`observe_classes`). Ranks that send each other
messages (pipelines, rings) may do different work; ranks of one group of collectives do the same, but for uneven
shards. So rank 0 is observed, then every rank that it exchanges messages with, directly or through others; and the
same from the last rank, which holds the smallest shards. Ranks that did the same are a class.

Of the last rank, only the step before the wanted one is observed if that equals the step of a rank observed in full:
it contains whatever a rank does differently. The ranks that it exchanges messages with are then as far from ranks
observed in full, and if their first micro-batch, parameters and live bytes equal theirs, so does their step.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

import numpy as np

from phalanx.schedule.layout import Layout, RankView
from phalanx.schedule.observation import RankObservation

SECOND_MICRO_BATCH, WANTED_STEP, END = range(3)
"""Places in an observed program where a rank may pause, in the order in which it reaches them."""
_MOST_RANKS = 128
"""The most ranks that are observed to find classes."""


@dataclass(frozen=True)
class RankClass:
    """A class of `count` ranks, represented by `rank`; `description`: which ranks these are."""

    rank: int
    count: int
    description: str


def classes(layout: Layout) -> tuple[RankClass, ...]:
    """Return the classes of a layout's ranks."""
    s, grid = layout.strategy, layout.mesh
    shard, expert_shard, at_pp = grid.along(grid.shard_axis), grid.along("edp"), grid.along("pp")
    in_ring = np.sign(grid.along("ring")) + (grid.along("ring") == s.ring - 1) * (s.ring > 1)
    result = []
    for place in range(s.pp):
        full, full_experts = _full(layout.stage_view(place))
        for pads, experts_pad, at in product((False, True), (False, True), range(3)):
            alike = ((shard >= full) == pads) & ((expert_shard >= full_experts) == experts_pad)
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
    """Return the number of shards of a pipeline stage without padding: (of ordinary buckets, of experts)."""
    s = view.strategy
    full = [s.world, s.world]
    for b in view.buckets if s.shards > 1 else ():
        full[b.experts] = min(full[b.experts], b.numel // (b.padded(s) // b.parts(s)))
    return full[0], full[1]


_PLACES = ("first in the ring", "within the ring", "last in the ring")
_SHARDS = ("full shards", "shards with padding")
_EXPERTS = ("full shards of experts", "shards of experts with padding")


@dataclass(frozen=True)
class MatchedRank:
    """A rank whose step before the wanted one equals that of `rank`, which was observed in full; `peers`: the ranks
    that it exchanged messages with."""

    rank: int
    peers: tuple[int, ...]


class RankObserver(Protocol):
    """An observer of ranks: program/processes.py."""

    def start(self, rank: int, until: int = END) -> None:
        """Begin to observe a rank that will be needed, up to the place where it must pause."""

    def observe(self, rank: int) -> RankObservation:
        """Return what a rank did."""

    def observe_or_match(self, rank: int, like: int | None = None) -> RankObservation | MatchedRank:
        """Return what a rank did, or MatchedRank if it equals a rank that was observed; `like` is that rank if their
        first micro-batches are equal."""


def observe_classes(ranks: RankObserver, world: int) -> tuple[RankObservation, ...]:
    """Return one observation of each class of ranks, with the number of its ranks."""
    ranks.start(world - 1, WANTED_STEP)
    distance: int | None = None  # from the last rank to the one that it equals
    first: dict[int, RankObservation] = {}
    last: dict[int, RankObservation] = {}

    def in_full(rank: int) -> tuple[int, ...]:
        first[rank] = ranks.observe(rank)
        return peers_of(first[rank])

    def or_matched(rank: int) -> tuple[int, ...]:
        nonlocal distance
        like = rank - distance if distance is not None else None
        seen = ranks.observe_or_match(rank, like if like in first else None)
        if rank == world - 1 and isinstance(seen, MatchedRank):
            distance = rank - seen.rank
        last[rank] = ranks.observe(seen.rank) if isinstance(seen, MatchedRank) else seen
        return seen.peers if isinstance(seen, MatchedRank) else peers_of(seen)

    def begin(rank: int) -> None:
        ranks.start(rank, WANTED_STEP if distance is None else SECOND_MICRO_BATCH)

    _follow(0, in_full, lambda rank: ranks.start(rank), set())
    if world - 1 not in first:
        _follow(world - 1, or_matched, begin, set(first))
    share = world // len(first)  # ranks for each place in a pipeline or ring
    classes: dict[object, list[int]] = {}
    observations: dict[object, RankObservation] = {}
    for rank, r in (*first.items(), *last.items()):
        key = work(r)
        classes.setdefault(key, []).append(rank)
        observations.setdefault(key, r)
    # Ranks that were not observed are counted with the first pipeline or ring; the last one has as many places.
    counts = Counter[object]()
    for place, rank in enumerate(sorted(first)):
        counts[work(first[rank])] += share - (place < len(last))
    counts.update(work(r) for r in last.values())
    largest = max(counts, key=lambda key: counts[key])
    counts[largest] -= counts.total() - world
    return tuple(
        replace(observations[key], count=counts[key], are=_are(counts[key], world, sorted(alike)))
        for key, alike in classes.items()
    )


def peers_of(r: RankObservation) -> tuple[int, ...]:
    """Return the ranks that a rank exchanged messages with."""
    return tuple(sorted({o.event.peer for o in r.events if o.event.peer is not None}))


def _follow(
    rank: int, observe: Callable[[int], tuple[int, ...]], begin: Callable[[int], None], known: set[int]
) -> None:
    """Observe a rank and all that it exchanges messages with, directly or through others, except `known` ones."""
    waiting, seen = [rank], set(known)
    while waiting and len(seen) - len(known) < _MOST_RANKS:
        rank = waiting.pop(0)
        if rank in seen:
            continue
        seen.add(rank)
        peers = [peer for peer in observe(rank) if peer not in seen]
        for peer in peers:
            begin(peer)
        waiting += peers


def _are(count: int, world: int, ranks: list[int]) -> str:
    if count == world:
        return f"all {world} ranks" if world > 1 else "the only rank"
    named = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"{count} rank{'s' if count > 1 else ''}; observed: {named}"


def work(r: RankObservation) -> object:
    """Return what a rank did, leaving out its peers, which differ between ranks that do the same."""
    events = tuple((o.event.identity._replace(peer=None), o.event.flops, o.module) for o in r.events)
    return events, r.peak, tuple(r.flops.items())
