"""A pipeline schedule, proved: every forward and every backward exactly once, on its own rank, after what it needs;
no deadlock, whether sends are buffered or block until they are received; how many activations each rank holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from phalanx.schedule.errors import Unproved
from phalanx.schedule.pipeline.schedules import Action, PipelineSchedule, held
from phalanx.schedule.pipeline.sends import inserted, without
from phalanx.schedule.pipeline.simulate import run, unit


@dataclass(frozen=True)
class PipelineProof:
    """`peak`: of each rank, the most activations that live at once, each of one chunk for one micro-batch, from its F
    to its B or W. `messages` between ranks."""

    peak: tuple[int, ...]
    messages: int


def prove(s: PipelineSchedule) -> PipelineProof:
    """Of a schedule with sends and receives these are proved as they stand, else those that are inserted.
    Raises Unproved, with rank, action and reason."""
    computes = without(s)
    _complete(computes)
    run(computes, unit(s.chunks))
    whole = s if any("_" in a.kind for own in s.actions for a in own) else inserted(computes)
    _messages(whole)
    for blocking in (False, True):
        _deliver(whole, blocking)
    messages = sum(a.kind.startswith("SEND") for own in whole.actions for a in own)
    return PipelineProof(tuple(max(held(own), default=0) for own in computes.actions), messages)


def _complete(s: PipelineSchedule) -> None:
    seen = Counter(a for own in s.actions for a in own)
    for rank, own in enumerate(s.actions):
        for action in own:
            if not 0 <= action.chunk < s.chunks or not 0 <= action.micro_batch < s.micro_batches:
                raise Unproved(f"rank {rank}: {action} is of no chunk or micro-batch that there is")
            if s.rank_of[action.chunk] != rank:
                raise Unproved(f"rank {rank}: {action} belongs to rank {s.rank_of[action.chunk]}")
    for action, times in seen.items():
        if times > 1:
            raise Unproved(f"rank {s.rank_of[action.chunk]}: {action} comes {times} times")
    for chunk, rank in enumerate(s.rank_of):
        for i in range(s.micro_batches):
            if not seen[Action("F", chunk, i)]:
                raise Unproved(f"rank {rank}: {chunk}F{i} is missing")
            whole, *parts = (seen[Action(kind, chunk, i)] for kind in ("B", "I", "W"))
            if [whole, *parts] not in ([1, 0, 0], [0, 1, 1]):
                raise Unproved(
                    f"rank {rank}: the backward pass of chunk {chunk} for micro-batch {i} is there "
                    f"{whole} times as B, {parts[0]} as I and {parts[1]} as W; one B, or one I and one W, is right"
                )


def _messages(s: PipelineSchedule) -> None:
    """Each crossing between ranks has one send, after what it carries is made, and one receive, before that is
    needed."""
    at = {action: (rank, i) for rank, own in enumerate(s.actions) for i, action in enumerate(own)}
    wanted: set[Action] = set()
    for chunk, rank in enumerate(s.rank_of[:-1]):
        if rank == s.rank_of[chunk + 1]:
            continue
        for way, source, target in (("F", chunk, chunk + 1), ("B", chunk + 1, chunk)):
            for i in range(s.micro_batches):
                send, receive = Action(f"SEND_{way}", source, i), Action(f"RECV_{way}", target, i)  # type: ignore[arg-type]
                wanted |= {send, receive}
                made, used = (_pass(way, c, i, at) for c in (source, target))
                for action, beside, order in ((send, made, 1), (receive, used, -1)):
                    where = s.rank_of[action.chunk]
                    if at.get(action, (None,))[0] != where:
                        raise Unproved(f"rank {where}: {action} is missing")
                    if (at[action][1] - at[beside][1]) * order < 0:
                        raise Unproved(f"rank {where}: {action} comes {'before' if order > 0 else 'after'} {beside}")
    for rank, own in enumerate(s.actions):
        for action, times in Counter(a for a in own if "_" in a.kind).items():
            if action not in wanted:
                raise Unproved(f"rank {rank}: {action} is needed by nobody")
            if times > 1:
                raise Unproved(f"rank {rank}: {action} comes {times} times")


def _pass(way: str, chunk: int, i: int, at: Container[Action]) -> Action:
    """The forward of a chunk, or whichever its backward pass is, B or I."""
    forward, whole, part = (Action(kind, chunk, i) for kind in ("F", "B", "I"))
    return forward if way == "F" else whole if whole in at else part


def _deliver(s: PipelineSchedule, blocking: bool) -> None:
    """That all messages arrive: a receive waits for its send, and where those are `blocking` a send for its
    receive."""
    position = [0] * s.ranks
    at = {action: (rank, i) for rank, own in enumerate(s.actions) for i, action in enumerate(own)}
    ready = list(range(s.ranks))
    while ready:
        rank = ready.pop()
        own = s.actions[rank]
        while position[rank] < len(own):
            action = own[position[rank]]
            if "_" in action.kind:
                peer, there = at[_other_end(action)]
                sends = action.kind.startswith("SEND")
                if position[peer] < there and (blocking or not sends):
                    break
                if blocking and position[peer] == there:  # both are here: both go on
                    position[peer] += 1
                    ready.append(peer)
                elif sends:
                    ready.append(peer)
            position[rank] += 1
    stuck = [r for r in range(s.ranks) if position[r] < len(s.actions[r])]
    if stuck:
        said = (f"rank {r} at {s.actions[r][position[r]]}" for r in stuck)
        how = "sends that block" if blocking else "buffered sends"
        raise Unproved(f"deadlock with {how}: {' against '.join(said)}")


def _other_end(action: Action) -> Action:
    sends, way = action.kind.startswith("SEND"), action.kind[-1]
    onward = 1 if way == "F" else -1
    kind = f"{'RECV' if sends else 'SEND'}_{way}"
    return Action(kind, action.chunk + (onward if sends else -onward), action.micro_batch)  # type: ignore[arg-type]


def prove_slots(s: PipelineSchedule, slots: Sequence[Sequence[Sequence[Action]]]) -> None:
    """Of a picture, whose cells are slots of time: every action is in a slot after all that it needs.
    Raises Unproved, with how many are not, and the first."""
    when = {action: at for own in slots for at, cell in enumerate(own) for action in cell}
    wrong = []
    for rank, own in enumerate(slots):
        for at, action in ((at, a) for at, cell in enumerate(own) for a in cell if "_" not in a.kind):
            for need in _needs(s, action, when):
                there = when.get(need)
                if there is None or there >= at:
                    where = "which is nowhere" if there is None else f"which is in slot {there}"
                    wrong.append(f"rank {rank}: {action} is in slot {at} and needs {need}, {where}")
    if wrong:
        raise Unproved(f"{len(wrong)} actions come too early; {wrong[0]}")


def _needs(s: PipelineSchedule, action: Action, when: Mapping[Action, int]) -> list[Action]:
    kind, chunk, i = action
    if kind == "F":
        return [Action("F", chunk - 1, i)] if chunk else []
    if kind == "W":
        return [Action("I", chunk, i)]
    after = [_pass("B", chunk + 1, i, when)] if chunk < s.chunks - 1 else []
    return [Action("F", chunk, i), *after]
