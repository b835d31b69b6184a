"""Why not: what a strategy needs that is not there, or what it spends its time on that a better one does not."""

from __future__ import annotations

from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.priced import COMMUNICATION, Priced
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

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
