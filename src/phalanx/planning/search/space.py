"""All legal strategies of a model over a number of ranks, each once, as NumPy columns.

A strategy is chosen in five steps, each of which expands every row into several:

    core       dp, tp, sp, cp, ulysses, pp, micro_batch     the computation of every rank
    experts    ep, etp                                      and its experts
    pipeline   schedule, virtual                            the order of passes
    recompute  none, selective, full, every:k               recomputation in the backward pass
    sharding   zero, shard, order                           placement of model state, and order of ranks

so that a search can drop a row before the next step expands it (planning/search/branch_and_bound.py). No two rows
are equivalent: fields without effect keep their defaults (`zero` is set only where there is something to shard over,
`order` only where stages and replicas can change places).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.cost.ledger.pipeline_formulas import schedule_names, schedule_number
from phalanx.frameworks.stack import given_ends
from phalanx.planning.search.strategy_columns import COLUMNS, ORDERS, Ints, Options, Strategies, named_columns
from phalanx.schedule.pipeline.given_layout import given_blocks
from phalanx.schedule.pipeline.schedules import SCHEDULES, facts_of
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy import recompute as recomputation
from phalanx.spec.strategy.legality import require_context, require_narrow
from phalanx.spec.strategy.spec import Strategy, divisors
from phalanx.spec.strategy.split import require_split
from phalanx.spec.strategy.where import Condition, Words
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

Ways = Sequence[tuple[int, ...]]
_DEFAULT = schedule_number(Strategy.schedule)
_CORE_FIELDS = ("dp", "tp", "sp", "cp", "ulysses", "pp", "micro_batch")
_MOST_SHOWN = 12
"""Most values of a field that an error lists."""


def all_strategies(model: ModelSpec, job: Job, ranks: int, options: Options | None = None) -> Strategies:
    """Enumerate every legal strategy, all five steps. Raises InputError if there is none over `ranks` ranks."""
    options = options or Options()
    rows = pipelines(experts(cores(model, job, ranks, options), model, job, options), model, job, options)
    return sharding(recomputations(rows, model, job, options), job, options)


def apply_limits(rows: Strategies, job: Job, options: Options, stage: str) -> Strategies:
    """Drop the rows excluded by the limits that read only columns chosen up to a step of the search."""
    if not options.limits or not len(rows):
        return rows
    return rows.take(options.limits.keeps(named_columns(rows, job, options.extra), stage, len(rows)))


def cores(model: ModelSpec, job: Job, ranks: int, options: Options | None = None) -> Strategies:
    """Enumerate degrees and micro-batch sizes: the first step, without experts, schedules, recomputation and ZeRO.
    Raises InputError if the job has no strategy over `ranks` ranks, or none within the limits."""
    options = options or Options()
    row = options.limits.row
    if options.local and row is not None and not row.strategy["local"].allows(options.local):
        raise nothing_within(options, ranks)
    every = _cores(model, job, ranks, options.ulysses)
    within = apply_limits(every, job, options, "core")
    if not len(within):
        free = replace(options, limits=replace(options.limits, wanted=()))
        raise nothing_within(options, ranks, apply_limits(every, job, free, "core"))
    return within


@lru_cache(maxsize=16)
def _cores(model: ModelSpec, job: Job, ranks: int, ulysses: bool) -> Strategies:
    """Enumerate the first step without limits; cached, since stacks and conditions differ only in limits."""
    if job.seq > model.max_seq:
        reason = f"is longer than model.max_seq = {model.max_seq}"
        raise InputError("job.seq", job.seq, reason, f"shorten seq, or set model.max_seq={job.seq}")
    parts: dict[str, list[Ints]] = {name: [] for name in _CORE_FIELDS}
    for tp, cp in _pairs(ranks):
        degrees = divisors(cp) if ulysses else [1]
        ways = np.array([u for u in degrees if _splits(model, job, tp, cp, u)], dtype=np.int64)
        for pp in divisors(ranks // tp // cp) if len(ways) else ():
            dp = ranks // tp // cp // pp
            if job.global_batch % dp or model.layers < pp - 2:
                continue
            sizes = divisors(job.global_batch // dp)
            if job.precision.operands is not None:
                way = Strategy(tp=tp, cp=cp, pp=pp)
                sizes = [n for n in sizes if _legal(require_narrow, model, job, replace(way, micro_batch=n))]
            micro = np.array(sizes, dtype=np.int64)
            for sp in (0, 1) if tp > 1 else (0,):
                fits = micro[micro * job.seq // cp % tp == 0] if sp else micro
                parts["micro_batch"].append(np.repeat(fits, len(ways)))
                parts["ulysses"].append(np.tile(ways, len(fits)))
                for name, value in (("dp", dp), ("tp", tp), ("sp", sp), ("cp", cp), ("pp", pp)):
                    parts[name].append(np.full(len(fits) * len(ways), value, dtype=np.int64))
    columns = {name: np.concatenate(pieces) if pieces else np.zeros(0, np.int64) for name, pieces in parts.items()}
    if not len(columns["dp"]):
        reason = f"no split of {ranks} ranks divides global_batch = {job.global_batch} and the model's sizes"
        raise InputError("gpus", ranks, reason, "use another number, or another batch")
    one = np.ones_like(columns["dp"])
    rest = {"ep": one, "etp": one, "shard": one, "virtual": one, "schedule": _DEFAULT * one}
    return Strategies(**columns, **rest, zero=0 * one, recompute=0 * one, order=0 * one, local=0 * one)


def nothing_within(options: Options, ranks: int, free: Strategies | None = None) -> InputError:
    """Return the error for limits that leave no strategy: about a single condition, if it conflicts with the stack or
    with all of `free`, the degrees that are possible without conditions; else about all conditions, or the stack."""
    limits = options.limits
    row, conditions = limits.row, ", ".join(dict.fromkeys(c.text for c in limits.wanted))
    stack = (row.title if row else "") or "the model"
    for condition in limits.wanted if row else ():
        for name in condition.fields:
            entry = row.strategy.get(name) if row else None
            if entry and entry.values is not None and len(condition.fields) == 1:
                has = [v for v in entry.values if _holds(condition, name, v)]
                if not has:
                    legal = " or ".join(f"{name}={int(v) if isinstance(v, bool) else v}" for v in entry.values)
                    reason = f"{stack} does not have it ({entry.source})"
                    return InputError("where", condition.text, reason, f"use {legal or 'its default'}")
    for condition in limits.wanted if free is not None else ():
        for name in condition.fields if len(condition.fields) == 1 else ():
            has = np.unique(getattr(free, name)).tolist() if name in _CORE_FIELDS else []
            if has and not any(_holds(condition, name, value) for value in has):
                shown = ", ".join(map(str, has if len(has) <= _MOST_SHOWN else (*has[:4], "...", has[-1])))
                there = f"for this model and batch, {name} is one of {shown}"
                reason = f"{stack} has no such strategy over {ranks} ranks: {there}"
                return InputError("where", condition.text, reason, "use one of these, or another number of GPUs")
    if conditions:
        alone = " with all of these" if len(limits.wanted) > 1 else ""
        reason = f"{stack} has no such strategy over {ranks} ranks{alone}"
        return InputError("where", conditions, reason, "loosen a condition")
    return InputError("gpus", ranks, f"{stack} has no strategy over that many", "use another number, or stack")


def _holds(condition: Condition, name: str, value: Any) -> bool:
    """Whether a condition may hold for a legal value, which may be a pattern ending in `*`."""
    if isinstance(value, str) and "*" in value:
        return True
    return bool(condition.holds({name: value}))


def size(rows: Strategies, model: ModelSpec, job: Job, options: Options) -> Ints:
    """Count the strategies that each core expands to, without building them."""
    steps = (
        _by_experts(rows, model, options),
        _by_pipeline(rows, model, job, options),
        _by_recompute(rows, model, options),
        _by_sharding(rows, job, options),
    )
    counts: Ints = np.prod([step.times for step in steps], axis=0, dtype=np.int64)
    return counts


def may_choose(s: Strategy, model: ModelSpec, job: Job, ranks: int, options: Options) -> bool:
    """Whether the search space over `ranks` ranks contains a strategy, or one with equivalent recomputation."""
    try:
        check(s, model, job, ranks)
    except InputError:
        return False
    m, way = s.accumulation(job), (schedule_number(s.schedule), s.virtual)
    if not options.allows(s, m) or way not in pipeline_ways(model.layers, s.pp, m):
        return False
    return not options.extra.changed() or _adds_up((s.pp, *way), model, options)


def has_strategy(s: Strategy, model: ModelSpec, job: Job, ranks: int, options: Options) -> bool:
    """Whether the search space over `ranks` ranks contains a strategy in the canonical spelling of its
    recomputation."""
    kinds = _distinct(options.recompute, model.layers, -(-model.layers // (s.pp * s.virtual)))
    return recomputation.encode(s.recompute) in kinds and may_choose(s, model, job, ranks, options)


def experts(rows: Strategies, model: ModelSpec, job: Job, options: Options) -> Strategies:
    """Expand each row by every way to spread experts over its ranks."""
    spread = _by_experts(rows, model, options).rows
    if (operands := job.precision.operands) is not None and model.experts is not None:
        spread = spread.take(np.flatnonzero(model.experts.ffn // spread.etp % operands.multiple == 0))
    return apply_limits(spread, job, options, "experts")


def cores_by_block(cores: Strategies) -> tuple[Strategies, Ints]:
    """Return the cores with distinct blocks, each without a pipeline, and for each core the index of its own: how the
    other ranks are divided among pp and dp makes no difference to a block."""
    code = np.zeros_like(cores.tp)
    for column in (cores.tp, cores.sp, cores.cp, cores.ulysses, cores.micro_batch):
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    some = cores.take(first)
    return replace(some, dp=some.dp * some.pp, pp=np.ones_like(some.pp)), place.reshape(-1)


def with_experts(rows: Strategies, model: ModelSpec, options: Options) -> tuple[Strategies, Ints]:
    """Return rows with every way to spread experts over their ranks, including ways that the limits exclude, and the
    index of each result's original row."""
    expansion = _by_experts(rows, model, options)
    return expansion.rows, np.repeat(np.arange(len(rows)), expansion.times)


