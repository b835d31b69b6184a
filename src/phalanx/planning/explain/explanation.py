"""Explanation of a strategy's time and memory: both rooflines, what to change first, and why not its neighbours.

Communication has four regimes, by the FLOP per byte sent over the FLOP per byte at which compute and communication
take equally long (the ridge). With perfect overlap a step takes the longer of the two: below a ratio of 1 it computes
for that share of its time. Near 1 neither hides the other in practice, because overlap is never perfect and both
times vary.
"""

from dataclasses import dataclass

from phalanx.cost.analytic.step import TERM_NAMES
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.search import priced as reasons
from phalanx.planning.search.priced import COMMUNICATION, PricedStrategy

_BOUNDS = ((0.2, "communication dominates"), (0.8, "communication-bound"), (1.2, "balanced"))
COMPUTE = "compute-bound"
MEANING = "communication dominates below 0.2 of the ridge, bounds below 0.8, is balanced to 1.2"


def regime(ratio: float) -> str:
    """Return the regime of communication at a ratio of FLOP per byte sent to the ridge, any positive number."""
    return next((name for most, name in _BOUNDS if ratio < most), COMPUTE)


@dataclass(frozen=True)
class Axis:
    """One mesh axis on the communication roofline, per rank and step."""

    axis: str
    tier: str
    """Tier of links spanned by the axis's groups."""
    sent: float
    """Bytes sent by a rank."""
    intensity: float
    """FLOP per byte sent over the axis."""
    ridge: float
    """FLOP per byte sent above which the links keep up with the chip."""
    exposed_s: float
    critical_batch: float | None
    """Sequences per step above which the data axis is compute-bound; None if its traffic grows with the batch."""

    @property
    def regime(self) -> str:
        """One of the four regimes of communication."""
        return regime(self.intensity / self.ridge)


@dataclass(frozen=True)
class Loss:
    """Time that a step loses, and the single change that reduces it most."""

    name: str
    takes_s: float
    at_most: float
    """Speed-up without the loss, as a share."""
    change: str
    """Such as `tp 4 -> 8`; "" if no neighbour helps."""
    step_time_s: float | None
    """Of the strategy with that change."""


def axes(x: AnalyticSubject) -> list[Axis]:
    """Return every axis that communicates, with its place on the communication roofline."""
    s, system = x.strategy, x.pricing.system
    flops = x.hardware_flops / s.world
    totals: dict[str, tuple[float, str]] = {}
    for flow in x.flows:
        sent, _ = totals.get(flow.axis, (0.0, ""))
        totals[flow.axis] = (sent + flow.sent, flow.tier)
    rates = {
        t.name: float(rate.bytes_per_s_per_gpu_per_direction)
        for t, rate in zip(x.pricing.cluster.tiers, system.tiers, strict=True)
    }
    batch = x.pricing.job.global_batch
    rows = []
    for axis, (sent, tier) in totals.items():
        intensity, top = flops / sent, float(system.peak_bf16) / rates[tier]
        once = axis in ("dp", "edp") and not x.reduces_each
        critical = batch * top / intensity if once else None
        rows.append(Axis(axis, tier, sent, intensity, top, x.exposed_seconds(axis), critical))
    return rows


def losses(x: AnalyticSubject) -> list[Loss]:
    """Return the losses of at least 1 % of the step, largest first, each with the best single change against it."""
    lost = {name: x.priced.terms.get(name, 0.0) for name in (*COMMUNICATION, "bubble", "recompute", "launch", "head")}
    rows = []
    for name, seconds in sorted(lost.items(), key=lambda item: -item[1]):
        if seconds < 0.01 * x.seconds:
            continue
        helpful = [
            (what, p)
            for what, p in x.neighbours
            if p.fits and p.seconds < x.priced.seconds and p.terms.get(name, 0.0) < seconds
        ]
        change, p = min(helpful, key=lambda item: item[1].seconds) if helpful else ("", None)
        at_most = x.seconds / (x.seconds - seconds) - 1
        rows.append(Loss(TERM_NAMES[name], seconds, at_most, change, p.seconds if p else None))
    return rows


def order_costs(x: AnalyticSubject) -> str:
    """Return the other mesh order and its change of the step time, in words; "" if there is none."""
    for what, p in x.neighbours:
        if what.startswith("order "):
            return f"{what.removeprefix('order ')}: {p.seconds / x.priced.seconds - 1:+.1%}"
    return ""


def why_not(x: AnalyticSubject) -> list[tuple[str, PricedStrategy, str]]:
    """Return (change, price, reason against it or its gain) for each neighbour."""
    rows = []
    for what, p in x.neighbours:
        if p.fits and p.seconds < x.priced.seconds:
            rows.append((what, p, f"saves {1 - p.seconds / x.priced.seconds:.1%}"))
        else:
            rows.append((what, p, reasons.why_not(p, x.priced, x.pricing_of_others)))
    return rows
