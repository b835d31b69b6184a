"""Simulation of a pipeline schedule: every action starts as soon as what it needs is there; a deadlock is explained.

    F of a chunk   needs the F of the chunk before it
    I, B           need the I or B of the chunk after it, and their own F
    W              needs its own I

The output of another rank arrives one transfer later. Where a rank's own processor moves the bytes, sender and
receiver compute nothing meanwhile: the overhead o of LogP (Culler et al. 1993).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.schedule.errors import Unproved
from phalanx.schedule.pipeline.actions import Action, PipelineSchedule

Times = list[list[tuple[float, float]]]
"""(start, end) of each action, per rank, in the unit of the costs given."""


def run(
    s: PipelineSchedule, seconds: Mapping[str, Sequence[float]], transfer: float = 0.0, overhead: float = 0.0
) -> Times:
    """Simulate a schedule without sends and receives. `seconds[kind][chunk]`: how long an action takes; `transfer`:
    how long a message between two ranks takes; `overhead`: for how long it keeps either of them from computing.

    Raises Unproved, with rank, action and reason, if an action precedes what it needs on its own rank, or if ranks
    wait for each other.
    """
    m, last = s.micro_batches, s.chunks - 1
    forward: list[float | None] = [None] * (s.chunks * m)  # end time, by chunk and micro-batch
    backward: list[float | None] = [None] * (s.chunks * m)
    waiting: dict[tuple[str, int], int] = {}  # the rank that waits for (way, chunk and micro-batch)
    times: Times = [[] for _ in s.actions]
    free = [0.0] * s.ranks  # when each rank has sent what it last computed
    ready = list(range(s.ranks))
    # Run each rank until it waits; the rank that computes what it needs wakes it.
    while ready:
        rank = ready.pop()
        actions, spans = s.actions[rank], times[rank]
        now = free[rank]
        for kind, chunk, i in actions[len(spans) :]:
            index, start = chunk * m + i, now
            # When its input is there, or which rank waits for it.
            if kind == "F":
                if chunk:
                    arrives = forward[index - m]
                    if arrives is None:
                        waiting["F", index - m] = rank
                        break
                    if s.rank_of[chunk - 1] != rank:
                        start = max(now + overhead, arrives + transfer)
            elif kind == "W":
                if backward[index] is None:
                    raise Unproved(f"rank {rank}: {Action(kind, chunk, i)} comes before {chunk}I{i}, which it needs")
            else:
                if forward[index] is None:
                    raise Unproved(f"rank {rank}: {Action(kind, chunk, i)} comes before {chunk}F{i}, which it needs")
                if chunk < last:
                    arrives = backward[index + m]
                    if arrives is None:
                        waiting["B", index + m] = rank
                        break
                    if s.rank_of[chunk + 1] != rank:
                        start = max(now + overhead, arrives + transfer)
            # Run it, and wake the rank that waits for its output.
            now = start + seconds[kind][chunk]
            spans.append((start, now))
            if kind != "W":
                (forward if kind == "F" else backward)[index] = now
                woken = waiting.pop(("F" if kind == "F" else "B", index), None)
                if woken is not None:
                    ready.append(woken)
                to = chunk + 1 if kind == "F" else chunk - 1
                if 0 <= to <= last and s.rank_of[to] != rank:
                    now += overhead
            free[rank] = now
    if waiting:
        raise Unproved(f"deadlock: {'; '.join(_stuck(s, times, waiting))}")
    return times


def _stuck(s: PipelineSchedule, times: Times, waiting: Mapping[tuple[str, int], int]) -> list[str]:
    lines = []
    for (kind, key), rank in sorted(waiting.items(), key=lambda item: item[1]):
        chunk, i = divmod(key, s.micro_batches)
        at = s.actions[rank][len(times[rank])]
        lines.append(f"rank {rank} at {at} waits for {chunk}{kind}{i} of rank {s.rank_of[chunk]}")
    return lines


def unit(chunks: int) -> dict[str, list[float]]:
    """Return costs in which F, I and W take one unit of time each, and B two."""
    return {"F": [1.0] * chunks, "I": [1.0] * chunks, "W": [1.0] * chunks, "B": [2.0] * chunks}
