"""An explanation of a plan of our own runtime, on a machine that was measured: by the exact price of its step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.plan import reasons
from phalanx.plan.pricing import Pricing
from phalanx.plan.search import STACK, Candidate, price
from phalanx.spec.errors import InputError
from phalanx.spec.plan import Plan
from phalanx.spec.strategy import Strategy, require_runnable


@dataclass(frozen=True)
class Own:
    """`neighbours`: what a single other decision would make of it, the fastest that fit first."""

    chosen: Candidate
    neighbours: tuple[tuple[str, Candidate], ...]
    usable: int

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of the step; of a pipeline those of the rank that computes longest, which waits for the others."""
        p = self.chosen.prediction
        found = {
            "forward passes": float(p.forward_s),
            "backward passes": float(p.backward_s),
            "the update": float(p.optimizer_s),
        }
        seen = float(p.exposed_communication_s)
        found["communication that nothing hides"] = seen
        found["waiting for other stages"] = max(0.0, self.chosen.seconds - sum(found.values()))
        return {name: seconds for name, seconds in found.items() if seconds}

    @property
    def held(self) -> dict[str, float]:
        p = self.chosen.prediction
        return {"model state": float(p.state_bytes), "activations": float(p.activation_bytes)}


def own(plan: Plan, strategy: Strategy) -> Own:
    """Price a strategy of a plan's job on its cluster, and those next to it. Raises InputError."""
    model, cluster, job = plan.model, plan.cluster, plan.job
    chosen = price(model, cluster, job, strategy)
    found = []
    for what, other in reasons.neighbours(chosen.asked, Pricing(model, cluster, job, STACK)):
        try:
            require_runnable(other, job)
        except InputError:
            continue
        found.append((what, price(model, cluster, job, other)))
    found.sort(key=lambda item: (bool(item[1].reason), item[1].seconds))
    return Own(chosen, tuple(found), cluster.device.usable_bytes)


def as_json(x: Own) -> dict[str, Any]:
    """As `phalanx explain --json` prints it."""
    c = x.chosen
    return {
        "strategy": str(c.asked),
        "step_time_s": c.seconds,
        "fits": not c.reason,
        "memory_bytes": int(c.prediction.memory_bytes),
        "usable_bytes": x.usable,
        "terms_s": x.terms,
        "memory_terms": x.held,
        "bytes_per_axis": {axis: int(n) for axis, n in c.prediction.bytes_per_axis.items()},
        "neighbours": [
            {
                "change": what,
                "strategy": str(other.asked),
                "step_time_s": other.seconds,
                "memory_bytes": int(other.prediction.memory_bytes),
                "rejected": other.reason,
            }
            for what, other in x.neighbours
        ],
    }
