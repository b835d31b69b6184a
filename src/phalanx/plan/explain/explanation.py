"""Why a strategy takes what it takes: time, memory, both rooflines, what to change first, and why not others."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.explain import operators
from phalanx.plan.explain.analytic import Subject
from phalanx.plan.explain.traffic import term_of
from phalanx.plan.search import why_not as reasons
from phalanx.plan.search.priced import COMMUNICATION, PricedStrategy


@dataclass(frozen=True)
class Axis:
    """One axis on the communication roofline. `intensity`: FLOP of a rank per byte that it sends over the axis;
    `ridge`: at which the links that the group spans keep up with the chip. `critical_batch`: sequences in a step from
    which the data axis is compute-bound; None for axes whose traffic grows with the batch."""

    axis: str
    tier: str
    sent: float
    intensity: float
    ridge: float
    exposed_s: float
    critical_batch: float | None

    @property
    def regime(self) -> str:
        return "compute-bound" if self.intensity >= self.ridge else "communication-bound"


@dataclass(frozen=True)
class Lever:
    """Something that the step spends time on, what is gained at most without it, and the neighbour that gains most
    of it (None where none does)."""

    what: str
    seconds: float
    at_most: float
    change: str
    priced: PricedStrategy | None


def axes(x: Subject) -> list[Axis]:
    """Every axis that talks; per rank and step."""
    s, system = x.strategy, x.pricing.system
    flops = x.hardware_flops / s.world
    found: dict[str, tuple[float, str]] = {}
    for flow in x.flows:
        sent, _ = found.get(flow.axis, (0.0, ""))
        found[flow.axis] = (sent + flow.sent, flow.tier)
    rates = {
        t.name: float(own.bytes_per_s_per_gpu_per_direction)
        for t, own in zip(x.pricing.cluster.tiers, system.tiers, strict=True)
    }
    batch = x.pricing.job.global_batch
    rows = []
    for axis, (sent, tier) in found.items():
        intensity, top = flops / sent, float(system.peak_bf16) / rates[tier]
        once = axis in ("dp", "edp") and (s.zero < 3 or s.gathers_once)
        critical = batch * top / intensity if once else None
        rows.append(Axis(axis, tier, sent, intensity, top, x.priced.terms.get(term_of(axis), 0.0), critical))
    return rows


def levers(x: Subject) -> list[Lever]:
    """What to change first: the largest losses, each with the best single change that lessens it."""
    losses = {
        name: x.priced.terms.get(name, 0.0) for name in (*COMMUNICATION, "bubble", "recompute", "launch", "head")
    }
    found = []
    for name, seconds in sorted(losses.items(), key=lambda item: -item[1]):
        if seconds < 0.01 * x.seconds:
            continue
        best = [
            (what, p)
            for what, p in x.neighbours
            if p.fits and p.seconds < x.priced.seconds and p.terms.get(name, 0.0) < seconds
        ]
        change, p = min(best, key=lambda item: item[1].seconds) if best else ("", None)
        found.append(Lever(reasons.TERM_NAMES[name], seconds, x.seconds / (x.seconds - seconds) - 1, change, p))
    return found


def order_costs(x: Subject) -> str:
    """What the other order of the mesh would cost, "" where there is none."""
    for what, p in x.neighbours:
        if what.startswith("order "):
            return f"{what.removeprefix('order ')}: {p.seconds / x.priced.seconds - 1:+.1%}"
    return ""


def why_not(x: Subject) -> list[tuple[str, PricedStrategy, str]]:
    """(what changes, its figures, why not or what it would gain) of each neighbour."""
    found = []
    for what, p in x.neighbours:
        if p.fits and p.seconds < x.priced.seconds:
            found.append((what, p, f"saves {1 - p.seconds / x.priced.seconds:.1%}"))
        else:
            found.append((what, p, reasons.why_not(p, x.priced, x.pricing)))
    return found


def as_json(x: Subject) -> dict[str, object]:
    """All of it."""
    return {
        "strategy": str(x.strategy),
        "step_time_s": x.seconds,
        "mfu": x.mfu,
        "fits": x.priced.fits,
        "memory_bytes": int(x.priced.bytes_),
        "usable_bytes": x.priced.usable,
        "terms_s": x.priced.terms,
        "memory_terms": x.priced.held,
        "targets": [
            {
                "name": t.name,
                "value": v,
                "good": t.good,
                "excellent": t.excellent,
                "mark": t.mark(v),
                "source": t.source,
            }
            for t, v in x.marks
        ],
        "communication": [
            {
                "axis": a.axis,
                "tier": a.tier,
                "sent_bytes": a.sent,
                "flop_per_byte": a.intensity,
                "ridge": a.ridge,
                "regime": a.regime,
                "exposed_s": a.exposed_s,
                "critical_batch": a.critical_batch,
            }
            for a in axes(x)
        ],
        "operators": [
            {"name": o.name, "flops": o.flops, "bytes": o.bytes_, "intensity": o.intensity, "bound": o.bound}
            for o in operators.training(x.pricing, x.strategy)
        ],
        "ridge": operators.ridge(x.pricing),
        "levers": [
            {
                "what": lever.what,
                "seconds": lever.seconds,
                "at_most": lever.at_most,
                "change": lever.change,
                "step_time_s": lever.priced.seconds if lever.priced else None,
            }
            for lever in levers(x)
        ],
        "order": order_costs(x),
        "neighbours": [
            {
                "change": what,
                "strategy": str(p.strategy),
                "step_time_s": p.seconds,
                "memory_bytes": int(p.bytes_),
                "fits": p.fits,
                "reason": reason,
            }
            for what, p, reason in why_not(x)
        ],
    }
