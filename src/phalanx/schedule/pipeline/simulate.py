"""A pipeline schedule, run: every action as soon as what it needs is there, or the reason why nobody can go on.

    F of a chunk   needs the F of the chunk before it
    I, B           need the I or B of the chunk after it, and their own F
    W              needs its own I

What another rank has made is there a transfer later, which keeps neither rank busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.schedule.errors import Unproved
from phalanx.schedule.pipeline.schedules import Action, PipelineSchedule

Times = list[list[tuple[float, float]]]
"""Start and end of the actions of each rank."""


def run(s: PipelineSchedule, seconds: Mapping[str, Sequence[float]], transfer: float = 0.0) -> Times:
    """When the actions of a schedule without sends and receives run. `seconds`: by kind, of every chunk.

    Raises Unproved, with rank, action and reason, where an action comes before what it needs on its own rank, and
    where ranks wait for each other.
    """
    m, last = s.micro_batches, s.chunks - 1
    forward: list[float | None] = [None] * (s.chunks * m)  # when it is over, by chunk and micro-batch
    backward: list[float | None] = [None] * (s.chunks * m)
    waiting: dict[tuple[str, int], int] = {}  # for what a rank waits
    times: Times = [[] for _ in s.actions]
    ready = list(range(s.ranks))
    while ready:
        rank = ready.pop()
        own, found = s.actions[rank], times[rank]
        now = found[-1][1] if found else 0.0
        for kind, chunk, i in own[len(found) :]:
            here, start = chunk * m + i, now
            if kind == "F":
                if chunk:
                    there = forward[here - m]
                    if there is None:
                        waiting["F", here - m] = rank
                        break
                    start = max(now, there + transfer * (s.rank_of[chunk - 1] != rank))
            elif kind == "W":
                if backward[here] is None:
                    raise Unproved(f"rank {rank}: {Action(kind, chunk, i)} comes before {chunk}I{i}, which it needs")
            else:
                if forward[here] is None:
                    raise Unproved(f"rank {rank}: {Action(kind, chunk, i)} comes before {chunk}F{i}, which it needs")
                if chunk < last:
                    there = backward[here + m]
                    if there is None:
                        waiting["B", here + m] = rank
                        break
                    start = max(now, there + transfer * (s.rank_of[chunk + 1] != rank))
            now = start + seconds[kind][chunk]
            found.append((start, now))
            if kind != "W":
                (forward if kind == "F" else backward)[here] = now
                woken = waiting.pop(("F" if kind == "F" else "B", here), None)
                if woken is not None:
                    ready.append(woken)
    if waiting:
        raise Unproved(f"deadlock: {'; '.join(_stuck(s, times, waiting))}")
    return times


def _stuck(s: PipelineSchedule, times: Times, waiting: Mapping[tuple[str, int], int]) -> list[str]:
    said = []
    for (kind, key), rank in sorted(waiting.items(), key=lambda item: item[1]):
        chunk, i = divmod(key, s.micro_batches)
        at = s.actions[rank][len(times[rank])]
        said.append(f"rank {rank} at {at} waits for {chunk}{kind}{i} of rank {s.rank_of[chunk]}")
    return said


def unit(chunks: int) -> dict[str, list[float]]:
    """F, I and W take one unit of time each."""
    return {"F": [1.0] * chunks, "I": [1.0] * chunks, "W": [1.0] * chunks, "B": [2.0] * chunks}
