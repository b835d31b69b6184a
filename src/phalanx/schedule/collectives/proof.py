"""Proof of a collective schedule by symbolic execution: for every rank and every piece of the buffer, count how often
it contains each rank's contribution.

Proved means: nothing is read or added to before it has arrived; nothing is added twice, or received twice in a round;
every rank ends with each contribution exactly once; and no rank sends to, or receives from, more than one partner in
a round, so that with the receive posted first even blocking sends cannot deadlock (by induction over rounds: a
partner in round k waits only for rounds before k).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.schedule.collectives.ir import Holdings, Ints, Schedule, atoms, boundaries
from phalanx.spec.errors import Unproved

Counts = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Proof:
    """Cost of a proved schedule: rounds, total messages, and elements sent by the busiest rank."""

    rounds: int
    messages: int
    sent: int


@dataclass(frozen=True)
class Run:
    """A symbolic run. `edges`: where atoms, the pieces that no transfer divides, begin and end, (atoms + 1,)."""

    schedule: Schedule
    edges: Ints

    def span(self, offset: int, length: int) -> slice:
        """Return the atoms of an interval of elements."""
        return slice(int(np.searchsorted(self.edges, offset)), int(np.searchsorted(self.edges, offset + length)))

    def chunk(self, atom: int) -> str:
        """Return an atom as text, `[first, stop)` in elements."""
        return f"[{self.edges[atom]}, {self.edges[atom + 1]})"

    def positions(self, holdings: Holdings) -> npt.NDArray[np.bool_]:
        """Return which rank holds which atom, (ranks, atoms)."""
        mask = np.zeros((self.schedule.ranks, len(self.edges) - 1), dtype=bool)
        row, atom = atoms(self.edges, holdings.offset, holdings.length)
        mask[holdings.rank[row], atom] = True
        return mask

    def states(self) -> Iterator[tuple[int, Counts]]:
        """Yield (rounds done, counts) at the start and after every round. counts: (ranks, atoms, contributors), one
        array that is updated in place. Raises Unproved, with rank, chunk and round, if a round cannot happen."""
        s = self.schedule
        counts = np.zeros((s.ranks, len(self.edges) - 1, s.ranks), dtype=np.int16)
        rank, atom = np.nonzero(self.positions(s.start))
        counts[rank, atom, rank] = 1
        yield 0, counts
        for number in range(s.rounds):
            self._apply(counts, number)
            yield number + 1, counts

    def _apply(self, counts: Counts, number: int) -> None:
        """Apply a round to `counts`, in place."""
        s = self.schedule
        rows = slice(*np.searchsorted(s.round, [number, number + 1]).tolist())
        _one_port(s, number, rows)
        row, atom = atoms(self.edges, s.offset[rows], s.length[rows])
        source, destination, adds = s.source[rows][row], s.destination[rows][row], s.reduces[rows][row]
        # Nothing is sent, or added to, before it is there; nothing is received twice.
        sent = counts[source, atom]
        at = _first(~sent.any(axis=1))
        if at is not None:
            place = self._where(source[at], atom[at], number)
            raise Unproved(f"{place}: sends to rank {destination[at]} what it does not have")
        to, piece = destination[adds], atom[adds]
        before = counts[to, piece]
        at = _first(~before.any(axis=1))
        if at is not None:
            place = self._where(to[at], piece[at], number)
            raise Unproved(f"{place}: adds what rank {source[adds][at]} sends to what it does not have")
        at = _first(np.bincount(destination * len(self.edges) + atom) > 1)
        if at is not None:
            who, what = divmod(at, len(self.edges))
            raise Unproved(f"{self._where(who, what, number)}: receives it twice")
        # Update, and check that no contribution is added twice.
        counts[destination, atom] = sent
        counts[to, piece] += before
        at = _first((counts[to, piece] > 1).any(axis=1))  # copied contributions were counted at their source
        if at is not None:
            place = self._where(to[at], piece[at], number)
            who = int(np.argmax(counts[to[at], piece[at]]))
            raise Unproved(f"{place}: adds the contribution of rank {who} a second time")

    def _where(self, rank: int, atom: int, number: int) -> str:
        return (
            f"rank {rank}, chunk {self.chunk(atom)}, round {number + 1}"  # people count from 1, as when it is shown
        )


def _first(true: npt.ArrayLike) -> int | None:
    """Return the index of the first True; None without one."""
    return int(np.argmax(true)) if np.any(true) else None


def run(schedule: Schedule) -> Run:
    """Prepare the symbolic run of a schedule."""
    return Run(schedule, boundaries(schedule))


def prove(schedule: Schedule) -> Proof:
    """Prove a schedule. Raises Unproved, with rank, chunk and round, if it does not do what its op requires."""
    symbolic = run(schedule)
    counts: Counts | None = None
    for _, state in symbolic.states():
        counts = state
    assert counts is not None
    required = symbolic.positions(schedule.start).T.astype(np.int16)  # (atoms, contributors)
    wrong = symbolic.positions(schedule.end) & (counts != required).any(axis=2)
    if wrong.any():
        rank, atom = (int(x) for x in np.argwhere(wrong)[0])
        lost = np.nonzero(counts[rank, atom] < required[atom])[0]
        foreign = np.nonzero(counts[rank, atom] > required[atom])[0]
        what = f"lacks the contribution of rank {lost[0]}" if len(lost) else f"wrongly contains rank {foreign[0]}'s"
        when = f"after round {schedule.rounds}" if schedule.rounds else "before round 1"
        raise Unproved(f"rank {rank}, chunk {symbolic.chunk(atom)}, {when}: {what}")
    message = (schedule.round * schedule.ranks + schedule.source) * schedule.ranks + schedule.destination
    return Proof(schedule.rounds, len(np.unique(message)), int(schedule.sent.max(initial=0)))


def _one_port(s: Schedule, number: int, rows: slice) -> None:
    """Require at most one partner to send to and one to receive from, and no message to oneself."""
    pairs = np.stack(np.divmod(np.unique(s.source[rows] * s.ranks + s.destination[rows]), s.ranks), axis=1)
    for column, does in ((0, "sends to"), (1, "receives from")):
        count = np.bincount(pairs[:, column], minlength=s.ranks)
        if (count > 1).any():
            rank = int(np.argmax(count > 1))
            others = pairs[pairs[:, column] == rank][:, 1 - column]
            chunk = f"[{s.offset[rows].min()}, ...)"
            port = "a rank sends to one rank and receives from one in a round: move the others to further rounds"
            raise Unproved(
                f"rank {rank}, chunk {chunk}, round {number + 1}: {does} ranks {others.tolist()} at once; {port}"
            )
    alone = pairs[:, 0] == pairs[:, 1]
    if alone.any():
        raise Unproved(f"rank {pairs[alone][0, 0]}, round {number + 1}: sends to itself")
