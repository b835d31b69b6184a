"""Lower bound on an all-reduce's traffic, by exhaustive search over everything that P ranks can do with one element.

A state says which contributions each rank's value contains. A message copies the sender's value over the receiver's,
or adds it where the two have no contribution in common. The fewest messages after which every rank has every
contribution are 2 (P-1): until a first rank has the whole, each of the P-1 others has sent at least once, and after
that each of them has yet to receive it. Each element costs that, so P ranks send at least 2 (P-1) n bytes in all, and
one of them at least 2 n (P-1)/P, which is what a ring sends (Patarasuk & Yuan 2009).
"""

from dataclasses import dataclass
from itertools import permutations

from phalanx.spec.errors import InputError

MOST_RANKS = 5
"""Ranks whose states are searched within seconds."""


@dataclass(frozen=True)
class Bound:
    """The fewest messages of one element that an all-reduce needs."""

    ranks: int
    messages: int
    states: int
    """Distinct states reachable with fewer messages, mostly up to renaming of ranks."""

    @property
    def sent_share(self) -> float:
        """Lower bound on the bytes sent by the busiest rank, as a fraction of the buffer."""
        return self.messages / self.ranks


def fewest_messages(ranks: int) -> Bound:
    """Search breadth first for the fewest messages that sum an element on all of `ranks` ranks. Raises InputError for
    more ranks than can be searched."""
    if not 2 <= ranks <= MOST_RANKS:
        raise InputError("ranks", ranks, "cannot be searched", f"use 2 to {MOST_RANKS}")
    whole = (1 << ranks) - 1
    front = {_renamed(tuple(1 << r for r in range(ranks)))}
    seen, messages, end = set(front), 0, (whole,) * ranks
    while end not in (front := {_renamed(state) for before in front for state in _after_a_message(before)} - seen):
        messages += 1
        seen |= front
    return Bound(ranks, messages + 1, len(seen))


def _after_a_message(state: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the states reachable with one more message."""
    reached = []
    for sender, receiver in permutations(range(len(state)), 2):
        sent, held = state[sender], state[receiver]
        reached.append((*state[:receiver], sent, *state[receiver + 1 :]))
        if not sent & held:
            reached.append((*state[:receiver], sent | held, *state[receiver + 1 :]))
    return reached


def _renamed(state: tuple[int, ...]) -> tuple[int, ...]:
    """Return a representative of the states that equal this one up to renaming of ranks and contributions.
    Contributions are sorted by the ranks that have them, then ranks by their contributions, all that twice. This need
    not give a unique state: the search then visits a few equal ones."""
    ranks = len(state)
    for _ in range(2):
        columns = sorted(tuple(value >> c & 1 for value in state) for c in range(ranks))
        state = tuple(sorted(sum(column[r] << c for c, column in enumerate(columns)) for r in range(ranks)))
    return state
