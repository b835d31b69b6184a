"""A schedule as one rank sees it: what it sends and receives, round by round.

A long message whose parts its sender gets at different times, or its receiver passes on at different times, travels
in that order: what is there first and needed first goes first. Both ends read the order from the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.schedule.collectives.ir import Ints, Schedule

Piece = tuple[int, int]
"""Elements [low, high) of the collective's address space."""


@dataclass(frozen=True)
class Message:
    """What goes to or comes from one partner in a round; `reduces`: it is added to what the receiver has."""

    peer: int
    pieces: tuple[Piece, ...]
    reduces: bool


@dataclass(frozen=True)
class Step:
    """One rank's part of a round."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def program(schedule: Schedule, me: int, long: int | None = None) -> tuple[Step, ...]:
    """What one rank does, round by round. Messages of more than `long` elements are ordered as above (None: none
    is)."""
    s = schedule
    mine = np.nonzero((s.source == me) | (s.destination == me))[0]
    rounds: dict[int, dict[tuple[bool, int, bool], list[Piece]]] = {}
    for i in mine:
        sending = int(s.source[i]) == me
        peer = int(s.destination[i] if sending else s.source[i])
        low, high = int(s.offset[i]), int(s.offset[i] + s.length[i])
        pieces = rounds.setdefault(int(s.round[i]), {}).setdefault((sending, peer, bool(s.reduces[i])), [])
        if pieces and pieces[-1][1] == low and s.op != "all_to_all":  # whose blocks lie apart
            pieces[-1] = (pieces[-1][0], high)
        else:
            pieces.append((low, high))
    steps = []
    for number, found in sorted(rounds.items()):
        sides: dict[bool, list[Message]] = {True: [], False: []}
        for (sending, peer, reduces), pieces in found.items():
            parts = [tuple(pieces)]
            if long is not None and s.op != "all_to_all" and sum(b - a for a, b in pieces) > long:
                source, destination = (me, peer) if sending else (peer, me)
                parts = _in_order(s, number, source, destination, pieces)
            sides[sending] += [Message(peer, part, reduces) for part in parts]
        steps.append(Step(tuple(sides[True]), tuple(sides[False])))
    return tuple(steps)


def _in_order(
    s: Schedule, number: int, source: int, destination: int, pieces: list[Piece]
) -> list[tuple[Piece, ...]]:
    """The pieces of a message of round `number`, cut and sorted by the last round before it in which the sender got
    them, then by the first one after it in which the receiver sends them."""
    came = np.nonzero((s.destination == source) & (s.round < number))[0]
    goes = np.nonzero((s.source == destination) & (s.round > number))[0]
    ends = np.unique(np.concatenate([s.offset[rows] for rows in (came, goes)] + [_stops(s, came), _stops(s, goes)]))
    parts: dict[tuple[int, int], list[Piece]] = {}
    for low, high in pieces:
        inside = ends[(ends > low) & (ends < high)].tolist()
        for a, b in zip([low, *inside], [*inside, high], strict=True):
            got, needed = _covering(s, came, a), _covering(s, goes, a)
            key = (int(got.max(initial=-1)), int(needed.min(initial=s.rounds)))
            group = parts.setdefault(key, [])
            if group and group[-1][1] == a:
                group[-1] = (group[-1][0], b)
            else:
                group.append((a, b))
    return [tuple(group) for _, group in sorted(parts.items())]


def _stops(s: Schedule, rows: Ints) -> Ints:
    return s.offset[rows] + s.length[rows]


def _covering(s: Schedule, rows: Ints, at: int) -> Ints:
    """The rounds of those transfers that hold an element."""
    return s.round[rows[(s.offset[rows] <= at) & (_stops(s, rows) > at)]]