def spread_experts(rows: Strategies, kind: Ints, ways: Strategies, of_kind: Ints) -> tuple[Strategies, Ints, Ints]:
    """Return rows with every (ep, etp) in `ways` of their kind that divides their ranks, and each result's indices
    into `rows` and `ways`. `kind`: of each row; `of_kind`: of each way, ascending."""
    number = np.bincount(of_kind, minlength=int(kind.max(initial=-1)) + 1)
    times, starts = number[kind], (np.cumsum(number) - number)[kind]
    row = np.repeat(np.arange(len(rows)), times)
    way = np.arange(len(row)) - np.repeat(np.cumsum(times) - times - starts, times)
    ranks = rows.dp * rows.cp * rows.tp
    fits = ranks[row] % (ways.ep * ways.etp)[way] == 0
    row, way = row[fits], way[fits]
    return replace(rows.take(row), ep=ways.ep[way], etp=ways.etp[way]), row, way


def pipelines(rows: Strategies, model: ModelSpec, job: Job, options: Options) -> Strategies:
    """Expand each row by every legal schedule (schedule/pipeline/stages.py refuses the others)."""
    return apply_limits(_by_pipeline(rows, model, job, options).rows, job, options, "pipeline")


def recomputations(rows: Strategies, model: ModelSpec, job: Job, options: Options) -> Strategies:
    """Expand each row by every kind of recomputation."""
    return apply_limits(_by_recompute(rows, model, options).rows, job, options, "recompute")


