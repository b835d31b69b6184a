"""Overlap of the communication of gradients and parameters, on devices that transfer concurrently with compute. A
collective is hidden by the passes that run while it may travel; the rest is exposed:

    gradients reduced after every micro-batch (ZeRO 2, 3)    all backward passes
    gradients reduced once a step                            the last micro-batch's backward pass
    parameters gathered for every pass (ZeRO 3)              half by all forward, half by all backward passes
    parameters gathered once a step (ZeRO 3, reshard=step)   the first micro-batch's forward pass
    parameters gathered after the update (ZeRO 1, 2)         the next step's first forward pass
    metrics, scales of 8-bit gathers, whole matrices         nothing

Gathers and reductions of the backward pass share links, so their seconds add up before they are hidden.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.cost.step.term import Term
from phalanx.schedule.gradients.narrow import SCALES
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.gradients.whole_matrices import MATRICES
from phalanx.schedule.layout import Layout


def exposed_outside_layers(
    sent: Iterable[tuple[Term, float]], layout: Layout, forward_s: float, backward_s: float
) -> float:
    """Return the exposed seconds of collectives outside layers.

    `sent`: these terms with the seconds of all their collectives; `forward_s`, `backward_s`: a rank's passes of all
    micro-batches."""
    sharding, m = sharding_of(layout.strategy), layout.micro_batches
    reduced = gathered = updated = exposed = 0.0
    for term, seconds in sent:
        if term.event.phase == "B":
            reduced += seconds
        elif term.event.phase == "F":
            gathered += seconds
        elif term.event.unit.startswith(("metrics", SCALES, MATRICES)):
            exposed += seconds
        else:
            updated += seconds
    if not sharding.gathers_each:
        exposed += max(gathered - forward_s / m, 0.0)
    else:
        exposed += max(gathered / 2 - forward_s, 0.0)
        reduced += gathered / 2
    exposed += max(reduced - backward_s / (1 if sharding.reduces_each else m), 0.0)
    return exposed + max(updated - forward_s / m, 0.0)
