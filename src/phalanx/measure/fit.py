"""Fits of non-negative prices to measured times."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def nonnegative_fit(features: Array, values: Array) -> Array:
    """Return the x >= 0, (kinds,), that minimises Σ ((features x - values) / values)², trying all sets of columns.

    features: (points, kinds) with few kinds; values: (points,), positive. The result is exact: the best non-negative
    solution is the ordinary least-squares solution on the columns where it is positive.
    """
    kinds = features.shape[1]
    scaled = features / values[:, None]
    size = np.abs(scaled).max(axis=0)
    size[size == 0] = 1.0
    scaled = scaled / size
    best: Array = np.zeros(kinds)
    best_error = float(len(values))
    for count in range(1, kinds + 1):
        for active in map(list, combinations(range(kinds), count)):
            x, *_ = np.linalg.lstsq(scaled[:, active], np.ones(len(values)), rcond=None)
            if (x < 0).any():
                continue
            error = float(((scaled[:, active] @ x - 1) ** 2).sum())
            if error < best_error:
                best = np.zeros(kinds)
                best[active], best_error = x, error
    result: Array = best / size
    return result


_DRAWS = 200  # bootstrap samples of the points, for the range of a line's coefficients


@dataclass(frozen=True)
class FittedLine:
    """A line α + β n, with its median relative error.

    The ranges hold 90 % of the coefficients that bootstrap samples of the same points give.
    """

    alpha: float
    beta: float
    fit_error: float
    alpha_range: tuple[float, float]
    beta_range: tuple[float, float]


def robust_line(sizes: npt.ArrayLike, seconds: npt.ArrayLike) -> FittedLine:
    """Return the line with α, β >= 0 and the least sum of relative errors |α + β n - t| / t.

    Such a line passes through two of the points, or through one with α or β = 0; all of those are tried. A few
    outliers do not move it, however far off they are.
    """
    n, t = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    i, j = np.triu_indices(len(n), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (t[j] - t[i]) / (n[j] - n[i])
        alphas = np.concatenate([t[i] - slope * n[i], t, np.zeros(len(n))])
        betas = np.concatenate([slope, np.zeros(len(n)), t / n])
    # Rounding may leave a tiny α in place of 0.
    alphas[np.abs(alphas) < 1e-12 * t.max()] = 0.0
    kept = np.isfinite(alphas) & np.isfinite(betas) & (alphas >= 0) & (betas >= 0)
    alphas, betas = alphas[kept], betas[kept]
    off = np.abs(alphas[:, None] + betas[:, None] * n - t) / t  # (lines, points)
    best = int(np.argmin(off.sum(axis=1)))
    weights = np.random.default_rng(0).multinomial(len(n), np.full(len(n), 1 / len(n)), size=_DRAWS)
    drawn = np.argmin(weights @ off.T, axis=1)
    ranges = [np.percentile(c[drawn], [5, 95]) for c in (alphas, betas)]
    (alpha_low, alpha_high), (beta_low, beta_high) = (map(float, r) for r in ranges)
    alpha, beta, error = float(alphas[best]), float(betas[best]), float(np.median(off[best]))
    return FittedLine(alpha, beta, error, (alpha_low, alpha_high), (beta_low, beta_high))
