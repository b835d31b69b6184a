"""Collective schedules drawn round by round: what is sent, and what each rank then holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from phalanx.planning.tables.table import Sheet, columns
from phalanx.schedule.collectives.ir import Ints, Schedule, atoms
from phalanx.schedule.collectives.proof import Counts, Run, run


def steps(schedule: Schedule) -> Iterator[str | Sheet]:
    """Yield the messages and a table of what each rank then holds, for the start and every round."""
    symbolic = run(schedule)
    for number, counts in symbolic.states():
        title = "start" if number == 0 else f"round {number} of {schedule.rounds}"
        yield f"{title}{_messages(symbolic, number - 1)}"
        yield _holdings(symbolic, counts)


def _messages(symbolic: Run, number: int) -> str:
    """One line per message: what a rank sends in a round, and what the receiver does with it."""
    return "".join(
        f"\n  {source} -> {destination}: {what}, {destination} {'adds' if reduces else 'keeps'} it"
        for source, destination, what, reduces in _sent(symbolic, number)
    )


def sends(symbolic: Run, number: int) -> list[tuple[int, int, str]]:
    """Return (source, destination, what is sent, + where it is added) of each message of a round."""
    return [(a, b, f"{what.partition(' ')[2]}{' +' if adds else ''}") for a, b, what, adds in _sent(symbolic, number)]


def _sent(symbolic: Run, number: int) -> Iterator[tuple[int, int, str, bool]]:
    """Yield (source, destination, what, whether it is added) of each message of a round."""
    s = symbolic.schedule
    rows = np.nonzero(s.round == number)[0]
    for source, reduces in dict.fromkeys(zip(s.source[rows].tolist(), s.reduces[rows].tolist(), strict=True)):
        sends = rows[(s.source[rows] == source) & (s.reduces[rows] == reduces)]
        _, chunks = atoms(symbolic.edges, s.offset[sends], s.length[sends])
        if s.op == "all_to_all":
            what = "block " + ", ".join(f"{a} to {b}" for a, b in zip(*_ends(symbolic, chunks), strict=True))
        else:
            what = "chunk " + _runs(sorted(chunks.tolist()), str, ",")
        yield source, int(s.destination[sends[0]]), what, reduces


def cells(symbolic: Run, counts: Counts) -> list[list[str]]:
    """Return what each rank holds, in words: by chunk whose contributions, or of an all-to-all by sender for whom."""
    ranks, chunks, _ = counts.shape
    if symbolic.schedule.op == "all_to_all":
        sender, receiver = _ends(symbolic, np.arange(chunks))
        here = [counts[rank].any(axis=1) for rank in range(ranks)]
        return [
            [_runs(sorted(receiver[here[rank] & (sender == other)].tolist()), str, ",") for other in range(ranks)]
            for rank in range(ranks)
        ]
    return [
        [
            _runs(np.nonzero(counts[rank, chunk])[0].tolist(), lambda r: chr(ord("A") + r), "")
            for chunk in range(chunks)
        ]
        for rank in range(ranks)
    ]


def _holdings(symbolic: Run, counts: Counts) -> Sheet:
    """Tabulate what each rank holds: a column per chunk, in which A is rank 0's contribution, B rank 1's, and so on;
    of an all-to-all a column per sender of blocks, in which a cell names their receivers."""
    words = cells(symbolic, counts)
    column = "from" if symbolic.schedule.op == "all_to_all" else "chunk"
    wide = len(words[0]) <= _WIDE
    names = (f"{column} {i}" if wide or i == 0 else str(i) for i in range(len(words[0])))
    return Sheet("", columns("rank [count]", *names), [(rank, *row) for rank, row in enumerate(words)], charted=False)


_WIDE = 6
"""The most columns whose headings say what they are."""


def _ends(symbolic: Run, chunks: Ints) -> tuple[Ints, Ints]:
    """For chunks of an all-to-all: the sender and the receiver of each."""
    s = symbolic.schedule
    return symbolic.positions(s.start).argmax(axis=0)[chunks], symbolic.positions(s.end).argmax(axis=0)[chunks]


def _runs(members: list[int], name: Callable[[int], str], between: str) -> str:
    """Join ascending numbers by name, more than four in a row as first-last: ABC, A-F; "." for none."""
    parts, i = [], 0
    while i < len(members):
        j = i
        while j + 1 < len(members) and members[j + 1] == members[j] + 1:
            j += 1
        parts += [f"{name(members[i])}-{name(members[j])}"] if j - i > 3 else [name(m) for m in members[i : j + 1]]
        i = j + 1
    return between.join(parts) or "."
