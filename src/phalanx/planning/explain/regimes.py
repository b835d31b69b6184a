"""Four regimes of communication, by the ratio of FLOP per byte sent to the FLOP per byte at which compute and
communication take equally long.

With perfect overlap a step takes the longer of the two, so that below a ratio of 1 a step computes for that share of
its time. Near 1 neither hides the other in practice: overlap is never perfect, and both ends of the ratio jitter.
"""

from __future__ import annotations

_BOUNDS = ((0.2, "communication dominates"), (0.8, "communication-bound"), (1.2, "balanced"))
COMPUTE = "compute-bound"
MEANING = "communication dominates below 0.2 of the ridge, bounds below 0.8, is balanced to 1.2"


def regime(ratio: float) -> str:
    """Return the regime of FLOP per byte sent over the ridge, of any positive ratio."""
    return next((name for most, name in _BOUNDS if ratio < most), COMPUTE)
