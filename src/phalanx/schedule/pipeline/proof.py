"""Proof of a pipeline schedule: every forward and backward pass runs exactly once, on its chunk's rank, after what it
needs; nothing deadlocks, whether sends are buffered or block until they are received; and how many activations each
rank holds.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from phalanx.schedule.pipeline.actions import Action, PipelineSchedule, live_activations
from phalanx.schedule.pipeline.simulate import insert_sends, run, strip_sends, unit_costs
from phalanx.spec.errors import InputError, Unproved

_MOST_PASSES = 30_000
"""Forward passes of chunks in a schedule that is proved or priced: 3 seconds of work."""


@dataclass(frozen=True)
class PipelineProof:
    """The result of a proof. `peak`: per rank, the most activations that live at once, each of one chunk for one
    micro-batch, from its F to its B or W. `messages`: how many travel between ranks in a step."""

    peak: tuple[int, ...]
    messages: int


def require_few(passes: int, name: str, value: object) -> None:
    """Require that a schedule can be followed pass by pass in seconds. Raises InputError."""
    if passes > _MOST_PASSES:
        reason = f"{passes:,} forward passes are too many to follow one by one: at most {_MOST_PASSES:,}"
        raise InputError(name, value, reason, "phalanx predict prices a pipeline of any size in closed form")


def prove(s: PipelineSchedule) -> PipelineProof:
    """Prove a schedule, with its own sends and receives if it has any, otherwise with those inserted by
    `insert_sends`. Raises Unproved, with rank, action and reason."""
    computes = strip_sends(s)
    _complete(computes)
    run(computes, unit_costs(s.chunks))
    complete = s if any("_" in a.kind for actions in s.actions for a in actions) else insert_sends(computes)
    _messages(complete)
    for blocking in (False, True):
        _deliver(complete, blocking)
    messages = sum(a.kind.startswith("SEND") for actions in complete.actions for a in actions)
    return PipelineProof(tuple(max(live_activations(actions), default=0) for actions in computes.actions), messages)


def _complete(s: PipelineSchedule) -> None:
    counts = Counter(a for actions in s.actions for a in actions)
    for rank, actions in enumerate(s.actions):
        for action in actions:
            if not 0 <= action.chunk < s.chunks or not 0 <= action.micro_batch < s.micro_batches:
                raise Unproved(f"rank {rank}: {action} is of no chunk or micro-batch of this schedule")
            if s.rank_of[action.chunk] != rank:
                raise Unproved(f"rank {rank}: {action} belongs to rank {s.rank_of[action.chunk]}")
    for action, times in counts.items():
        if times > 1:
            raise Unproved(f"rank {s.rank_of[action.chunk]}: {action} runs {times} times")
    for chunk, rank in enumerate(s.rank_of):
        for i in range(s.micro_batches):
            if not counts[Action("F", chunk, i)]:
                raise Unproved(f"rank {rank}: {chunk}F{i} is missing")
            fused, *split = (counts[Action(kind, chunk, i)] for kind in ("B", "I", "W"))
            if [fused, *split] not in ([1, 0, 0], [0, 1, 1]):
                raise Unproved(
                    f"rank {rank}: the backward pass of chunk {chunk} for micro-batch {i} runs "
                    f"{fused} times as B, {split[0]} as I and {split[1]} as W; it needs one B, or one I and one W"
                )


def _messages(s: PipelineSchedule) -> None:
    """Require one send per crossing between ranks, after its payload is computed, and one receive, before the payload
    is used."""
    at = {action: (rank, i) for rank, actions in enumerate(s.actions) for i, action in enumerate(actions)}
    expected: set[Action] = set()
    for chunk, rank in enumerate(s.rank_of[:-1]):
        if rank == s.rank_of[chunk + 1]:
            continue
        for way, source, target in (("F", chunk, chunk + 1), ("B", chunk + 1, chunk)):
            for i in range(s.micro_batches):
                send, receive = Action(f"SEND_{way}", source, i), Action(f"RECV_{way}", target, i)  # type: ignore[arg-type]
                expected |= {send, receive}
                producer, consumer = (_pass(way, c, i, at) for c in (source, target))
                for action, neighbour, order in ((send, producer, 1), (receive, consumer, -1)):
                    where = s.rank_of[action.chunk]
                    if at.get(action, (None,))[0] != where:
                        raise Unproved(f"rank {where}: {action} is missing")
                    if (at[action][1] - at[neighbour][1]) * order < 0:
                        raise Unproved(
                            f"rank {where}: {action} comes {'before' if order > 0 else 'after'} {neighbour}"
                        )
    for rank, actions in enumerate(s.actions):
        for action, times in Counter(a for a in actions if "_" in a.kind).items():
            if action not in expected:
                raise Unproved(f"rank {rank}: {action} has no use on any rank")
            if times > 1:
                raise Unproved(f"rank {rank}: {action} runs {times} times")


def _pass(way: str, chunk: int, i: int, at: Container[Action]) -> Action:
    """Return the action that crosses chunks: F on the way forward, B on the way back, or I if that is split."""
    forward, fused, split = (Action(kind, chunk, i) for kind in ("F", "B", "I"))
    return forward if way == "F" else fused if fused in at else split


def _deliver(s: PipelineSchedule, blocking: bool) -> None:
    """Require that all messages arrive: a receive waits for its send, and a `blocking` send waits for its receive."""
    position = [0] * s.ranks
    at = {action: (rank, i) for rank, actions in enumerate(s.actions) for i, action in enumerate(actions)}
    ready = list(range(s.ranks))
    while ready:
        rank = ready.pop()
        actions = s.actions[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            if "_" in action.kind:
                peer, peer_at = at[_other_end(action)]
                sends = action.kind.startswith("SEND")
                if position[peer] < peer_at and (blocking or not sends):
                    break
                if blocking and position[peer] == peer_at:  # both ends have arrived: both go on
                    position[peer] += 1
                    ready.append(peer)
                elif sends:
                    ready.append(peer)
            position[rank] += 1
    stuck = [r for r in range(s.ranks) if position[r] < len(s.actions[r])]
    if stuck:
        stops = (f"rank {r} at {s.actions[r][position[r]]}" for r in stuck)
        how = "sends that block" if blocking else "buffered sends"
        raise Unproved(f"deadlock with {how}: {' against '.join(stops)}")


def _other_end(action: Action) -> Action:
    sends, way = action.kind.startswith("SEND"), action.kind[-1]
    onward = 1 if way == "F" else -1
    kind = f"{'RECV' if sends else 'SEND'}_{way}"
    return Action(kind, action.chunk + (onward if sends else -onward), action.micro_batch)  # type: ignore[arg-type]


def prove_slots(s: PipelineSchedule, slots: Sequence[Sequence[Sequence[Action]]]) -> None:
    """Prove a schedule whose CSV cells are time slots: every action has a later slot than everything it needs. Raises
    Unproved, with the number of violations and the first."""
    when = {action: at for row in slots for at, cell in enumerate(row) for action in cell}
    wrong = []
    for rank, row in enumerate(slots):
        for at, action in ((at, a) for at, cell in enumerate(row) for a in cell if "_" not in a.kind):
            for need in _needs(s, action, when):
                slot = when.get(need)
                if slot is None or slot >= at:
                    where = "which is missing" if slot is None else f"which is in slot {slot}"
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
