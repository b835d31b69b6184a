"""The pipeline schedules: one table, SCHEDULES, with a row per schedule that holds every fact about it.

Schedules are built without sends and receives, which pipeline/simulate.py inserts; actions.py says what an
action is. All are synchronous: every gradient of a step belongs to the weights that the step began with.

naive        one micro-batch after the other
gpipe        all forward, then all backward (Huang et al. 2019)
1f1b         each forward waits until a backward has made room (Narayanan et al. 2019, with a flush)
interleaved  1f1b over several chunks per rank, dealt out in turns (Narayanan et al. 2021)
zb-h1        1f1b with W deferred to where a rank would be idle (Qi et al. 2023, "Zero Bubble Pipeline Parallelism")
zb-v         two chunks per rank, there and back in a V (Qi et al. 2024, "Pipeline Parallelism with Controllable
             Memory")
dualpipe-v   DualPipe (DeepSeek-AI 2024) cut in half: the same V, forward and backward in pairs

To add a schedule: add its name to `Schedule` in spec/strategy/spec.py, its builder in pipeline/orders.py, and
here its row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from phalanx.schedule.pipeline import orders
from phalanx.schedule.pipeline.actions import Action, PipelineSchedule, round_robin, splits, v_shape
from phalanx.schedule.pipeline.proof import prove, require_few
from phalanx.schedule.pipeline.simulate import run, strip_sends, unit_costs
from phalanx.schedule.pipeline.torch_csv import from_csv
from phalanx.spec.documents import require_unchanged, version_of
from phalanx.spec.errors import InputError, Unproved, nearest
from phalanx.spec.strategy.spec import Schedule

Column = float | npt.NDArray[Any]
"""One number, or one per strategy."""

Refusal = tuple[str, str]
"""Refusal of a number of micro-batches: the reason and the remedy."""


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
    """A third of 1f1b's bubble, as zb-v with at least 2p micro-batches."""
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
    """On the first rank, the second chunk's forward runs right before its backward pass, so that only one of few
    micro-batches is held twice; on the last rank the chunks run one after the other."""
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
    """Idle time with chunks half as large."""
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
    """The counterpart with several chunks per rank if this schedule has one, and vice versa; "" if none."""
    overlaps: bool
    """Whether ranks work on several micro-batches at the same time."""
    repeats: bool
    """Whether further micro-batches only repeat its pattern, so that the time of many follows from that of few."""
    refusal: Callable[[int, int], Refusal | None]
    """(ranks, micro-batches) -> the refusal of that number of micro-batches, or None if it can be scheduled."""
    build: Callable[[int, int, int], Iterable[list[Action]]]
    """(ranks, chunks per rank, micro-batches) -> the actions of each rank, without sends and receives."""
    bubble: Callable[[Column, Column, Column], Column]
    """(m, p, v) -> the bubble over that of 1f1b with as many chunks per rank."""
    in_flight: Callable[[Column, Column], tuple[Column, Column]]
    """(m, p) -> micro-batches whose activations the first and the last pipeline rank hold at once. (0, 1): as in 1f1b
    and interleaved, whose formula needs `virtual` and is in cost/ledger/live_bytes.py."""
    least_wait: Callable[[Column, Column, Column], Column]
    """(m, p, v) -> the least idle time of a rank in a step, in units of one micro-batch's passes over p ranks: the
    bound by which the search prunes."""

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
            overlaps=False,
            repeats=True,
            refusal=_any_number,
            build=orders.naive,
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
            overlaps=True,
            repeats=True,
            refusal=_any_number,
            build=orders.gpipe,
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
            overlaps=True,
            repeats=True,
            refusal=_any_number,
            build=orders.one_f_one_b,
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
            overlaps=True,
            repeats=True,
            refusal=_equal_rounds,
            build=orders.interleaved,
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
            overlaps=True,
            repeats=True,
            refusal=_any_number,
            build=orders.zb_h1,
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
            overlaps=True,
            repeats=True,
            refusal=_any_number,
            build=orders.zb_v,
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
            overlaps=True,
            repeats=True,
            refusal=_two_per_rank,
            build=orders.dualpipe_v,
            bubble=_bubble_dualpipe_v,
            in_flight=_in_flight_dualpipe_v,
            least_wait=_wait_zero_in_a_v,
        ),
    ]
)


