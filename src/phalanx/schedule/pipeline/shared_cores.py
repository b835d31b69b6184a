"""Simulation of a pipeline schedule whose ranks share the cores of a host.

A pass takes longer the more ranks compute at once: with 4 ranks on 2 cores, twice as long as with one other rank. So
a rank that waits for a message makes the others faster, and a bubble costs less time than on ranks that have a core
each. Cores are shared evenly (processor sharing, Kleinrock 1976): while n ranks are at work, all of them go on at
pace[n - 1] times the speed that they have with every rank at work.

A rank's work is its passes, and before and after them the messages, which its own processor moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from phalanx.schedule.pipeline.actions import Action, PipelineSchedule
from phalanx.schedule.pipeline.simulate import Times, run

_Payload = tuple[str, int, int]
"""(F or B, chunk, micro-batch): the output of one pass, needed by another."""


class _Work(NamedTuple):
    """A receive, a pass or a send: `seconds` of work once `needs` is available; it then makes `gives` available."""

    seconds: float
    needs: _Payload | None = None
    gives: _Payload | None = None
    is_pass: bool = False


def run_on_shared_cores(
    s: PipelineSchedule, seconds: Mapping[str, Sequence[float]], message: float, pace: Sequence[float]
) -> Times:
    """Simulate a schedule without sends and receives. `seconds[kind][chunk]`: how long an action takes with all ranks
    at work; `message`: for how long a message keeps its sender, and then its receiver, at work; `pace[n - 1]`: the
    speed of n ranks at work over that of all.

    Raises Unproved, with rank, action and reason, if the schedule cannot be run."""
    to_do = [_work(s, actions, seconds, message) for actions in s.actions]
    current = [next(works, None) for works in to_do]
    backlog: dict[int, float] = {}  # seconds of work, by rank at work
    computed: set[_Payload | None] = {None}
    times: Times = [[] for _ in s.actions]
    began, now = [0.0] * s.ranks, 0.0
    while True:
        # Start what has its inputs.
        for rank, work in enumerate(current):
            if work is not None and rank not in backlog and work.needs in computed:
                backlog[rank], began[rank] = work.seconds, now
        if not backlog:
            break
        # Advance to the end of the next work, at the pace of the ranks at work.
        speed, least = pace[len(backlog) - 1], min(backlog.values())
        now += least / speed
        for rank in list(backlog):
            work = current[rank]
            assert work is not None
            backlog[rank] -= least
            if backlog[rank] > 1e-9 * work.seconds:
                continue
            del backlog[rank]
            if work.is_pass:
                times[rank].append((began[rank], now))
            computed.add(work.gives)
            current[rank] = next(to_do[rank], None)
    if any(current):
        run(s, seconds)  # says which rank waits for what
    return times


def _work(
    s: PipelineSchedule, actions: Sequence[Action], seconds: Mapping[str, Sequence[float]], message: float
) -> Iterator[_Work]:
    """Yield a rank's work, in order."""
    for kind, chunk, i in actions:
        way, onward = ("F", 1) if kind == "F" else ("B", -1)
        source, target = (chunk - onward, chunk + onward) if kind != "W" else (-1, -1)
        needs = (way, source, i) if 0 <= source < s.chunks else None
        if needs is not None and s.rank_of[source] != s.rank_of[chunk]:
            yield _Work(message, needs)
        yield _Work(seconds[kind][chunk], needs, (way, chunk, i) if kind != "W" else None, is_pass=True)
        if 0 <= target < s.chunks and s.rank_of[target] != s.rank_of[chunk]:
            yield _Work(message)
