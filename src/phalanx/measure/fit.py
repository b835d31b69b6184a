"""Least squares that cannot give a negative price."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def nonnegative_fit(features: Array, values: Array) -> Array:
    """x >= 0 that minimises Σ ((features x - values) / values)², by trying every set of active columns.

    features: (points, kinds) with few kinds; values: (points,), positive. Exact, for the best non-negative
    solution is an ordinary least-squares solution on the columns where it is positive.
    """
    kinds = features.shape[1]
    scaled = features / values[:, None]
    size = np.abs(scaled).max(axis=0)
    size[size == 0] = 1.0
    scaled = scaled / size
    best, best_error = np.zeros(kinds), float(len(values))
    for count in range(1, kinds + 1):
        for active in map(list, combinations(range(kinds), count)):
            x, *_ = np.linalg.lstsq(scaled[:, active], np.ones(len(values)), rcond=None)
            if (x < 0).any():
                continue
            error = float(((scaled[:, active] @ x - 1) ** 2).sum())
            if error < best_error:
                best = np.zeros(kinds)
                best[active], best_error = x, error
    return best / size