def facts_of(name: str) -> ScheduleFacts:
    """Return the facts of a schedule: its row, or for a CSV file the facts that follow from its actions. Raises
    InputError for an unknown name, and for a file that is no schedule, is not proved, or places chunks as no strategy
    can."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    if not name.endswith(".csv"):
        raise InputError("schedule", name, "no such schedule", nearest(name, (*SCHEDULES, "FILE.csv")))
    version, facts = _facts_of_file(name)
    require_unchanged(Path(name), "schedule", version)
    return facts


@lru_cache(maxsize=32)
def _facts_of_file(name: str) -> tuple[tuple[int, int], ScheduleFacts]:
    version, s = version_of(Path(name)), strip_sends(from_csv(Path(name)))
    require_few(sum(map(len, s.actions)) // 2, "schedule", name)
    # What a strategy can express, and what runs.
    chunks, odd = divmod(s.chunks, s.ranks)
    v_shaped = s.rank_of == v_shape(s.ranks) and s.ranks > 1
    if odd or not (v_shaped or s.rank_of == round_robin(s.ranks, chunks)):
        reason = f"has chunks on ranks {', '.join(map(str, s.rank_of[:32]))}: neither dealt out in turns nor in a V"
        raise InputError("schedule", name, reason, "only phalanx pipeline show and prove take it")
    try:
        peak = prove(s).peak
        makespan = max(end for spans in run(s, unit_costs(s.chunks)) for _, end in spans)
    except Unproved as error:
        raise InputError("schedule", name, f"is not proved: {error}", f"see phalanx pipeline prove {name}") from None
    # Its formulas are numbers, since it has one size.
    least = 3 * s.micro_batches * chunks  # of a rank without bubble, in passes
    over = (makespan - least) / (3 * max(s.ranks - 1, 1))

    def refusal(ranks: int, m: int) -> Refusal | None:
        if (ranks, m) == (s.ranks, s.micro_batches):
            return None
        size = f"{s.ranks} pipeline ranks and {s.micro_batches} micro-batches"
        return f"{name} is a schedule of {size}, not of {ranks} and {m}", f"use it with {size}"

    facts = ScheduleFacts(
        name=name,
        split_backward=splits(s),
        v_shaped=v_shaped,
        chunks=chunks,
        takes_virtual=chunks > 1 and not v_shaped,
        counterpart="",
        overlaps=True,
        repeats=False,
        refusal=refusal,
        build=lambda ranks, per_rank, m: map(list, s.actions),
        bubble=lambda m, p, v: over,
        in_flight=lambda m, p: (max(peak[:-1], default=peak[-1]) / chunks, peak[-1] / chunks),
        least_wait=lambda m, p, v: 0.0,
    )
    return version, facts


def build(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> PipelineSchedule:
    """Build a schedule by name, without sends and receives. `virtual`: chunks per rank, by default as the table says.
    Raises InputError for an unknown name, a number below 1, a `virtual` that the schedule does not take, and a number
    of micro-batches that it refuses."""
    for field, value in (("ranks", ranks), ("micro-batches", micro_batches), ("virtual", virtual)):
        if value is not None and value < 1:
            raise InputError(field, value, "must be at least 1")
    facts = facts_of(name)
    chunks = virtual or facts.chunks
    if chunks != facts.chunks and not facts.takes_virtual:
        raise InputError("virtual", chunks, f"{name} has {facts.chunks} per rank", "use interleaved, or leave it out")
    refusal = facts.refusal(ranks, micro_batches)
    if refusal:
        raise InputError("micro-batches", micro_batches, *refusal)
    actions = tuple(map(tuple, facts.build(ranks, chunks, micro_batches)))
    rank_of = v_shape(ranks) if facts.v_shaped else round_robin(ranks, chunks)
    return PipelineSchedule(name, micro_batches, rank_of, actions)