def sharding(rows: Strategies, job: Job, options: Options) -> Strategies:
    """Expand each row by every value of zero, number of shards, and order of the mesh."""
    return apply_limits(_by_sharding(rows, job, options).rows, job, options, "sharding")


def _one_by_one(ways: Callable[[int, int], Ways], columns: int) -> Callable[[Sequence[tuple[int, int]]], list[Ints]]:
    """Turn a function that lists the ways of one pair of keys into one that returns the tables of many pairs."""
    return lambda keys: [np.array(ways(*pair), np.int64).reshape(-1, columns) for pair in keys]


class _Expansion:
    """Rows, each to be repeated once for every way that its two keys `first` and `second` allow. A way is a tuple of
    values for the columns `into`; `tables` returns the ways of each pair of keys, (ways, columns)."""

    def __init__(
        self,
        rows: Strategies,
        first: Ints,
        second: Ints,
        into: tuple[str, ...],
        tables: Callable[[Sequence[tuple[int, int]]], Sequence[Ints]],
    ) -> None:
        self._given, self._into = rows, into
        base = int(second.max(initial=0)) + 1
        each, self._kind = np.unique(first * base + second, return_inverse=True)
        self._tables = tables([divmod(k, base) for k in each.tolist()])
        self._lengths = np.array([len(t) for t in self._tables], dtype=np.int64)

    @property
    def times(self) -> Ints:
        """Number of ways of each row."""
        return self._lengths[self._kind]

    @property
    def rows(self) -> Strategies:
        """The expanded rows."""
        if not len(self._given):
            return self._given
        times = self.times
        index = np.repeat(np.arange(len(times)), times)
        place = np.arange(len(index)) - np.repeat(np.cumsum(times) - times, times)
        starts = (np.cumsum(self._lengths) - self._lengths)[self._kind]
        chosen = np.concatenate(self._tables)[starts[index] + place]
        columns = {name: getattr(self._given, name)[index] for name in COLUMNS if name not in self._into}
        return Strategies(**columns, **{name: chosen[:, i] for i, name in enumerate(self._into)})


