"""Why not: what a strategy needs that is not there, or what it spends its time on that a better one does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.analytic.pipeline_formulas import NAMES
from phalanx.cost.hardware.columns import Column
from phalanx.plan import space
from phalanx.plan.pricing import Pricing
from phalanx.plan.space import ORDERS, RECOMPUTE
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.legality import check
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

COMMUNICATION = ("tp", "cp", "ep", "dp", "transfers")
SAID = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory-bound work",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "dp": "gradients and parameters on their way",
    "transfers": "transfers between stages",
    "recompute": "recomputation",
    "launch": "kernel launches",
    "head": "the head's rank, for which the others wait",
    "bubble": "the bubble",
    "optimizer": "the update",
    "other": "what is left",
}


@dataclass(frozen=True)
class Priced:
    """One strategy's figures. `terms`: seconds of the step by term; `held`: bytes by what holds them; `bytes_`: what
    must be less than the device's usable ones."""

    strategy: Strategy
    seconds: float
    bytes_: float
    terms: dict[str, float]
    held: dict[str, float]
    usable: int

    @property
    def fits(self) -> bool:
        return self.bytes_ <= self.usable

    @property
    def communication(self) -> float:
        """Its share of the step, as far as nothing hides it."""
        return sum(self.terms.get(name, 0.0) for name in COMMUNICATION) / self.seconds


def priced(pricing: Pricing, given: Sequence[Strategy]) -> list[Priced]:
    """Each strategy, term by term. Raises InputError for one that a search would not take."""
    if not given:
        return []
    rows = space.of(given)
    step, memory = pricing.step(rows), pricing.memory(rows)
    terms, held = each(step.terms, len(rows)), each(memory.terms, len(rows))
    reserved = np.broadcast_to(memory.reserved, len(rows))
    return [
        Priced(s, sum(terms[i].values()), float(reserved[i]), terms[i], held[i], pricing.usable)
        for i, s in enumerate(given)
    ]


def each(columns: Mapping[str, Column], count: int) -> list[dict[str, float]]:
    """Columns by name as the numbers of each row."""
    full = {name: np.broadcast_to(column, count) for name, column in columns.items()}
    return [{name: float(column[i]) for name, column in full.items()} for i in range(count)]


def why_not(p: Priced, best: Priced | None, pricing: Pricing) -> str:
    """The reason in numbers: memory where it does not fit, else what takes longer than in the best one."""
    if not p.fits:
        name, most = max(p.held.items(), key=lambda item: item[1])
        return f"needs {p.bytes_ / GIB:.1f} of {p.usable / GIB:.1f} GiB, {most / GIB:.1f} of them {name}"
    assert best is not None
    slower = p.seconds / best.seconds - 1
    grown = {name: p.terms[name] - best.terms.get(name, 0.0) for name in p.terms}
    worst = max(grown, key=lambda name: grown[name])
    leaves = leaving(p.strategy, pricing)
    if worst in COMMUNICATION and leaves:
        return f"{slower:+.1%}: {leaves}: {p.communication:.0%} of the step is communication"
    return f"{slower:+.1%}: {SAID.get(worst, worst)} {_seconds(p.terms[worst])}, there {_seconds(best.terms[worst])}"


def _seconds(s: float) -> str:
    return f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.0f} ms"


def leaving(s: Strategy, pricing: Pricing) -> str:
    """Which axis of those that talk in every layer is wider than a node, "" where none is."""
    node = pricing.cluster.ranks_per_node
    grid = mesh(s)
    for axis, degree in (("tp", s.tp), ("ep", s.ep), ("cp", s.cp)):
        if degree > 1 and not grid.within(axis, node):
            return f"{axis}={degree} leaves the node"
    return ""


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
            yield f"schedule {s.schedule} -> {name}", {"schedule": name, "virtual": 2 if name == "interleaved" else 1}
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
        out |= {"virtual": 1, "schedule": "1f1b", "order": ORDERS[0]}
    elif new["virtual"] != 1 and new["schedule"] == "1f1b":
        out["schedule"] = "interleaved"
    elif new["virtual"] == 1 and new["schedule"] == "interleaved":
        out["schedule"] = "1f1b"
    if dp == 1:
        out["order"] = ORDERS[0]
    return out
