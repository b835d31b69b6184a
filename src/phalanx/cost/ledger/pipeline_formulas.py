"""Pipeline schedules in the price of a step: their bubble relative to 1f1b, and the activations that ranks hold. Each
schedule's formulas, for equal chunks, are in its row of schedule/pipeline/schedules.py; here they are evaluated on
columns of strategies. A strategy can also be run action by action: once it is filled a pipeline repeats itself, so of
many micro-batches a few rounds are run, and the rest is added at the pace of the slowest rank.

The makespans of one schedule under the costs of many strategies are computed at once, because dependencies between
actions do not depend on durations. The actions are sorted once into rounds, by the instants at which they would start
if each took one second: everything that an action needs, including the action before it on its rank, has ended before
its round. A round is then a few operations on arrays, over its ranks and all strategies, with the same sums as in
simulate.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from phalanx.cost.hardware.columns import Column
from phalanx.cost.pipeline_time import Costs
from phalanx.schedule.pipeline.actions import PipelineSchedule
from phalanx.schedule.pipeline.schedules import SCHEDULES, build, facts_of
from phalanx.schedule.pipeline.simulate import run
from phalanx.spec.strategy.spec import Strategy

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
KINDS = "FIWB"
"""The order in which costs list the actions of a chunk."""
_ROOM = 2_000_000
"""Maximum elements of the array of output times."""


@dataclass(frozen=True)
class ActionRound:
    """Independent actions of different ranks, as columns: each one's `rank`; `cost`, the index of its seconds; its
    `micro_batch`; and the indices of the outputs of chunks that it `needs` and `gives`: the last output but one is
    available from the start, the last is never read."""

    rank: Ints
    cost: Ints
    micro_batch: Ints
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
        """Return seconds until the last rank has finished, (strategies,). `seconds`: of an action, (kinds, chunks,
        strategies), kinds in the order of KINDS; `transfer`: of a message between ranks, (strategies,)."""
        each = max(1, _ROOM // self.outputs)
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
        return np.asarray(free.max(axis=0))

    def uneven_makespans(self, seconds: Floats, weights: Floats) -> Floats:
        """Return seconds until the last rank has finished, (pipelines,), if micro-batches differ and messages take no
        time. The seconds of an action are a weighted sum of `seconds`, (kinds x chunks, points), with the `weights`
        of its micro-batch, (pipelines, micro-batches, points)."""
        free = np.zeros((self.ranks, len(weights)))
        arrived = np.full((self.outputs, len(weights)), -np.inf)
        pipelines, micro_batches, width = weights.shape
        costs = (seconds @ weights.reshape(-1, width).T).reshape(-1, pipelines, micro_batches)
        for r in self.rounds:
            end = np.maximum(free[r.rank], arrived[r.needs]) + costs[r.cost, :, r.micro_batch]
            free[r.rank] = end
            arrived[r.gives] = end
        return np.asarray(free.max(axis=0))


@lru_cache(maxsize=128)
def rounds(name: str, ranks: int, micro_batches: int, virtual: int | None) -> ActionRounds:
    """Build a schedule by name (schedules.py) and sort its actions into rounds."""
    return sort_into_rounds(build(name, ranks, micro_batches, virtual))


def sort_into_rounds(s: PipelineSchedule) -> ActionRounds:
    """Sort a schedule's actions into rounds. Raises Unproved if the schedule cannot run."""
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
    # The output that each action reads and the one that it writes, as indices.
    here = chunk * s.micro_batches + micro_batch + np.where(forward, 0, cells)
    before = chunk + np.where(forward, -1, 1)  # the chunk whose output is read
    inside = (before >= 0) & (before < s.chunks) & ~weights
    rank_of = np.array(s.rank_of, dtype=np.int64)
    sent = inside & (rank_of[np.clip(before, 0, s.chunks - 1)] != rank)
    needs = np.where(sent, here + np.where(forward, -1, 1) * s.micro_batches, 2 * cells)
    gives = np.where(weights, 2 * cells + 1, here)
    cost = kind * s.chunks + chunk
    order = np.lexsort((rank, start))
    parts = np.split(order, np.flatnonzero(np.diff(start[order])) + 1)
    columns = (rank, cost, micro_batch, needs, gives)
    each = tuple(ActionRound(*(column[part] for column in columns)) for part in parts)
    return ActionRounds(s.ranks, s.chunks, 2 * cells + 2, each)


_ROWS = list(SCHEDULES.values())
"""Schedules by their number in columns: the rows of the table, then files in the order in which they were read."""
_NUMBERS = {name: number for number, name in enumerate(SCHEDULES)}
ROUNDS = 3
"""Micro-batches per rank to simulate: by then every schedule repeats itself."""


