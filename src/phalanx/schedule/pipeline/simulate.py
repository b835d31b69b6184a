"""Simulation of a pipeline schedule: every action starts as soon as what it needs is there; a deadlock is explained.

    F of a chunk   needs the F of the chunk before it
    I, B           need the I or B of the chunk after it, and their own F
    W              needs its own I

The output of another rank arrives one transfer later. Where a rank's own processor moves the bytes, sender and
receiver compute nothing meanwhile: the overhead o of LogP (Culler et al. 1993).

Where ranks share the cores of a host, a pass takes longer the more ranks compute at once: with 4 ranks on 2 cores,
twice as long as with one other rank. So a rank that waits for a message makes the others faster, and a bubble costs
less time than on ranks that have a core each. Cores are shared evenly (processor sharing, Kleinrock 1976): while n
ranks are at work, all of them go on at pace[n - 1] times the speed that they have with every rank at work.

A rank's work is its passes, and before and after them the messages, which its own processor moves.

`insert_sends` adds sends and receives to a schedule. A message leaves as soon as its payload is computed, and its
receive is posted at the same moment. The order comes from simulating the schedule with F, I and W of equal length:
every rank's actions and messages are sorted by one clock that all ranks share. So even sends that block until they
are received cannot deadlock: for the earliest message that is still open, everything before it is done at both ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from phalanx.schedule.pipeline.actions import Action, PipelineSchedule
from phalanx.spec.errors import Unproved

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


def unit_costs(chunks: int) -> dict[str, list[float]]:
    """Return costs in which F, I and W take one unit of time each, and B two."""
    return {"F": [1.0] * chunks, "I": [1.0] * chunks, "W": [1.0] * chunks, "B": [2.0] * chunks}


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
    """Yield a rank's receives, passes and sends, in order."""
    for kind, chunk, i in actions:
        way, onward = ("F", 1) if kind == "F" else ("B", -1)
        source, target = (chunk - onward, chunk + onward) if kind != "W" else (-1, -1)
        needs = (way, source, i) if 0 <= source < s.chunks else None
        if needs is not None and s.rank_of[source] != s.rank_of[chunk]:
            yield _Work(message, needs)
        yield _Work(seconds[kind][chunk], needs, (way, chunk, i) if kind != "W" else None, is_pass=True)
        if 0 <= target < s.chunks and s.rank_of[target] != s.rank_of[chunk]:
            yield _Work(message)


def strip_sends(s: PipelineSchedule) -> PipelineSchedule:
    """Return the schedule without its sends and receives."""
    return replace(s, actions=tuple(tuple(a for a in actions if "_" not in a.kind) for actions in s.actions))


_Key = tuple[float, int, str, int, int]
"""Sort key: end time; computation before messages; then an order of messages that both ends agree on."""


def insert_sends(s: PipelineSchedule) -> PipelineSchedule:
    """Return the schedule with sends and receives inserted. Raises Unproved if it cannot be run."""
    ordered: list[list[tuple[_Key, Action]]] = [[] for _ in s.actions]
    for rank, (actions, times) in enumerate(zip(s.actions, run(s, unit_costs(s.chunks)), strict=True)):
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
