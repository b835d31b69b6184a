"""The messages of a collective's round, and the chunks that each rank then has, in words."""

from collections.abc import Callable, Iterator

import numpy as np

from phalanx.schedule.collectives.ir import Ints, atoms
from phalanx.schedule.collectives.proof import Counts, Run


def sends(symbolic: Run, number: int) -> list[tuple[int, int, str]]:
    """Return (source, destination, chunks or blocks, with a + where they are added) of each message of a round."""
    return [(a, b, f"{what.partition(' ')[2]}{' +' if adds else ''}") for a, b, what, adds in sent(symbolic, number)]


def sent(symbolic: Run, number: int) -> Iterator[tuple[int, int, str, bool]]:
    """Yield (source, destination, words for the chunks or blocks, whether they are added) of a round's messages."""
    s = symbolic.schedule
    rows = np.nonzero(s.round == number)[0]
    for source, reduces in dict.fromkeys(zip(s.source[rows].tolist(), s.reduces[rows].tolist(), strict=True)):
        sends = rows[(s.source[rows] == source) & (s.reduces[rows] == reduces)]
        _, chunks = atoms(symbolic.edges, s.offset[sends], s.length[sends])
        if s.op == "all_to_all":
            what = "block " + ", ".join(_block(a, b) for a, b in zip(*_ends(symbolic, chunks), strict=True))
        else:
            what = "chunk " + _runs(sorted(chunks.tolist()), str, ",")
        yield source, int(s.destination[sends[0]]), what, reduces


def cells(symbolic: Run, counts: Counts, number: int) -> list[list[str]]:
    """Return, for each rank and chunk after `number` rounds, letters of the contributors: A for rank 0, B for rank 1.

    In an all-to-all, for each rank and place in its buffer, the block: B2 is the one from rank 1 to rank 2."""
    ranks, chunks, _ = counts.shape
    if symbolic.schedule.op == "all_to_all":
        return _places(symbolic, counts, number)
    return [
        [
            _runs(np.nonzero(counts[rank, chunk])[0].tolist(), lambda r: chr(ord("A") + r), "")
            for chunk in range(chunks)
        ]
        for rank in range(ranks)
    ]


def _places(symbolic: Run, counts: Counts, number: int) -> list[list[str]]:
    """Return an all-to-all's blocks by rank and place. A block for the rank itself is at the place of its sender, any
    other at the place of its receiver; a block that was sent on is gone."""
    s = symbolic.schedule
    sender, receiver = _ends(symbolic, np.arange(counts.shape[1]))
    rows = np.nonzero(s.round < number)[0]
    row, block = atoms(symbolic.edges, s.offset[rows], s.length[rows])
    gone = np.zeros(counts.shape[:2], dtype=bool)
    gone[s.source[rows][row], block] = True
    words = []
    for rank in range(s.ranks):
        here = np.nonzero(counts[rank].any(axis=1) & ~gone[rank])[0]
        place = np.where(receiver[here] == rank, sender[here], receiver[here])
        names = [_block(a, b) for a, b in zip(sender[here], receiver[here], strict=True)]
        words.append(
            [",".join(name for name, p in zip(names, place, strict=True) if p == i) or "." for i in range(s.ranks)]
        )
    return words


def _ends(symbolic: Run, chunks: Ints) -> tuple[Ints, Ints]:
    """Return (senders, receivers) of chunks of an all-to-all, each (chunks,)."""
    s = symbolic.schedule
    return symbolic.positions(s.start).argmax(axis=0)[chunks], symbolic.positions(s.end).argmax(axis=0)[chunks]


def _block(sender: int, receiver: int) -> str:
    """Return a block of an all-to-all in words: B2 is from rank 1 to rank 2."""
    return f"{chr(ord('A') + sender)}{receiver}"


def _runs(members: list[int], name: Callable[[int], str], between: str) -> str:
    """Join the names of ascending numbers; four or more consecutive ones are first-last: ABC, A-D; "." for none."""
    parts, i = [], 0
    while i < len(members):
        j = i
        while j + 1 < len(members) and members[j + 1] == members[j] + 1:
            j += 1
        parts += [f"{name(members[i])}-{name(members[j])}"] if j - i > 2 else [name(m) for m in members[i : j + 1]]
        i = j + 1
    return between.join(parts) or "."