def _by_experts(rows: Strategies, model: ModelSpec, options: Options) -> _Expansion:
    x = model.experts

    def ways(ranks: int, _: int) -> Ways:
        if x is None:
            return [(1, 1)]
        pairs = [(ep, etp) for ep in divisors(x.count) for etp in divisors(x.ffn) if ranks % (ep * etp) == 0]
        pairs = [(ep, etp) for ep, etp in pairs if options.limits.way(("ep", "etp"), {"ep": ep, "etp": etp})]
        return [(ep, etp) for ep, etp in pairs if _legal(require_split, model, Strategy(dp=ep * etp, ep=ep, etp=etp))]

    return _Expansion(rows, rows.dp * rows.cp * rows.tp, rows.zero, ("ep", "etp"), _one_by_one(ways, 2))


def _by_pipeline(rows: Strategies, model: ModelSpec, job: Job, options: Options) -> _Expansion:
    cache = options.pipelines

    def tables(kinds: Sequence[tuple[int, int]]) -> list[Ints]:
        """Return the ways of each (pp, micro-batches); new pairs are judged in one call."""
        new = [kind for kind in kinds if (model.layers, *kind) not in cache]
        ways = [np.array(pipeline_ways(model.layers, *kind, options.schedules), np.int64) for kind in new]
        ways = [table.reshape(-1, 2) for table in ways]
        keep = _legal_pipelines(new, ways, model, options)
        for kind, table, of_kind in zip(new, ways, keep, strict=True):
            cache[model.layers, *kind] = table[of_kind]
        return [cache[model.layers, *kind] for kind in kinds]

    return _Expansion(rows, rows.pp, rows.micro_batches(job), ("schedule", "virtual"), tables)


def _legal_pipelines(
    kinds: Sequence[tuple[int, int]], ways: Sequence[Ints], model: ModelSpec, options: Options
) -> list[npt.NDArray[np.bool_]]:
    """Return, for each (pp, micro-batches), the mask of its ways allowed by limits and prescribed blocks."""
    if not kinds:
        return []
    lengths = [len(table) for table in ways]
    pp, m = (np.repeat(column, lengths) for column in np.array(kinds, np.int64).T)
    schedule, virtual = np.concatenate(ways).T
    keep = np.ones(len(pp), dtype=bool)
    if options.limits:
        columns = {
            "pp": pp,
            "micro_batches": m,
            "schedule": Words(schedule, schedule_names()),
            "virtual": virtual,
            "chunks": pp * virtual,
            "middle_chunks": (pp - given_ends(options.extra)) * virtual,
        }
        keep = options.limits.keeps_ways(("schedule", "virtual"), columns, len(pp))
    if options.extra.changed():
        way = np.stack([pp, schedule, virtual], axis=1)
        distinct, place = np.unique(way, axis=0, return_inverse=True)
        keep &= np.array([_adds_up(row, model, options) for row in distinct.tolist()], dtype=bool)[place.reshape(-1)]
    return np.split(keep, np.cumsum(lengths)[:-1])


def _adds_up(way: Sequence[int], model: ModelSpec, options: Options) -> bool:
    """Whether the blocks prescribed by options for the ends of a pipeline (pp, schedule, virtual) leave enough for
    the other ranks."""
    pp, schedule, virtual = way
    s = Strategy(pp=pp, virtual=virtual, schedule=schedule_names()[schedule])
    try:
        given_blocks(s, options.extra, model.layers + options.extra.mtp)
    except InputError:
        return False
    return True


