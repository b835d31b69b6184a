"""A schedule, proved by running it on symbols: for every rank and every piece of the buffer, how often each rank's
contribution is in it.

Proved means: nothing is read before it is there; nothing is added twice; every rank ends with each contribution
exactly once; and no rank has more than one partner to send to and one to receive from in a round, so that with the
receive posted first even blocking sends cannot deadlock (by induction over rounds: a partner in round k waits only
for rounds before k).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.schedule.transfers import Holdings, Ints, Schedule

Counts = npt.NDArray[np.int16]


class Unproved(ValueError):
    """A schedule that does not do what it should; the message names rank, chunk and round."""


@dataclass(frozen=True)
class Proof:
    """What was proved, and what it costs: rounds, messages, the most elements that one rank sends."""

    rounds: int
    messages: int
    sent: int


@dataclass(frozen=True)
class Run:
    """The symbolic run: atoms are the pieces that no transfer divides. counts: (ranks, atoms, contributors)."""

    schedule: Schedule
    edges: Ints

    def span(self, offset: int, length: int) -> slice:
        return slice(int(np.searchsorted(self.edges, offset)), int(np.searchsorted(self.edges, offset + length)))

    def chunk(self, atom: int) -> str:
        return f"[{self.edges[atom]}, {self.edges[atom + 1]})"

    def held(self, holdings: Holdings) -> npt.NDArray[np.bool_]:
        found = np.zeros((self.schedule.ranks, len(self.edges) - 1), dtype=bool)
        for rank, offset, length in zip(holdings.rank, holdings.offset, holdings.length, strict=True):
            found[rank, self.span(offset, length)] = True
        return found

    def states(self) -> Iterator[tuple[int, Counts]]:
        """(rounds done, counts) at the start and after every round. Raises Unproved where a round cannot happen."""
        s = self.schedule
        counts = np.zeros((s.ranks, len(self.edges) - 1, s.ranks), dtype=np.int16)
        rank, atom = np.nonzero(self.held(s.start))
        counts[rank, atom, rank] = 1
        yield 0, counts
        first = np.searchsorted(s.round, np.arange(s.rounds + 1))
        for number in range(s.rounds):
            rows = range(first[number], first[number + 1])
            _one_port(s, number, slice(first[number], first[number + 1]))
            before = counts.copy()
            for i in rows:
                source, destination = int(s.source[i]), int(s.destination[i])
                span = self.span(s.offset[i], s.length[i])
                sent = before[source, span]
                missing = np.nonzero(~sent.any(axis=1))[0]
                if len(missing):
                    where = f"rank {source}, chunk {self.chunk(span.start + int(missing[0]))}, round {number}"
                    raise Unproved(f"{where}: sends to rank {destination} what it does not have")
                if s.reduces[i]:
                    counts[destination, span] += sent
                else:
                    counts[destination, span] = sent
            twice = np.argwhere(counts > 1)
            if len(twice):
                rank_, atom_, who = (int(x) for x in twice[0])
                where = f"rank {rank_}, chunk {self.chunk(atom_)}, round {number}"
                raise Unproved(f"{where}: adds the contribution of rank {who} a second time")
            yield number + 1, counts


def run(schedule: Schedule) -> Run:
    ends = [schedule.offset + schedule.length, schedule.offset, np.array([0, schedule.size])]
    for h in (schedule.start, schedule.end):
        ends += [h.offset, h.offset + h.length]
    return Run(schedule, np.unique(np.concatenate(ends)))


def prove(schedule: Schedule) -> Proof:
    """Raises Unproved, naming rank, chunk and round."""
    symbolic = run(schedule)
    counts: Counts | None = None
    for _, state in symbolic.states():
        counts = state
    assert counts is not None
    wanted = symbolic.held(schedule.start).T.astype(np.int16)  # (atoms, contributors)
    for rank, atom in np.argwhere(symbolic.held(schedule.end)):
        got = counts[rank, atom]
        if not np.array_equal(got, wanted[atom]):
            lost = np.nonzero(got < wanted[atom])[0]
            foreign = np.nonzero(got > wanted[atom])[0]
            what = (
                f"lacks the contribution of rank {lost[0]}" if len(lost) else f"holds rank {foreign[0]}'s by mistake"
            )
            raise Unproved(
                f"rank {rank}, chunk {symbolic.chunk(int(atom))}, after round {schedule.rounds - 1}: {what}"
            )
    pairs = np.stack([schedule.round, schedule.source, schedule.destination], axis=1)
    messages = len(np.unique(pairs, axis=0)) if len(pairs) else 0
    return Proof(schedule.rounds, messages, int(schedule.sent.max(initial=0)))


def _one_port(s: Schedule, number: int, rows: slice) -> None:
    """At most one partner each way, and no message to oneself."""
    pairs = np.unique(np.stack([s.source[rows], s.destination[rows]], axis=1), axis=0)
    for column, does in ((0, "sends to"), (1, "receives from")):
        ranks, count = np.unique(pairs[:, column], return_counts=True)
        if (count > 1).any():
            rank = int(ranks[count > 1][0])
            others = pairs[pairs[:, column] == rank][:, 1 - column]
            chunk = f"[{s.offset[rows].min()}, ...)"
            raise Unproved(f"rank {rank}, chunk {chunk}, round {number}: {does} ranks {others.tolist()} at once")
    alone = pairs[:, 0] == pairs[:, 1]
    if alone.any():
        raise Unproved(f"rank {pairs[alone][0, 0]}, round {number}: sends to itself")