def schedule_number(name: str) -> int:
    """Return the number of a schedule in columns. Raises InputError for an unknown one."""
    if name not in SCHEDULES:
        facts = facts_of(name)  # a file is read again even if it has a number, since it may have changed
        if name not in _NUMBERS:
            _NUMBERS[name] = len(_ROWS)
            _ROWS.append(facts)
    return _NUMBERS[name]


def schedule_names() -> tuple[str, ...]:
    """Return the names of schedules, in the order of their numbers in columns."""
    return tuple(_NUMBERS)


def _mask(schedule: Column, fact: Literal["v_shaped", "split_backward"]) -> Column:
    return np.array([float(getattr(facts, fact)) for facts in _ROWS])[np.asarray(schedule, dtype=int)]


def v_shaped(schedule: Column) -> Column:
    """Return the mask of rows whose chunks lie in a V."""
    return _mask(schedule, "v_shaped")


def splits_backward(schedule: Column) -> Column:
    """Return the mask of rows whose backward passes are split in two."""
    return _mask(schedule, "split_backward")


def chunks_per_rank(schedule: Column, virtual: Column) -> Column:
    """Return the number of chunks per rank: 2 if they lie in a V, else `virtual`."""
    return np.where(v_shaped(schedule) > 0, 2.0, virtual)


def evaluate_by_schedule(
    schedule: Column, fact: Literal["bubble", "least_wait"], m: Column, p: Column, v: Column
) -> Column:
    """Evaluate a formula of the table on columns, each row by its schedule: m micro-batches, p ranks, v chunks."""
    usual = getattr(SCHEDULES[Strategy.schedule], fact)
    column: Column = np.asarray(usual(m, p, v), dtype=float)
    for number, facts in enumerate(_ROWS):
        formula = getattr(facts, fact)
        if formula is not usual:  # whose values are in the column already
            column = np.where(schedule == number, formula(m, p, v), column)
    return column


def bubble(schedule: Column, m: Column, p: Column, v: Column) -> Column:
    """Return the bubble with equal chunks over that of 1f1b with the same number per rank: m micro-batches, p ranks,
    v chunks each."""
    return evaluate_by_schedule(schedule, "bubble", m, p, v)


def micro_batches_in_flight(schedule: Column, m: Column, p: Column) -> tuple[Column, Column]:
    """Return the number of micro-batches whose activations the first and the last pipeline rank hold at once; 0 means
    1f1b's formula."""
    usual = SCHEDULES[Strategy.schedule].in_flight
    first, last = (np.full(np.shape(np.minimum(p, m)), of_rank) for of_rank in usual(m, p))
    for number, facts in enumerate(_ROWS):
        if facts.in_flight is usual:
            continue
        own = (schedule == number) & (p > 1)
        if not np.any(own):
            continue
        of_first, of_last = facts.in_flight(m, p)
        first, last = np.where(own, of_first, first), np.where(own, of_last, last)
    return first, last


def makespan(name: str, ranks: int, m: int, virtual: int, costs: Costs, slowest: float) -> float:
    """Return the seconds of a simulated pipeline with these costs of its chunks; `slowest`: of a micro-batch on the
    slowest rank."""
    return makespans(name, ranks, virtual, [m], [costs], [slowest])[0]


def makespans(
    name: str,
    ranks: int,
    virtual: int,
    m: Sequence[int],
    costs: Sequence[Costs],
    slowest: Sequence[float],
    most: int = ROUNDS,
) -> list[float]:
    """Return the seconds of pipelines that differ in their micro-batches and their chunks' costs; pipelines with
    equal actions are run in one call. `slowest`: as for `makespan`. `most`: micro-batches per rank that are run; the
    rest follows at the slowest rank's pace."""
    facts, seconds = facts_of(name), [0.0] * len(m)
    few = [min(n, most * ranks) if facts.repeats else n for n in m]
    for count in sorted(set(few)):
        alike = [i for i, n in enumerate(few) if n == count]
        ended = rounds(name, ranks, count, virtual if virtual > 1 else None).makespans(
            np.stack([_actions(costs[i]) for i in alike], axis=-1), np.array([costs[i].transfer for i in alike])
        )
        for i, end in zip(alike, ended.tolist(), strict=True):
            c = costs[i]
            # Without overlap a micro-batch passes all ranks before the next one starts.
            through = sum(c.forward) + sum(c.input_grad) + sum(c.weight_grad)
            pace = slowest[i] if facts.overlaps else through
            seconds[i] = end + (m[i] - count) * pace
    return seconds


def _actions(costs: Costs) -> npt.NDArray[np.float64]:
    """Return the seconds of each action of a chunk, (kinds, chunks)."""
    of_kind = {"F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad}
    of_kind["B"] = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
    return np.array([of_kind[kind] for kind in KINDS], dtype=float)
