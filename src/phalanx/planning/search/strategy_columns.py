"""Many strategies as NumPy columns, one for each field that a search chooses, and the options of that choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.cost.ledger.pipeline_formulas import schedule_names, schedule_number
from phalanx.frameworks.stack import given_ends
from phalanx.planning.search.limits import UNLIMITED, SearchLimits
from phalanx.schedule.pipeline.schedules import SCHEDULES
from phalanx.spec.job import Job
from phalanx.spec.strategy import recompute as recomputation
from phalanx.spec.strategy.spec import AXES, Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions
from phalanx.spec.strategy.where import Words
from phalanx.spec.strategy.zero_levels import level_columns

Ints = npt.NDArray[np.int64]
SEARCHED = ("pp/dp/cp/tp", "dp/pp/cp/tp")
"""Orders that a search chooses from: stages outermost, the default of the mesh; or replicas outermost, with stages on
neighbouring nodes."""
ORDERS = SEARCHED + tuple(name for name in map("/".join, permutations(AXES)) if name not in SEARCHED)
"""Every order of the mesh's axes, SEARCHED first."""
RECOMPUTE = ("none", "selective", "full", "every:2", "every:4")


@dataclass(frozen=True)
class Options:
    """The values of each field that a search may choose: a stack may have fewer than all."""

    schedules: tuple[str, ...] = tuple(SCHEDULES)
    recompute: tuple[str, ...] = RECOMPUTE
    orders: tuple[str, ...] = SEARCHED
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO levels without a pipeline."""
    zero_in_pipeline: tuple[int, ...] = (0, 1, 2, 3)
    ulysses: bool = True
    local: int = 0
    """Steps that replicas take alone, the same for all strategies."""
    limits: SearchLimits = UNLIMITED
    """Refusals of the stack and exclusions of the user."""
    extra: StackOptions = AS_RELEASED
    """Options of the stack beyond the strategies, the same for all of them."""

    @cached_property
    def pipelines(self) -> dict[tuple[int, int, int], Ints]:
        """Cache of the legal (schedule, virtual) for each (blocks, pp, micro-batches)."""
        return {}

    def allows(self, s: Strategy, micro_batches: int) -> bool:
        """Whether these options allow a strategy with `micro_batches` micro-batches."""
        if self.limits and not self.limits.allows(s, micro_batches, self.extra):
            return False
        levels = self.zero if s.pp == 1 else self.zero_in_pipeline
        return (
            (s.pp == 1 or s.schedule in self.schedules)
            and recomputation.to_text(recomputation.encode(s.recompute)) in self.recompute
            and s.order in self.orders
            and (s.zero if s.shards > 1 or self.extra.state_on_host else 0) in levels
            and (self.ulysses or s.ulysses == 1)
            and s.local == self.local
        )


@dataclass(frozen=True)
class Strategies:
    """Many strategies: one column per searched field of Strategy, each of shape (rows,).

    `shard` holds the number of shards over the data axis, also where it equals dp. `schedule` and `order` hold
    indices into names() and ORDERS, `recompute` the codes of spec/strategy/recompute.py."""

    dp: Ints
    zero: Ints
    shard: Ints
    tp: Ints
    sp: Ints
    cp: Ints
    ulysses: Ints
    ep: Ints
    etp: Ints
    pp: Ints
    virtual: Ints
    schedule: Ints
    micro_batch: Ints
    recompute: Ints
    order: Ints
    local: Ints

    def __len__(self) -> int:
        return len(self.dp)

    def take(self, rows: Any) -> Strategies:
        """Select rows by number, slice or mask."""
        return Strategies(**{name: getattr(self, name)[rows] for name in COLUMNS})

    def strategy(self, row: int) -> Strategy:
        """Return one row as a Strategy."""
        fields: dict[str, Any] = {name: int(getattr(self, name)[row]) for name in COLUMNS}
        whole = not fields["zero"] or fields["shard"] == fields["dp"]
        return Strategy(
            **fields
            | {
                "shard": None if whole else fields["shard"],
                "sp": bool(fields["sp"]),
                "schedule": schedule_names()[fields["schedule"]],
                "recompute": recomputation.to_text(fields["recompute"]),
                "order": ORDERS[fields["order"]],
            }
        )

    def strategies(self) -> list[Strategy]:
        """Return every row as a Strategy."""
        return [self.strategy(row) for row in range(len(self))]

    def micro_batches(self, job: Job) -> Ints:
        """Micro-batches per step and replica."""
        return job.global_batch // (self.micro_batch * self.dp)

    @property
    def dp_shard(self) -> Ints:
        """Number of replicas that share one model state, 1 without ZeRO."""
        return np.where(level_columns(self.zero).state, self.shard, 1)

    @property
    def dp_local(self) -> Ints:
        """Number of groups of replicas that step alone, 1 unless `local` is set."""
        return np.where(self.local > 0, self.dp // self.dp_shard, 1)

    @property
    def shards(self) -> Ints:
        """Number of ranks over which the model state is sharded, 1 without ZeRO."""
        return np.where(level_columns(self.zero).state, self.shard * self.cp, 1)


COLUMNS = tuple(f.name for f in fields(Strategies))


def columns_of(strategies: Sequence[Strategy]) -> Strategies:
    """Turn strategies into columns; fields that a search does not choose are dropped."""
    columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
    for s in strategies:
        row = {name: getattr(s, name) for name in COLUMNS} | {
            "shard": s.dp_shard,
            "sp": int(s.sp),
            "schedule": schedule_number(s.schedule),
            "recompute": recomputation.encode(s.recompute),
            "order": ORDERS.index(s.order),
        }
        for name, value in row.items():
            columns[name].append(int(value))
    return Strategies(**{name: np.array(column, dtype=np.int64) for name, column in columns.items()})


def concatenate(parts: Sequence[Strategies]) -> Strategies:
    """Concatenate the rows of all parts."""
    return Strategies(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS})


def named_columns(rows: Strategies, job: Job, extra: StackOptions) -> dict[str, Any]:
    """Return the columns that limits read, by name: the fields, words among them as Words, and products of fields."""
    columns: dict[str, Any] = {name: getattr(rows, name) for name in COLUMNS}
    codes, places = np.unique(rows.recompute, return_inverse=True)
    kinds = tuple(recomputation.to_text(int(code)) for code in codes)
    return columns | {
        "schedule": Words(rows.schedule, schedule_names()),
        "order": Words(rows.order, ORDERS),
        "recompute": Words(places.reshape(-1), kinds),
        "world": rows.dp * rows.tp * rows.cp * rows.pp,
        "ring": rows.cp // rows.ulysses,
        "replicas": rows.dp * rows.cp,
        "cp_chunks": 2 * rows.cp,
        "tp_ulysses": rows.tp * rows.ulysses,
        "tp_cp": rows.tp * rows.cp,
        "chunks": rows.pp * rows.virtual,
        "middle_chunks": (rows.pp - given_ends(extra)) * rows.virtual,
        "dp_shard": rows.dp_shard,
        "micro_batches": rows.micro_batches(job),
    }
