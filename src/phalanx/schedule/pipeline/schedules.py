"""Pipeline schedules as data: the ordered actions of every pipeline rank, which rank holds which chunk of the model,
and one table, SCHEDULES, with a row per schedule that holds every fact about it.

    F  forward of a chunk      B  its backward pass: I and W fused
    I  gradient of its input   W  gradients of its weights

each for one micro-batch. Schedules are built without sends and receives, which pipeline/sends.py inserts. All are
synchronous: every gradient of a step belongs to the weights that the step began with.

naive        one micro-batch after the other
gpipe        all forward, then all backward (Huang et al. 2019)
1f1b         each forward waits until a backward has made room (Narayanan et al. 2019, with a flush)
interleaved  1f1b over several chunks per rank, dealt out in turns (Narayanan et al. 2021)
zb-h1        1f1b with W deferred to where a rank would be idle (Qi et al. 2023, "Zero Bubble Pipeline Parallelism")
zb-v         two chunks per rank, there and back in a V (Qi et al. 2024, "Pipeline Parallelism with Controllable
             Memory")
dualpipe-v   DualPipe (DeepSeek-AI 2024) cut in half: the same V, forward and backward in pairs

To add a schedule: add its name to `Schedule` in spec/strategy/spec.py, and here its builder and its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.strategy.spec import Schedule

Column = float | npt.NDArray[Any]
"""One number, or one per strategy."""

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]


class Action(NamedTuple):
    """One action of a rank on one chunk and micro-batch, written as torch does: 3F0 is the forward of chunk 3 for
    micro-batch 0. SEND_F sends the output of the chunk's F, RECV_F receives the input of it; SEND_B and RECV_B do the
    same for its backward pass."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The ordered `actions` of each rank, and the rank of each chunk (`rank_of`, in the order of the model)."""

    name: str
    micro_batches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def chunks(self) -> int:
        return len(self.rank_of)


def live_activations(actions: Sequence[Action]) -> list[int]:
    """Count the live activations after each action of a rank, in activations of one chunk for one micro-batch."""
    live, counts = 0, []
    for action in actions:
        live += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        counts.append(live)
    return counts


def last_weight_grad_at(actions: Sequence[Action]) -> dict[int, int]:
    """Map each chunk of a rank to the index of the action that completes its weight gradients, in ascending order."""
    last: dict[int, int] = {}
    for at, action in enumerate(actions):
        if action.kind in ("B", "W"):
            last.pop(action.chunk, None)
            last[action.chunk] = at
    return last


def splits(s: PipelineSchedule) -> bool:
    """Tell whether any backward pass is split into I and W."""
    return any(action.kind == "I" for actions in s.actions for action in actions)


