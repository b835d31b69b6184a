"""All legal strategies of a model over a number of ranks, none twice, as NumPy columns.

A strategy is chosen in four steps, each of which multiplies the rows:

    core       dp, tp, sp, cp, ulysses, ep, etp, pp, micro_batch     what every rank computes
    pipeline   schedule, virtual                                     when
    recompute  none, selective, full, every:k                        what is computed again
    sharding   zero, shard, order                                    where the model state lies, and who are neighbours

so that a search can drop a row of one step before it is multiplied by the next (plan/search_space.py). Two rows never
mean the same: fields without effect keep their defaults (`shard` is written only where it is less than dp, ZeRO only
where there is something to shard over, `order` only where stages and replicas can change places).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.schedule.pipeline import SCHEDULES, V_SHAPED
from phalanx.spec.context import require_context
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model import ModelSpec
from phalanx.spec.split import require_split
from phalanx.spec.strategy import FIELDS, Strategy, divisors

Ints = npt.NDArray[np.int64]
NAMES = tuple(SCHEDULES)
ORDERS = ("pp/dp/cp/tp", "dp/pp/cp/tp")
"""Stages outermost, as the mesh has them by default; or replicas outermost, and stages on neighbouring nodes."""
RECOMPUTE = ("none", "selective", "full", "every:2", "every:4")
_ONE_F_ONE_B = NAMES.index("1f1b")


@dataclass(frozen=True)
class Options:
    """What a search may choose from, where the grammar allows more or a stack has less. `micro_batch`: the largest."""

    schedules: tuple[str, ...] = NAMES
    recompute: tuple[str, ...] = RECOMPUTE
    orders: tuple[str, ...] = ORDERS
    micro_batch: int | None = None


@dataclass(frozen=True)
class Strategies:
    """Many strategies: one column per field of Strategy. `shard` is the number itself, also where it is dp;
    `schedule`, `recompute` and `order` are places in NAMES, RECOMPUTE and ORDERS."""

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

    def __len__(self) -> int:
        return len(self.dp)

    def take(self, rows: Any) -> Strategies:
        """Those rows, by number or by mask."""
        return Strategies(**{name: getattr(self, name)[rows] for name in COLUMNS})

    def strategy(self, row: int) -> Strategy:
        """One row as a Strategy."""
        found: dict[str, Any] = {name: int(getattr(self, name)[row]) for name in COLUMNS}
        whole = not found["zero"] or found["shard"] == found["dp"]
        return Strategy(
            **found
            | {
                "shard": None if whole else found["shard"],
                "sp": bool(found["sp"]),
                "schedule": NAMES[found["schedule"]],
                "recompute": RECOMPUTE[found["recompute"]],
                "order": ORDERS[found["order"]],
            }
        )

    def strategies(self) -> list[Strategy]:
        return [self.strategy(row) for row in range(len(self))]

    def micro_batches(self, job: Job) -> Ints:
        return job.global_batch // (self.micro_batch * self.dp)

    @property
    def shards(self) -> Ints:
        """Ranks over which the model state is sharded."""
        return np.where(self.zero > 0, self.shard * self.cp, 1)


COLUMNS = tuple(f.name for f in fields(Strategies))


def of(strategies: Sequence[Strategy]) -> Strategies:
    """Given ones as columns; fields that a search does not choose are left out of it. Raises InputError for a
    `recompute` or `order` that it never takes."""
    found: dict[str, list[int]] = {name: [] for name in COLUMNS}
    for s in strategies:
        for name, known in (("recompute", RECOMPUTE), ("order", ORDERS)):
            if getattr(s, name) not in known:
                raise InputError(f"strategy.{name}", getattr(s, name), "is not searched", f"use {' or '.join(known)}")
        row = {name: getattr(s, name) for name in COLUMNS} | {
            "shard": s.dp_shard,
            "sp": int(s.sp),
            "schedule": NAMES.index(s.schedule),
            "recompute": RECOMPUTE.index(s.recompute),
            "order": ORDERS.index(s.order),
        }
        for name, value in row.items():
            found[name].append(int(value))
    return Strategies(**{name: np.array(column, dtype=np.int64) for name, column in found.items()})


def everything(model: ModelSpec, job: Job, ranks: int, options: Options | None = None) -> Strategies:
    """All of them, all four steps. Raises InputError where a model or batch has none."""
    options = options or Options()
    rows = pipelines(cores(model, job, ranks, options), model, job, options)
    return sharding(recomputing(rows, model, options), options)


def cores(model: ModelSpec, job: Job, ranks: int, options: Options) -> Strategies:
    """What every rank computes: degrees and micro-batch, without pipelines' schedules, recomputation and ZeRO.

    Raises InputError where the job has no strategy over so many ranks.
    """
    if job.seq > model.max_seq:
        reason = f"is longer than model.max_seq = {model.max_seq}"
        raise InputError("job.seq", job.seq, reason, "shorten seq or raise model.max_seq")
    found: dict[str, list[Ints]] = {name: [] for name in _CORE}
    expert_ways = _expert_ways(model, ranks)
    for tp in divisors(ranks):
        if not _legal(lambda tp=tp: require_split(model, Strategy(dp=ranks // tp, tp=tp))):
            continue
        for cp in divisors(ranks // tp):
            ways = [u for u in divisors(cp) if _legal(lambda u=u: _require_context(model, job, tp, cp, u))]
            if not ways:
                continue
            for pp in divisors(ranks // tp // cp):
                dp = ranks // tp // cp // pp
                if job.global_batch % dp or model.layers < pp - 2:
                    continue
                micro = np.array(divisors(job.global_batch // dp), dtype=np.int64)
                if options.micro_batch:
                    micro = micro[micro <= options.micro_batch]
                experts = [e for e in expert_ways if dp * cp * tp % (e[0] * e[1]) == 0]
                for sp in (0, 1) if tp > 1 else (0,):
                    fits = micro[micro * job.seq // cp % tp == 0] if sp else micro
                    count = len(fits) * len(ways) * len(experts)
                    found["micro_batch"].append(np.repeat(fits, len(ways) * len(experts)))
                    found["ulysses"].append(np.tile(np.repeat(np.array(ways), len(experts)), len(fits)))
                    for i, name in enumerate(("ep", "etp")):
                        each = np.array([e[i] for e in experts], dtype=np.int64)
                        found[name].append(np.tile(each, len(fits) * len(ways)))
                    for name, value in (("dp", dp), ("tp", tp), ("sp", sp), ("cp", cp), ("pp", pp)):
                        found[name].append(np.full(count, value, dtype=np.int64))
    columns = {name: np.concatenate(parts) if parts else np.zeros(0, np.int64) for name, parts in found.items()}
    if not len(columns["dp"]):
        reason = f"no split of {ranks} ranks divides global_batch = {job.global_batch} and the model's sizes"
        raise InputError("--gpus", ranks, reason, "use another number, or another batch")
    same = np.ones_like(columns["dp"])
    rest = {"zero": 0 * same, "shard": same, "virtual": same, "schedule": _ONE_F_ONE_B * same}
    return Strategies(**columns, **rest, recompute=0 * same, order=0 * same)


_CORE = ("dp", "tp", "sp", "cp", "ulysses", "ep", "etp", "pp", "micro_batch")


def pipelines(rows: Strategies, model: ModelSpec, job: Job, options: Options) -> Strategies:
    """Each row with every schedule that it can have (schedule/stages.py refuses the others)."""

    def ways(pp: int, m: int) -> list[tuple[int, int]]:
        if pp == 1:
            return [(_ONE_F_ONE_B, 1)]
        found = []
        for name in options.schedules:
            number = NAMES.index(name)
            if name == "interleaved":
                if m % max(1, m // pp) == 0:  # rounds of equally many
                    found += [(number, v) for v in range(2, (model.layers + 2) // pp + 1)]
            elif name not in V_SHAPED:
                found.append((number, 1))
            elif model.layers >= 2 * pp - 2 and (name != "dualpipe-v" or m >= 2 * pp):
                found.append((number, 1))
        return found

    return _expanded(rows, (rows.pp, rows.micro_batches(job)), ("schedule", "virtual"), ways)


def recomputing(rows: Strategies, model: ModelSpec, options: Options) -> Strategies:
    """Each row with everything that may be computed again. Every k-th block of k or less is the first alone, so of
    those that mean the same one is enough."""
    ways, seen = [], set()
    for name in options.recompute:
        blocks = tuple(Strategy(recompute=name).recompute_of(i) for i in range(model.layers))
        if blocks not in seen:
            seen.add(blocks)
            ways.append((RECOMPUTE.index(name),))
    return _expanded(rows, (np.zeros(len(rows), np.int64), rows.zero), ("recompute",), lambda *_: ways)


def sharding(rows: Strategies, options: Options) -> Strategies:
    """Each row with every ZeRO stage, number of shards, and order of the mesh."""
    orders = [ORDERS.index(name) for name in options.orders]

    def ways(dp: int, more: int) -> list[tuple[int, int, int]]:
        cp_shards, moves = divmod(more, 2)
        plain = [(0, 1)]
        sharded = [(zero, d) for zero in (1, 2, 3) for d in divisors(dp) if d > 1 or cp_shards]
        return [(*way, order) for way in plain + sharded for order in (orders if moves else orders[:1])]

    more = 2 * (rows.cp > 1) + ((rows.pp > 1) & (rows.dp > 1))
    return _expanded(rows, (rows.dp, more), ("zero", "shard", "order"), ways)


def count(rows: Strategies, expand: Callable[[Strategies], Strategies], by: Sequence[str]) -> Ints:
    """How many rows each row becomes, of those that differ in these columns alone: without making them."""
    key = np.zeros(len(rows), np.int64)
    for name in by:
        column = getattr(rows, name)
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return np.array([len(expand(rows.take([i]))) for i in first], dtype=np.int64)[inverse]


def _expanded(
    rows: Strategies, keys: tuple[Ints, Ints], into: tuple[str, ...], ways: Callable[..., Iterable[tuple[int, ...]]]
) -> Strategies:
    """Every row once for each way that its two keys have; a way is the values of columns."""
    if not len(rows):
        return rows
    base = int(keys[1].max()) + 1
    each, inverse = np.unique(keys[0] * base + keys[1], return_inverse=True)
    tables = [np.array(list(ways(*divmod(int(k), base))), dtype=np.int64).reshape(-1, len(into)) for k in each]
    lengths = np.array([len(t) for t in tables])
    starts, times = (np.cumsum(lengths) - lengths)[inverse], lengths[inverse]
    index = np.repeat(np.arange(len(rows)), times)
    place = np.arange(len(index)) - np.repeat(np.cumsum(times) - times, times)
    chosen = np.concatenate(tables)[starts[index] + place]
    columns = {name: getattr(rows, name)[index] for name in COLUMNS if name not in into}
    return Strategies(**columns, **{name: chosen[:, i] for i, name in enumerate(into)})


def _expert_ways(model: ModelSpec, ranks: int) -> list[tuple[int, int]]:
    """(ep, etp) that the experts fall into."""
    if model.experts is None:
        return [(1, 1)]
    return [
        (ep, etp)
        for ep in divisors(model.experts.count)
        for etp in divisors(model.experts.ffn)
        if ranks % (ep * etp) == 0 and _legal(lambda ep=ep, etp=etp: require_split(model, _experts(ep, etp)))
    ]


def _experts(ep: int, etp: int) -> Strategy:
    return Strategy(dp=ep * etp, ep=ep, etp=etp)


def _require_context(model: ModelSpec, job: Job, tp: int, cp: int, ulysses: int) -> None:
    require_context(model, job.seq, Strategy(tp=tp, cp=cp, ulysses=ulysses))


def _legal(require: Callable[[], None]) -> bool:
    try:
        require()
    except InputError:
        return False
    return True


assert set(COLUMNS) <= set(FIELDS)
