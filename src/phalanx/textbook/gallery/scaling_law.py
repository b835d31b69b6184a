"""The loss of a model of N parameters after D tokens (Hoffmann et al. 2022, "Training Compute-Optimal Large Language
Models", equation 10):

    L(N, D) = E + A / N^α + B / D^β        in nats a token

E is the entropy of text, which no model goes below; the second term falls with size, the third with data.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Law:
    """The constants of L(N, D)."""

    entropy: float
    a: float
    b: float
    alpha: float
    beta: float


LAW = Law(entropy=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28)
"""As the paper fitted them."""


def loss(parameters: float, tokens: float, law: Law = LAW) -> float:
    """Return the loss in nats a token."""
    of_size: float = law.a / parameters**law.alpha
    of_data: float = law.b / tokens**law.beta
    return law.entropy + of_size + of_data
