"""Why a strategy is not the best one: the memory it lacks, or the term that costs more than in the best one."""

from __future__ import annotations

from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import COMMUNICATION, PricedStrategy
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

TERM_NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory-bound work",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert parallelism: messages, permutation, waiting",
    "dp": "data-parallel communication",
    "transfers": "transfers between stages",
    "recompute": "recomputation",
    "launch": "kernel launches",
    "head": "the head's rank, for which the others wait",
    "bubble": "the bubble",
    "optimizer": "the update",
    "other": "the rest",
}
"""Words for each term of a step in a sentence."""


def why_not(p: PricedStrategy, best: PricedStrategy | None, pricing: Pricing) -> str:
    """Return a sentence with numbers on why `p` is not the best strategy: its memory if it does not fit, else the
    term that grew most.

    `best` may be None only if `p` does not fit."""
    if not p.fits:
        name, most = max(p.memory_terms.items(), key=lambda item: item[1])
        free = f" ({pricing.allocatable / GIB:.1f} less {pricing.headroom:.0%})" if pricing.headroom else ""
        return f"needs {p.bytes_ / GIB:.1f} of {p.usable / GIB:.1f} GiB{free}, {most / GIB:.1f} of them {name}"
    assert best is not None
    slower = p.seconds / best.seconds - 1
    grown = {name: p.terms[name] - best.terms.get(name, 0.0) for name in p.terms}
    worst = max(grown, key=lambda name: grown[name])
    leaves = _wider_than_node(p.strategy, pricing)
    if worst in COMMUNICATION and leaves:
        return f"{slower:+.1%}: {leaves}: {p.communication:.0%} of the step is communication"
    here, instead = _seconds(p.terms[worst]), _seconds(best.terms[worst])
    return f"{slower:+.1%}: {TERM_NAMES.get(worst, worst)}: {here} instead of {instead}"


def _seconds(s: float) -> str:
    return f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.0f} ms"


def _wider_than_node(s: Strategy, pricing: Pricing) -> str:
    """Name the axis with communication in every layer that is wider than a node; "" if there is none."""
    node = pricing.cluster.ranks_per_node
    grid = mesh(s)
    for axis, degree in (("tp", s.tp), ("ep", s.ep), ("cp", s.cp)):
        if degree > 1 and not grid.within(axis, node):
            return f"{axis}={degree} leaves the node"
    return ""
