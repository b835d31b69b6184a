"""Minimise weighted absolute residuals with Gaussian priors on logarithms: reweighted, damped Gauss-Newton steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def minimise(
    residuals: Callable[[Floats], Floats],
    jacobian: Callable[[Floats, Floats], Floats],
    x: Floats,
    spread: Floats,
    weights: Floats,
    steps: int = 25,
    near: float = 0.04,
) -> Floats:
    """Return x that makes sum w sqrt(r(x)^2 + near^2) + 1/2 sum (x / spread)^2 small, from x on."""
    damping = 1e-2

    def cost(r: Floats, x: Floats) -> float:
        return float((weights * np.sqrt(r**2 + near**2)).sum() + 0.5 * ((x / spread) ** 2).sum())

    r = residuals(x)
    now = cost(r, x)
    for _ in range(steps):
        slopes = jacobian(x, r)
        each = weights / np.sqrt(r**2 + near**2)
        a = slopes.T @ (each[:, None] * slopes) + np.diag(1 / spread**2)
        g = slopes.T @ (each * r) + x / spread**2
        before = now
        for _ in range(8):
            tried = x - np.clip(np.linalg.solve(a + damping * np.diag(np.diag(a)), g), -0.6, 0.6)
            s = residuals(tried)
            if cost(s, tried) < now:
                x, r, now, damping = tried, s, cost(s, tried), damping / 4
                break
            damping *= 5
        if before - now < 1e-4 * before:
            break
    return x
