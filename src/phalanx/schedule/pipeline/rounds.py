"""Makespan of one schedule under the costs of many strategies at once.

Dependencies between actions do not depend on durations. So the actions are sorted once into rounds, the instants at
which they would start if each took one second: everything an action needs, including the action before it on its
rank, has ended before its round. Then a round is a few operations on arrays, over its ranks and all strategies, with
the sums that simulate.py adds one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from phalanx.schedule.pipeline.actions import PipelineSchedule
from phalanx.schedule.pipeline.schedules import build
from phalanx.schedule.pipeline.simulate import run

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
KINDS = "FIWB"
"""The order in which costs list the actions of a chunk."""
_ROOM = 2_000_000
"""Maximum elements of the array of output times."""


@dataclass(frozen=True)
class ActionRound:
    """Independent actions of different ranks. Each action's `rank`; its `cost`, the place of its seconds; and the
    outputs of chunks that it `needs` and `gives`: the last but one is available from the start, the last is never
    read."""

    rank: Ints
    cost: Ints
    needs: Ints
    gives: Ints


@dataclass(frozen=True)
class ActionRounds:
    """A schedule's actions as rounds, in order."""

    ranks: int
    chunks: int
    outputs: int
    rounds: tuple[ActionRound, ...]

    def makespans(self, seconds: Floats, transfer: Floats) -> Floats:
        """Seconds until the last rank has finished, (strategies,). `seconds`: how long an action takes,
        (kinds, chunks, strategies), kinds in the order of KINDS; `transfer`: how long a message between ranks takes,
        (strategies,)."""
        each = max(1, _ROOM // (self.outputs))
        count = seconds.shape[2]
        parts = [slice(start, start + each) for start in range(0, count, each)]
        return np.concatenate([self._run(seconds[..., part], transfer[part]) for part in parts])

    def _run(self, seconds: Floats, transfer: Floats) -> Floats:
        count = seconds.shape[2]
        costs = np.ascontiguousarray(seconds.reshape(-1, count))
        free = np.zeros((self.ranks, count))  # when each rank has ended its last action
        arrived = np.full((self.outputs, count), -np.inf)
        for r in self.rounds:
            end = np.maximum(free[r.rank], arrived[r.needs]) + costs[r.cost]
            free[r.rank] = end
            arrived[r.gives] = end + transfer
        latest: Floats = free.max(axis=0)
        return latest


@lru_cache(maxsize=128)
def rounds(name: str, ranks: int, micro_batches: int, virtual: int | None) -> ActionRounds:
    """Build a schedule by name (schedules.py) and sort its actions into rounds."""
    return in_rounds(build(name, ranks, micro_batches, virtual))


def in_rounds(s: PipelineSchedule) -> ActionRounds:
    """Sort a schedule's actions into rounds. Raises Unproved for one that cannot run."""
    # Start times if every action takes a second: actions that start together form a round.
    alike: Sequence[float] = [1.0] * s.chunks
    times = run(s, dict.fromkeys(KINDS, alike))
    start = np.array([begin for own in times for begin, _ in own])
    rank = np.repeat(np.arange(s.ranks), [len(own) for own in times])
    kind = np.array([KINDS.index(action.kind) for action in chain(*s.actions)], dtype=np.int64)
    chunk = np.array([action.chunk for action in chain(*s.actions)], dtype=np.int64)
    micro_batch = np.array([action.micro_batch for action in chain(*s.actions)], dtype=np.int64)
    forward, weights = kind == KINDS.index("F"), kind == KINDS.index("W")
    cells = s.chunks * s.micro_batches
    # What each action reads and writes, as indices of outputs.
    here = chunk * s.micro_batches + micro_batch + np.where(forward, 0, cells)
    before = chunk + np.where(forward, -1, 1)  # the chunk whose output is read
    inside = (before >= 0) & (before < s.chunks) & ~weights
    rank_of = np.array(s.rank_of, dtype=np.int64)
    sent = inside & (rank_of[np.clip(before, 0, s.chunks - 1)] != rank)
    needs = np.where(sent, here + np.where(forward, -1, 1) * s.micro_batches, 2 * cells)
    gives = np.where(weights, 2 * cells + 1, here)
    cost = kind * s.chunks + chunk
    # Sort into rounds.
    order = np.lexsort((rank, start))
    bounds = np.flatnonzero(np.diff(start[order])) + 1
    parts = np.split(order, bounds)
    return ActionRounds(
        s.ranks,
        s.chunks,
        2 * cells + 2,
        tuple(ActionRound(rank[part], cost[part], needs[part], gives[part]) for part in parts),
    )