def round_robin(ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """Return the rank of each chunk when chunks are dealt out in turns: 0 1 2 0 1 2 for 3 ranks, virtual=2."""
    return tuple(chunk % ranks for chunk in range(ranks * virtual))


def v_shape(ranks: int) -> tuple[int, ...]:
    """Return the rank of each chunk in a V: 0 1 2 2 1 0 for 3 ranks. The last rank holds two adjacent chunks."""
    return (*range(ranks), *reversed(range(ranks)))


def _naive(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    for rank in range(ranks):
        yield [Action(kind, rank, i) for i in range(m) for kind in ("F", "B")]


def _gpipe(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    for rank in range(ranks):
        yield [Action(kind, rank, i) for kind in ("F", "B") for i in range(m)]


def _one_f_one_b(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, m)
        yield [*_paired(warm_up, [Action("F", rank, i) for i in range(m)], [Action("B", rank, i) for i in range(m)])]


def _interleaved(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    rounds = max(1, m // ranks)
    each = m // rounds  # micro-batches that a chunk runs per turn
    for rank in range(ranks):
        turns = [(r, v, r * each + i) for r in range(rounds) for v in range(virtual) for i in range(each)]
        forward = [Action("F", v * ranks + rank, i) for _, v, i in turns]
        backward = [Action("B", (virtual - 1 - v) * ranks + rank, i) for _, v, i in turns]
        warm_up = (virtual - 1) * each + 2 * (ranks - 1 - rank) if virtual > 1 else ranks - 1 - rank
        yield [*_paired(min(warm_up, len(forward)), forward, backward)]


def _paired(warm_up: int, forward: list[Action], backward: list[Action]) -> Iterator[Action]:
    """Yield the warm-up forwards, then one forward and one backward in turns, then the remaining backwards."""
    yield from forward[:warm_up]
    for i, action in enumerate(forward[warm_up:]):
        yield action
        yield backward[i]
    yield from backward[len(forward) - warm_up :]


def _zb_h1(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """As 1f1b, but rank r defers W by r micro-batches: then no rank holds more activations than the first."""
    for rank in range(ranks):
        actions = [Action("F", rank, i) for i in range(min(ranks - rank, m))]
        for i in range(m):
            actions.append(Action("I", rank, i))
            if i >= rank:
                actions.append(Action("W", rank, i - rank))
            if i + ranks - rank < m:
                actions.append(Action("F", rank, i + ranks - rank))
        yield [*actions, *(Action("W", rank, i) for i in range(max(0, m - rank), m))]


class _Counted:
    """The actions of a rank with two chunks. Each kind on each chunk takes its micro-batches in order, so a counter
    per (kind, chunk) gives the number of the next one."""

    def __init__(self, chunks: tuple[int, int]) -> None:
        self.chunks = chunks
        self.actions: list[Action] = []
        self.done = {(kind, which): 0 for kind in "FBIW" for which in (0, 1)}

    def add(self, *words: str) -> None:
        """Append actions: `F0` is the next forward of the rank's first chunk, `I1` the next I of its second."""
        for word in words:
            kind, which = word[0], int(word[1])
            self.actions.append(Action(kind, self.chunks[which], self.done[kind, which]))  # type: ignore[arg-type]
            self.done[kind, which] += 1


def _zb_v(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """Build for at least as many micro-batches as fill the pipeline, then drop those beyond m."""
    n = max(2 * ranks - 1, m)
    for rank in range(ranks):
        counted = _Counted((rank, 2 * ranks - 1 - rank))
        counted.add(*["F0"] * (2 * (ranks - rank) - 1))
        counted.add(*["F1", "F0"] * rank)
        counted.add(*["F1", "I1", "W1"] * (ranks - rank))
        while counted.done["F", 1] < n:
            counted.add(*["F0"] * (counted.done["F", 0] < n), "I0", "W0", "F1", "I1", "W1")
        counted.add(*["I0", "I1"] * rank)
        counted.add(*["I0", "W0"] * (ranks - rank))
        counted.add(*["W1"] * (n - counted.done["W", 1]), *["W0"] * (n - counted.done["W", 0]))
        yield [a for a in counted.actions if a.micro_batch < m]


def _dualpipe_v(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    for rank in range(ranks):
        last = ranks - 1 - rank
        counted = _Counted((rank, 2 * ranks - 1 - rank))
        deferred: list[int] = []  # the chunks whose W is due, the oldest first
        counted.add(*["F0"] * (2 * last))
        counted.add(*["F0", "F1"] * (rank + 1))
        counted.add(*["I1", "W1", "F1"] * last)
        counted.add(*["F0", "B1", "F1", "B0"] * (m - 2 * ranks + rank + 1))
        counted.add(*["B1", "F1", "B0"] * last)
        turning = rank + 1  # backward passes of both chunks, the later half of them without W
        for i, which in enumerate(chain.from_iterable(repeat((1, 0), turning))):
            if i < turning // 2 * 2 + (rank % 2 == 0):
                counted.add(f"B{which}")
            else:
                counted.add(f"I{which}")
                deferred.append(which)
        for _ in range(last):
            counted.add(f"W{deferred.pop(0)}", "I0")
            deferred.append(0)
        counted.add(*(f"W{which}" for which in deferred))
        yield _fused_counts(counted)


def _fused_counts(counted: _Counted) -> list[Action]:
    """Number the micro-batches anew: a chunk's fused B and split I, W draw from the same sequence."""
    seen: dict[tuple[str, int], int] = {}
    actions = []
    for kind, chunk, _ in counted.actions:
        counts = [("I", chunk), ("W", chunk)] if kind == "B" else [(kind, chunk)]
        actions.append(Action(kind, chunk, seen.get(counts[0], 0)))
        for key in counts:
            seen[key] = seen.get(key, 0) + 1
    return actions


Refusal = tuple[str, str]
"""Why a number of micro-batches cannot be scheduled, and what to do about it."""


def _any_number(ranks: int, m: int) -> Refusal | None:
    return None


def _equal_rounds(ranks: int, m: int) -> Refusal | None:
    rounds = max(1, m // ranks)
    if m % rounds == 0:
        return None
    return f"interleaved goes through {rounds} rounds of equally many on {ranks} ranks", f"use a multiple of {ranks}"


def _two_per_rank(ranks: int, m: int) -> Refusal | None:
    if m >= 2 * ranks:
        return None
    return f"dualpipe-v needs two per rank to fill both ways, {2 * ranks}", "use zb-v for fewer"


# Formulas of equal chunks: m micro-batches, p ranks, v chunks per rank. Numbers or columns.


def _bubble_1f1b(m: Column, p: Column, v: Column) -> Column:
    return 1.0


def _bubble_naive(m: Column, p: Column, v: Column) -> Column:
    """No other rank works while one does."""
    return m


def _bubble_interleaved(m: Column, p: Column, v: Column) -> Column:
    """With fewer micro-batches than ranks, a rank waits for the first of them to come round before each chunk."""
    return np.where(m < p, (v * (p - m) + m - 1) / np.maximum(p - 1, 1), 1.0)


def _bubble_zb_h1(m: Column, p: Column, v: Column) -> Column:
    """(p-1)(F+I-W) instead of (p-1)(F+I+W): a third where F, I and W take the same time. With fewer than p
    micro-batches only m - 1 passes W fill the wait of a rank: (p-1)(F+I) - (m-1) W."""
    share: Column = np.maximum(p - 1, 2 * p - 1 - m) / (3 * np.maximum(p - 1, 1))
    return share


def _bubble_zb_v(m: Column, p: Column, v: Column) -> Column:
    """The same (p-1)(F+I-W) of chunks half as large, over 1f1b with two chunks per rank. One micro-batch waits for
    2 (p-1) chunks there and back; each further one fills a W of both chunks, until (3p-1)/2 of them leave p-1."""
    share: Column = np.maximum(p - 1, 4 * p - 2 - 2 * m) / (3 * np.maximum(p - 1, 1))
    return share


def _bubble_dualpipe_v(m: Column, p: Column, v: Column) -> Column:
    """A third, as zb-v with its 2p micro-batches or more."""
    return 1 / 3


def _in_flight_1f1b(m: Column, p: Column) -> tuple[Column, Column]:
    return 0.0, 1.0


def _in_flight_naive(m: Column, p: Column) -> tuple[Column, Column]:
    return 1.0, 1.0


def _in_flight_gpipe(m: Column, p: Column) -> tuple[Column, Column]:
    return m, m


def _in_flight_zb_h1(m: Column, p: Column) -> tuple[Column, Column]:
    both = np.minimum(p, m)
    return both, both


def _in_flight_zb_v(m: Column, p: Column) -> tuple[Column, Column]:
    """The first rank's second chunk runs right before its backward pass, so of few micro-batches it holds only one
    twice; the last rank's chunks run one after the other."""
    return np.minimum(p, (m + 1) / 2), np.minimum(p, m)


def _in_flight_dualpipe_v(m: Column, p: Column) -> tuple[Column, Column]:
    both = np.minimum(p + 0.5, m)
    return both, both


def _wait_1f1b(m: Column, p: Column, v: Column) -> Column:
    return p - 1


def _wait_naive(m: Column, p: Column, v: Column) -> Column:
    return m * (p - 1)


def _wait_interleaved(m: Column, p: Column, v: Column) -> Column:
    return np.where(m < p, (v * (p - m) + m - 1) / v, (p - 1) / v)


def _wait_zero(m: Column, p: Column, v: Column) -> Column:
    return (p - 1) / 3


def _wait_zero_in_a_v(m: Column, p: Column, v: Column) -> Column:
    """Of chunks half as large."""
    return (p - 1) / 6


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """Every fact about one pipeline schedule. No field has a default: a row that lacks a fact cannot be made."""

    name: str
    split_backward: bool
    """Whether the backward pass runs as I and W (at least some of it), so that W can be deferred."""
    v_shaped: bool
    """Whether chunks lie in a V (`v_shape`), two per rank, instead of being dealt out in turns (`round_robin`)."""
    chunks: int
    """Chunks per rank where `virtual` is not given."""
    takes_virtual: bool
    """Whether `virtual` chooses the chunks per rank."""
    counterpart: str
    """The same schedule with several chunks per rank if this one has one, and the other way round; "" if none."""
    in_megatron: bool
    """Whether Megatron-LM, and so what is built on it, runs it."""
    overlaps: bool
    """Whether ranks work on several micro-batches at the same time."""
    refusal: Callable[[int, int], Refusal | None]
    """(ranks, micro-batches) -> why so many micro-batches cannot be scheduled, or None if they can."""
    build: Callable[[int, int, int], Iterable[list[Action]]]
    """(ranks, chunks per rank, micro-batches) -> the actions of each rank, without sends and receives."""
    bubble: Callable[[Column, Column, Column], Column]
    """(m, p, v) -> the bubble over that of 1f1b with as many chunks per rank."""
    in_flight: Callable[[Column, Column], tuple[Column, Column]]
    """(m, p) -> micro-batches whose activations the first and the last pipeline rank hold at once. (0, 1): as 1f1b
    and interleaved do, whose formula needs `virtual` and stands in cost/ledger/live_bytes.py."""
    least_wait: Callable[[Column, Column, Column], Column]
    """(m, p, v) -> the least idle time of a rank in a step, in units of one micro-batch's passes over p ranks: what
    the search prunes by."""

    def __post_init__(self) -> None:
        missing = [f.name for f in fields(self) if getattr(self, f.name) is None]
        if missing:
            raise TypeError(f"pipeline schedule {self.name!r} lacks {', '.join(missing)}")


def table(rows: Iterable[ScheduleFacts], names: Sequence[str] = get_args(Schedule)) -> dict[str, ScheduleFacts]:
    """Return the rows by name, in order. Raises TypeError unless they are exactly the schedules that a Strategy can
    name, once each, and unless counterparts name each other."""
    rows = list(rows)
    present = [row.name for row in rows]
    faults = [
        *(f"{name!r} is a Schedule of spec/strategy/spec.py but has no row" for name in names if name not in present),
        *(f"{name!r} has a row but is no Schedule of spec/strategy/spec.py" for name in present if name not in names),
        *(f"{name!r} has {present.count(name)} rows" for name in dict.fromkeys(present) if present.count(name) > 1),
    ]
    by_name = {row.name: row for row in rows}
    for row in rows:
        other = by_name.get(row.counterpart)
        if row.counterpart and (other is None or other.counterpart != row.name):
            faults.append(f"{row.name!r} names {row.counterpart!r} as its counterpart, which does not name it")
    if faults:
        raise TypeError(f"pipeline schedules: {'; '.join(faults)}")
    return by_name


SCHEDULES = table(
    [
        ScheduleFacts(
            name="naive",
            split_backward=False,
            v_shaped=False,
            chunks=1,
            takes_virtual=False,
            counterpart="",
            in_megatron=False,
            overlaps=False,
            refusal=_any_number,
            build=_naive,
            bubble=_bubble_naive,
            in_flight=_in_flight_naive,
            least_wait=_wait_naive,
        ),
        ScheduleFacts(
            name="gpipe",
            split_backward=False,
            v_shaped=False,
            chunks=1,
            takes_virtual=False,
            counterpart="",
            in_megatron=False,
            overlaps=True,
            refusal=_any_number,
            build=_gpipe,
            bubble=_bubble_1f1b,
            in_flight=_in_flight_gpipe,
            least_wait=_wait_1f1b,
        ),
        ScheduleFacts(
            name="1f1b",
            split_backward=False,
            v_shaped=False,
            chunks=1,
            takes_virtual=False,
            counterpart="interleaved",
            in_megatron=True,
            overlaps=True,
            refusal=_any_number,
            build=_one_f_one_b,
            bubble=_bubble_1f1b,
            in_flight=_in_flight_1f1b,
            least_wait=_wait_1f1b,
        ),
        ScheduleFacts(
            name="interleaved",
            split_backward=False,
            v_shaped=False,
            chunks=2,
            takes_virtual=True,
            counterpart="1f1b",
            in_megatron=True,
            overlaps=True,
            refusal=_equal_rounds,
            build=_interleaved,
            bubble=_bubble_interleaved,
            in_flight=_in_flight_1f1b,
            least_wait=_wait_interleaved,
        ),
        ScheduleFacts(
            name="zb-h1",
            split_backward=True,
            v_shaped=False,
            chunks=1,
            takes_virtual=False,
            counterpart="",
            in_megatron=False,
            overlaps=True,
            refusal=_any_number,
            build=_zb_h1,
            bubble=_bubble_zb_h1,
            in_flight=_in_flight_zb_h1,
            least_wait=_wait_zero,
        ),
        ScheduleFacts(
            name="zb-v",
            split_backward=True,
            v_shaped=True,
            chunks=2,
            takes_virtual=False,
            counterpart="",
            in_megatron=False,
            overlaps=True,
            refusal=_any_number,
            build=_zb_v,
            bubble=_bubble_zb_v,
            in_flight=_in_flight_zb_v,
            least_wait=_wait_zero_in_a_v,
        ),
        ScheduleFacts(
            name="dualpipe-v",
            split_backward=True,
            v_shaped=True,
            chunks=2,
            takes_virtual=False,
            counterpart="",
            in_megatron=False,
            overlaps=True,
            refusal=_two_per_rank,
            build=_dualpipe_v,
            bubble=_bubble_dualpipe_v,
            in_flight=_in_flight_dualpipe_v,
            least_wait=_wait_zero_in_a_v,
        ),
    ]
)


def build(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> PipelineSchedule:
    """Build a schedule by name, without sends and receives. `virtual`: chunks per rank, by default as the table says.

    Raises InputError for an unknown name, a number below 1, a `virtual` that the schedule does not take, and a number
    of micro-batches that it refuses.
    """
    if name not in SCHEDULES:
        raise InputError("schedule", name, "no such schedule", nearest(name, SCHEDULES))
    for field, value in (("ranks", ranks), ("micro-batches", micro_batches), ("virtual", virtual)):
        if value is not None and value < 1:
            raise InputError(field, value, "must be at least 1")
    facts = SCHEDULES[name]
    chunks = virtual or facts.chunks
    if chunks != facts.chunks and not facts.takes_virtual:
        raise InputError("virtual", chunks, f"{name} has {facts.chunks} per rank", "use interleaved, or leave it out")
    refusal = facts.refusal(ranks, micro_batches)
    if refusal:
        raise InputError("micro-batches", micro_batches, *refusal)
    actions = tuple(map(tuple, facts.build(ranks, chunks, micro_batches)))
    rank_of = v_shape(ranks) if facts.v_shaped else round_robin(ranks, chunks)
    return PipelineSchedule(name, micro_batches, rank_of, actions)
