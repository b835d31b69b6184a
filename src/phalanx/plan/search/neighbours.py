"""The neighbours of a strategy: one field changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.cost.analytic.pipeline_formulas import NAMES
from phalanx.plan.search import space
from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.space import ORDERS, RECOMPUTE
from phalanx.schedule.pipeline.schedules import SCHEDULES
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.legality import check
from phalanx.spec.strategy.spec import Strategy


def neighbours(s: Strategy, pricing: Pricing) -> list[tuple[str, Strategy]]:
    """Legal strategies that differ from one in a single decision (which the data axis makes up for), each with what
    was changed."""
    found: dict[Strategy, str] = {}
    for what, changes in _changes(s):
        try:
            other = replace(s, **_mended(s, changes))  # type: ignore[arg-type]
            check(other, pricing.model, pricing.job, s.world)
        except InputError:
            continue
        m = other.accumulation(pricing.job)
        way = (NAMES.index(other.schedule), other.virtual)
        own = pricing.options
        if (
            other.schedule not in own.schedules
            or other.recompute not in own.recompute
            or other.order not in own.orders
        ):
            continue
        if other != s and way in space.pipeline_ways(pricing.model.layers, other.pp, m):
            found.setdefault(other, what)
    return [(what, other) for other, what in found.items()]


def _changes(s: Strategy) -> Iterator[tuple[str, dict[str, object]]]:
    for axis in ("tp", "pp", "cp", "ep", "micro_batch"):
        here = getattr(s, axis)
        for there in (2 * here, here // 2):
            if there >= 1 and there != here:
                yield f"{axis} {here} -> {there}", {axis: there}
    for zero in range(4):
        yield f"zero {s.zero} -> {zero}", {"zero": zero}
    for kind in RECOMPUTE:
        yield f"recompute {s.recompute} -> {kind}", {"recompute": kind}
    if s.tp > 1:
        yield f"sp {int(s.sp)} -> {int(not s.sp)}", {"sp": not s.sp}
    if s.pp > 1:
        for virtual in {2 * s.virtual, s.virtual // 2, 1} - {0}:
            yield f"virtual {s.virtual} -> {virtual}", {"virtual": virtual}
        for name in NAMES:
            if name == s.schedule:
                continue
            virtual = SCHEDULES[name].chunks if SCHEDULES[name].takes_virtual else 1
            yield f"schedule {s.schedule} -> {name}", {"schedule": name, "virtual": virtual}
        for order in ORDERS:
            yield f"order {s.order} -> {order}", {"order": order}
    if s.zero and s.dp_shard > 1:
        for shard in (s.dp_shard // 2, 2 * s.dp_shard):
            yield f"shard {s.dp_shard} -> {shard}", {"shard": shard}


def _mended(s: Strategy, changes: dict[str, object]) -> dict[str, object]:
    """The change with what follows: dp takes the ranks that are left, fields without effect their defaults."""
    new = {f: changes.get(f, getattr(s, f)) for f in ("tp", "pp", "cp", "sp", "zero", "virtual", "schedule", "order")}
    dp, left = divmod(s.world, int(new["tp"]) * int(new["pp"]) * int(new["cp"]))  # type: ignore[call-overload]
    if left or not dp:
        raise InputError("strategy", None, "does not divide the ranks")
    facts = SCHEDULES[str(new["schedule"])]
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
