"""Which ranks of an unknown program stand for all: found by following its messages.

Ranks that send each other messages (pipelines, rings) may do different work; those of one group of collectives do the
same, but for uneven shards. So rank 0 is observed, then every rank that it exchanges messages with, directly or
through others; and the same from the last rank, which holds the smallest shards. Ranks that did the same are a class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phalanx.schedule.observation import RankObservation

_MOST = 128
"""Ranks at most that are observed to find classes."""


def observe_classes(
    observe: Callable[[int], RankObservation], start: Callable[[int], None], world: int
) -> tuple[RankObservation, ...]:
    """Return one observation of each class of ranks, with how many ranks it stands for. `start` begins to observe a
    rank whose observation will be asked for."""
    start(world - 1)
    first = _connected(observe, start, 0)
    last = {} if world == 1 else _connected(observe, start, world - 1, set(first))
    share = world // len(first)  # ranks for each place in a pipeline or ring
    classes: dict[object, list[RankObservation]] = {}
    for r in (*first.values(), *last.values()):
        classes.setdefault(_work(r), []).append(r)
    # Ranks that were not observed are counted with those of the first pipeline or ring.
    counts = {key: sum(share if r.rank in first else 1 for r in alike) for key, alike in classes.items()}
    for key, alike in classes.items():
        counts[key] -= sum(r.rank in last for r in alike) if any(r.rank in first for r in alike) else 0
    extra = sum(counts.values()) - world
    largest = max(counts, key=lambda key: counts[key])
    counts[largest] -= extra
    return tuple(
        replace(alike[0], count=counts[key], are=_are(counts[key], world, sorted(r.rank for r in alike)))
        for key, alike in classes.items()
    )


def _connected(
    observe: Callable[[int], RankObservation],
    begin: Callable[[int], None],
    start: int,
    known: set[int] = frozenset(),  # type: ignore[assignment]
) -> dict[int, RankObservation]:
    waiting, seen = [start], dict[int, RankObservation]()
    while waiting and len(seen) < _MOST:
        rank = waiting.pop(0)
        if rank in seen or rank in known:
            continue
        seen[rank] = observe(rank)
        peers = sorted({o.event.peer for o in seen[rank].events if o.event.peer is not None} - set(seen))
        for peer in peers:
            begin(peer)
        waiting += peers
    return seen


def _are(count: int, world: int, ranks: list[int]) -> str:
    if count == world:
        return f"all {world} ranks" if world > 1 else "the only rank"
    named = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"{count} rank{'s' if count > 1 else ''}; observed: {named}"


def _work(r: RankObservation) -> object:
    """Return what a rank did, without what differs between ranks that do the same: who its peers are."""
    events = tuple((o.event.identity._replace(peer=None), o.event.flops, o.module) for o in r.events)
    return events, r.peak, tuple(r.flops.items())
