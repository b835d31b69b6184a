"""A schedule as one rank sees it: what it sends and receives, round by round.

If the sender of a long message gets its parts in different rounds, or the receiver forwards them in different rounds,
the message is cut and sent in that order: what arrives first and is needed first goes first. Both ends derive the
order from the schedule.
"""

from dataclasses import dataclass

import numpy as np

from phalanx.schedule.collectives.ir import Ints, Schedule

Piece = tuple[int, int]
"""Elements [low, high) of the collective's address space."""


@dataclass(frozen=True)
class Message:
    """A message to or from rank `peer` in a round. `reduces`: the receiver adds it to its own elements."""

    peer: int
    pieces: tuple[Piece, ...]
    reduces: bool


@dataclass(frozen=True)
class RankStep:
    """One rank's messages of a round."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def program(schedule: Schedule, me: int, long: int | None = None) -> tuple[RankStep, ...]:
    """Return the messages that rank `me` sends and receives, round by round. Messages of more than `long` elements
    are cut and ordered as the module's docstring describes; None: no message is."""
    s = schedule
    rows = np.nonzero((s.source == me) | (s.destination == me))[0]
    rounds: dict[int, dict[tuple[bool, int, bool], list[Piece]]] = {}
    for i in rows:
        sending = int(s.source[i]) == me
        peer = int(s.destination[i] if sending else s.source[i])
        low, high = int(s.offset[i]), int(s.offset[i] + s.length[i])
        pieces = rounds.setdefault(int(s.round[i]), {}).setdefault((sending, peer, bool(s.reduces[i])), [])
        if pieces and pieces[-1][1] == low and s.op != "all_to_all":  # its blocks must stay separate
            pieces[-1] = (pieces[-1][0], high)
        else:
            pieces.append((low, high))
    steps = []
    for number, messages in sorted(rounds.items()):
        sides: dict[bool, list[Message]] = {True: [], False: []}
        for (sending, peer, reduces), pieces in messages.items():
            parts = [tuple(pieces)]
            if long is not None and s.op != "all_to_all" and sum(b - a for a, b in pieces) > long:
                source, destination = (me, peer) if sending else (peer, me)
                parts = _in_order(s, number, source, destination, pieces)
            sides[sending] += [Message(peer, part, reduces) for part in parts]
        steps.append(RankStep(tuple(sides[True]), tuple(sides[False])))
    return tuple(steps)


def _in_order(
    s: Schedule, number: int, source: int, destination: int, pieces: list[Piece]
) -> list[tuple[Piece, ...]]:
    """Cut the pieces of a message of round `number`, and sort them by the last round before it in which the sender
    received them, then by the first round after it in which the receiver sends them."""
    inbound = np.nonzero((s.destination == source) & (s.round < number))[0]
    outbound = np.nonzero((s.source == destination) & (s.round > number))[0]
    ends = np.unique(
        np.concatenate([s.offset[rows] for rows in (inbound, outbound)] + [_stops(s, inbound), _stops(s, outbound)])
    )
    parts: dict[tuple[int, int], list[Piece]] = {}
    for low, high in pieces:
        inside = ends[(ends > low) & (ends < high)].tolist()
        for a, b in zip([low, *inside], [*inside, high], strict=True):
            got, needed = _covering(s, inbound, a), _covering(s, outbound, a)
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
    """Return the rounds of the transfers in `rows` that contain element `at`."""
    return s.round[rows[(s.offset[rows] <= at) & (_stops(s, rows) > at)]]
