"""The neighbours of a strategy: legal strategies that differ from it in one decision."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

from phalanx.planning.search import space
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.strategy_columns import ORDERS, SEARCHED
from phalanx.schedule.pipeline.schedules import SCHEDULES, facts_of
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS


def neighbours(s: Strategy, pricing: Pricing) -> list[tuple[str, Strategy]]:
    """Return (change, strategy) for every strategy that differs from `s` in a single decision and that the search may
    choose under `pricing`. The world size stays the same: the data axis takes the ranks that another axis gives up or
    needs. `change` reads like `tp 4 -> 8`."""
    changes_by_strategy: dict[Strategy, str] = {}
    for change, fields in _changes(s, pricing.options.recompute):
        try:
            other = replace(s, **_completed(s, fields))  # type: ignore[arg-type]
        except InputError:
            continue
        if other != s and space.may_choose(other, pricing.model, pricing.job, s.world, pricing.options):
            changes_by_strategy.setdefault(other, change)
    return [(change, other) for other, change in changes_by_strategy.items()]


def _changes(s: Strategy, recompute: Sequence[str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield (change, the fields that it sets), legal or not."""
    for axis in ("tp", "pp", "cp", "ulysses", "ep", "micro_batch"):
        degree = getattr(s, axis)
        for other in (2 * degree, degree // 2):
            if other >= 1 and other != degree:
                yield f"{axis} {degree} -> {other}", {axis: other}
    for zero in range(len(ZERO_LEVELS)):
        yield f"zero {s.zero} -> {zero}", {"zero": zero}
    for kind in recompute:
        yield f"recompute {s.recompute} -> {kind}", {"recompute": kind}
    if s.tp > 1:
        yield f"sp {int(s.sp)} -> {int(not s.sp)}", {"sp": not s.sp}
    if s.pp > 1:
        # One more or one fewer chunk per rank makes room for the head, if blocks divide evenly at neither number.
        half = s.virtual // 2
        for virtual in sorted({1, half, half + 1, s.virtual - 1, s.virtual + 1, 2 * s.virtual} - {0, s.virtual}):
            yield f"virtual {s.virtual} -> {virtual}", {"virtual": virtual}
        for name in SCHEDULES:
            if name == s.schedule:
                continue
            virtual = SCHEDULES[name].chunks if SCHEDULES[name].takes_virtual else 1
            yield f"schedule {s.schedule} -> {name}", {"schedule": name, "virtual": virtual}
        for order in SEARCHED:
            yield f"order {s.order} -> {order}", {"order": order}
    if s.dp_shard > 1:
        for shard in (s.dp_shard // 2, 2 * s.dp_shard):
            if shard > 1 or s.cp > 1:  # a copy for each rank is no sharding
                yield f"shard {s.dp_shard} -> {shard}", {"shard": shard}


def _completed(s: Strategy, changes: dict[str, object]) -> dict[str, object]:
    """Complete a change by its consequences: dp takes the remaining ranks, fields without effect their defaults.
    Raises InputError if no ranks remain."""
    new = {f: changes.get(f, getattr(s, f)) for f in ("tp", "pp", "cp", "sp", "zero", "virtual", "schedule", "order")}
    dp, remainder = divmod(s.world, int(new["tp"]) * int(new["pp"]) * int(new["cp"]))  # type: ignore[call-overload]
    if remainder or not dp:
        raise InputError("strategy", None, "does not divide the ranks")
    if "cp" in changes:
        changes = changes | {"ulysses": gcd(s.ulysses, int(new["cp"]))}  # type: ignore[call-overload]
    facts = facts_of(str(new["schedule"]))
    shard = changes.get("shard", s.shard)
    if "dp" not in changes and dp != s.dp and s.shard is not None:
        shard = None
    shard = None if shard == dp or not new["zero"] else shard
    out = dict(changes) | {"dp": dp, "shard": shard}
    if not new["zero"] or dp * int(new["cp"]) == 1:  # type: ignore[call-overload]
        out |= {"zero": 0, "shard": None}
    if int(new["tp"]) == 1:  # type: ignore[call-overload]
        out["sp"] = False
    elif s.tp == 1:
        out["sp"] = True
    if int(new["pp"]) == 1:  # type: ignore[call-overload]
        out |= {"virtual": 1, "schedule": Strategy.schedule, "order": ORDERS[0]}
    elif (new["virtual"] != 1) != facts.takes_virtual and facts.counterpart:
        out["schedule"] = facts.counterpart
    if dp == 1:
        out["order"] = ORDERS[0]
    return out
