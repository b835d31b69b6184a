"""Which ranks of an unknown program stand for all: found by following its messages.

Ranks that send each other messages (pipelines, rings) may do different work; those of one group of collectives do the
same, but for uneven shards. So rank 0 is observed, then every rank that it exchanges messages with, directly or
through others; and the same from the last rank, which holds the smallest shards. Ranks that did the same are a class.

Of the last rank, only the step before the wanted one is observed where that is the step of a rank observed in full:
it holds what a rank does differently. The ranks that it exchanges messages with then lie as far from ranks observed
in full as it does, and where their first micro-batch, parameters and live bytes are those of these, so is their step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from phalanx.schedule.observation import RankObservation

SECOND_MICRO_BATCH, WANTED_STEP, END = range(3)
"""Where a rank pauses, and how far it may go."""
_MOST = 128
"""Ranks at most that are observed to find classes."""


@dataclass(frozen=True)
class Alike:
    """A rank whose step before the wanted one is that of `rank`, which was observed in full; `peers`: the ranks that
    it exchanged messages with."""

    rank: int
    peers: tuple[int, ...]


class Ranks(Protocol):
    """What observes ranks: processes.py."""

    def start(self, rank: int, until: int = END) -> None:
        """Begin to observe a rank that will be asked for, up to the place where it is to pause."""

    def observe(self, rank: int) -> RankObservation:
        """Return what a rank did."""

    def observe_or_match(self, rank: int, like: int | None = None) -> RankObservation | Alike:
        """Return what a rank did, or that it does what one of the ranks does that were observed, `like` if that is
        so in its first micro-batch."""


def observe_classes(ranks: Ranks, world: int) -> tuple[RankObservation, ...]:
    """Return one observation of each class of ranks, with how many ranks it stands for."""
    ranks.start(world - 1, WANTED_STEP)
    apart: int | None = None  # from the last rank to the one that it is like
    first: dict[int, RankObservation] = {}
    last: dict[int, RankObservation] = {}

    def in_full(rank: int) -> tuple[int, ...]:
        first[rank] = ranks.observe(rank)
        return peers_of(first[rank])

    def or_matched(rank: int) -> tuple[int, ...]:
        nonlocal apart
        like = rank - apart if apart is not None else None
        seen = ranks.observe_or_match(rank, like if like in first else None)
        if rank == world - 1 and isinstance(seen, Alike):
            apart = rank - seen.rank
        last[rank] = ranks.observe(seen.rank) if isinstance(seen, Alike) else seen
        return seen.peers if isinstance(seen, Alike) else peers_of(seen)

    def begin(rank: int) -> None:
        ranks.start(rank, WANTED_STEP if apart is None else SECOND_MICRO_BATCH)

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
    # Ranks that were not observed are counted with those of the first pipeline or ring.
    counts = {key: sum(share if rank in first else 1 for rank in alike) for key, alike in classes.items()}
    for key, alike in classes.items():
        counts[key] -= sum(rank in last for rank in alike) if any(rank in first for rank in alike) else 0
    extra = sum(counts.values()) - world
    largest = max(counts, key=lambda key: counts[key])
    counts[largest] -= extra
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
    """Observe a rank and all that it exchanges messages with, directly or through others, but for those `known`."""
    waiting, seen = [rank], set(known)
    while waiting and len(seen) - len(known) < _MOST:
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
    """Return what a rank did, without what differs between ranks that do the same: who its peers are."""
    events = tuple((o.event.identity._replace(peer=None), o.event.flops, o.module) for o in r.events)
    return events, r.peak, tuple(r.flops.items())