def pipeline_ways(layers: int, pp: int, m: int, schedules: Sequence[str] = tuple(SCHEDULES)) -> list[tuple[int, int]]:
    """Return the legal (schedule, virtual) for `pp` ranks and `m` micro-batches."""
    if pp == 1:
        return [(_DEFAULT, 1)]
    ways = []
    for name in schedules:
        number, facts = schedule_number(name), facts_of(name)
        if facts.refusal(pp, m):
            continue
        if facts.takes_virtual:
            ways += [(number, v) for v in range(2, (layers + 2) // pp + 1) if facts.repeats or v == facts.chunks]
        elif facts.chunks == 1 or layers >= facts.chunks * pp - 2:  # embedding and head may be alone in a chunk
            ways.append((number, 1))
    return ways


def _by_recompute(rows: Strategies, model: ModelSpec, options: Options) -> _Expansion:
    """Expand rows by kinds of recomputation. Of kinds that recompute the same blocks, one is kept: `every:k` of k
    blocks is the first block alone, `block:n` of chunks of at most n blocks is full."""

    def ways(chunks: int, _: int) -> Ways:
        chunk = -(-model.layers // max(chunks, 1))
        return [(code,) for code in _distinct(options.recompute, model.layers, chunk)]

    return _Expansion(rows, rows.pp * rows.virtual, rows.zero, ("recompute",), _one_by_one(ways, 1))


@cache
def _distinct(names: tuple[str, ...], layers: int, chunk: int) -> tuple[int, ...]:
    """Return the codes of the kinds that differ over `layers` blocks in chunks of at most `chunk`."""
    kinds: dict[object, int] = {}
    for name in names:
        how = recomputation.parse(name)
        key: object = name
        if how.kind == "every":
            if how.count > layers:
                continue  # refused: equivalent to every:n of n blocks
            key = -(-layers // how.count)  # blocks that run again
        elif how.kind == "full" or (how.kind, how.count) == ("uniform", 1):
            key = layers
        elif how.kind == "block":
            key = layers if how.count >= chunk else name
        kinds.setdefault(key, recomputation.encode(name))
    return tuple(kinds.values())


def _by_sharding(rows: Strategies, job: Job, options: Options) -> _Expansion:
    orders = [ORDERS.index(name) for name in options.orders]

    def ways(dp: int, flags: int) -> Ways:
        over_cp, piped = flags & 2, flags & 4
        levels = options.zero_in_pipeline if piped else options.zero
        alone = over_cp or (dp == 1 and options.extra.state_on_host)
        sharded = [(zero, d) for zero in levels if zero for d in divisors(dp) if d > 1 or alone]
        moves = flags & 1
        shardings = [way for way in sharded if ZERO_LEVELS[way[0]].parameters] if flags & 8 else [(0, 1), *sharded]
        if options.local:  # several replicas, each with whole groups of its experts
            shardings = [way for way in shardings if way[1] < dp and way[1] % (flags >> 4) == 0]
        every = [(*way, order) for way in shardings for order in (orders if moves else orders[:1])]
        return [(*way, options.local) for way in every if not options.limits or within(dp, *way)]

    def within(dp: int, zero: int, shard: int, order: int) -> bool:
        given = {
            "dp": dp,
            "zero": zero,
            "shard": shard,
            "dp_shard": shard if ZERO_LEVELS[zero].state else 1,
            "local": options.local,
            "order": ORDERS[order],
        }
        return options.limits.way(("zero", "shard", "order"), given)

    flags = 4 * (rows.pp > 1) + 2 * (rows.cp > 1) + ((rows.pp > 1) & (rows.dp > 1))
    if job.precision.gathers_narrow:  # which needs gathers
        flags += 8 * (rows.sp == 0)
    if options.local:
        spread = rows.ep * rows.etp
        flags += 16 * (spread // np.gcd(spread, rows.cp * rows.tp))
    return _Expansion(rows, rows.dp, flags, ("zero", "shard", "order", "local"), _one_by_one(ways, 4))


def _pairs(ranks: int) -> list[tuple[int, int]]:
    """Return all pairs of degrees whose product divides the number of ranks."""
    return [(one, other) for one in divisors(ranks) for other in divisors(ranks // one)]


def _splits(model: ModelSpec, job: Job, tp: int, cp: int, ulysses: int) -> bool:
    s = Strategy(tp=tp, cp=cp, ulysses=ulysses)
    return _legal(require_split, model, s) and _legal(require_context, model, job.seq, s)


def _legal(require: Callable[..., None], *given: Any) -> bool:
    try:
        require(*given)
    except InputError:
        return False
    return True
