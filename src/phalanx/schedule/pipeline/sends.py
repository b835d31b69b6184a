"""Insert sends and receives into a pipeline schedule: one pure function.

A message leaves as soon as its payload is computed, and its receive is posted at the same moment. The order comes
from simulating the schedule with F, I and W of equal length: every rank's actions and messages are sorted by one
clock that all ranks share. So even sends that block until they are received cannot deadlock: for the earliest message
that is still open, everything before it is done at both ends.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.schedule.pipeline.actions import Action, PipelineSchedule
from phalanx.schedule.pipeline.simulate import run, unit


def strip_sends(s: PipelineSchedule) -> PipelineSchedule:
    """Return the schedule without its sends and receives."""
    return replace(s, actions=tuple(tuple(a for a in actions if "_" not in a.kind) for actions in s.actions))


_Key = tuple[float, int, str, int, int]
"""Sort key: end time; computation before messages; then an order of messages that both ends agree on."""


def insert_sends(s: PipelineSchedule) -> PipelineSchedule:
    """Return the schedule with sends and receives inserted. Raises Unproved if it cannot be run."""
    ordered: list[list[tuple[_Key, Action]]] = [[] for _ in s.actions]
    for rank, (actions, times) in enumerate(zip(s.actions, run(s, unit(s.chunks)), strict=True)):
        for action, (_, end) in zip(actions, times, strict=True):
            kind, chunk, i = action
            ordered[rank].append(((end, 0, kind, chunk, i), action))
            to = chunk + 1 if kind == "F" else chunk - 1
            if kind == "W" or not 0 <= to < s.chunks or s.rank_of[to] == rank:
                continue
            way = "F" if kind == "F" else "B"
            key = (end, 1, way, chunk, i)
            ordered[rank].append((key, Action(f"SEND_{way}", chunk, i)))  # type: ignore[arg-type]
            ordered[s.rank_of[to]].append((key, Action(f"RECV_{way}", to, i)))  # type: ignore[arg-type]
    return replace(s, actions=tuple(tuple(action for _, action in sorted(actions)) for actions in ordered))
