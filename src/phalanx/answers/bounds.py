"""How far off a price is at most by what it does not model, where a part of the price itself says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from phalanx.cost.analytic.estimate import Estimate
from phalanx.cost.analytic.option_effects import SPREAD
from phalanx.cost.analytic.step import step
from phalanx.frameworks.caveats import Caveat

_GIB = 2**30


def _less(term: str) -> Callable[[Estimate], str]:
    """Return what says how much memory there could be less."""
    return lambda e: f"memory by at most {float(e.memory.terms[term]) / _GIB:.1f} GiB less"


def _more_exposed(e: Estimate) -> str:
    hidden = float(e.step.of.get("dp", {}).get("hidden_s", 0.0))
    return f"time by at most {hidden:.3g} s a step more"


def _waiting(e: Estimate) -> str:
    learned = step(e.shape, e.layout, e.system, replace(e.profile, spread=SPREAD)).seconds
    return f"time by about {float(learned - e.seconds):.3g} s a step more"


_BY_LIMIT: dict[str, Callable[[Estimate], str]] = {
    "activations": _less("activations"),
    "state": _less("state"),
    "hidden": _more_exposed,
    "routing": _waiting,
}


def bounded(caveats: Iterable[Caveat], price: Estimate) -> tuple[Caveat, ...]:
    """Return caveats with the bounds that a price gives them."""
    return tuple(replace(c, bound=_BY_LIMIT[c.limit](price)) if c.limit else c for c in caveats)
