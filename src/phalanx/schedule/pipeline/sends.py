"""Sends and receives, inserted into a pipeline schedule: one pure function.

A message goes when what it carries is made, and its receive is posted at that moment too, early: in the run of the
schedule with F, I and W of one length, every rank's actions and messages stand in the order of one clock for all
ranks. So even sends that block until they are received cannot deadlock: the earliest of all that are left has
everything before it done, at both ends.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.schedule.pipeline.schedules import Action, PipelineSchedule
from phalanx.schedule.pipeline.simulate import run, unit


def without(s: PipelineSchedule) -> PipelineSchedule:
    """The schedule without its sends and receives."""
    return replace(s, actions=tuple(tuple(a for a in own if "_" not in a.kind) for own in s.actions))


_After = tuple[float, int, str, int, int]
"""When something is over; computes before messages, and those in an order that both ends know."""


def inserted(s: PipelineSchedule) -> PipelineSchedule:
    """The schedule with its sends and receives. Raises Unproved where it cannot be run."""
    ordered: list[list[tuple[_After, Action]]] = [[] for _ in s.actions]
    for rank, (own, times) in enumerate(zip(s.actions, run(s, unit(s.chunks)), strict=True)):
        for action, (_, end) in zip(own, times, strict=True):
            kind, chunk, i = action
            ordered[rank].append(((end, 0, kind, chunk, i), action))
            to = chunk + 1 if kind == "F" else chunk - 1
            if kind == "W" or not 0 <= to < s.chunks or s.rank_of[to] == rank:
                continue
            way = "F" if kind == "F" else "B"
            after = (end, 1, way, chunk, i)
            ordered[rank].append((after, Action(f"SEND_{way}", chunk, i)))  # type: ignore[arg-type]
            ordered[s.rank_of[to]].append((after, Action(f"RECV_{way}", to, i)))  # type: ignore[arg-type]
    return replace(s, actions=tuple(tuple(action for _, action in sorted(own)) for own in ordered))
