"""A few factors of a prediction, from steps that a user has measured.

Each factor θ_j multiplies the seconds of one part of a step (spec/cluster/calibration.py). With y_i the measured and
f_i(θ) the predicted seconds of configuration i, the fit minimises

    Σ_i ((ln y_i - ln f_i(θ)) / s)² + Σ_j (ln θ_j / s_j)²

by Gauss-Newton steps on ln θ. The second sum is a prior: three steps cannot move a factor far, and a part that they
hardly constrain stays as predicted. s_j are the spreads of these parts over published families of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.spec.cluster.calibration import PARTS, Calibration
from phalanx.spec.errors import InputError

Floats = npt.NDArray[np.float64]
Price = Callable[[Calibration], Floats]
"""Predicted seconds of every measured configuration."""
NOISE = 0.03
"""s: relative error of a measured step, and of a prediction whose parts are known."""
PRIORS = {"products": 0.10, "attention": 0.15, "memory": 0.15, "inside": 0.2, "between": 0.3, "host": 0.2}
"""s_j: relative spread of each part's factor."""
_STEP, _ROUNDS, _FAR = 0.02, 12, 3.5
"""Step of a difference in ln θ; rounds; the most of s_j by which a factor moves."""


@dataclass(frozen=True)
class Fit:
    """The factors, and the error in per cent of each configuration before, after, and predicted from the others."""

    calibration: Calibration
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: tuple[float, ...]
    spread: dict[str, float]
    """Relative standard deviation of each factor that remains; near its prior where nothing constrains it."""


def calibrate(price: Price, measured_s: Sequence[float] | Floats, stack: str = "", left_out: bool = True) -> Fit:
    """Fit the factors. Raises InputError without a measured step, or with seconds that are not positive."""
    y = np.asarray(measured_s, dtype=float)
    if not len(y):
        raise InputError("steps", None, "none were measured", "name a log, or FILE=SECONDS")
    if not np.all(np.isfinite(y)) or np.any(y <= 0):
        raise InputError("steps", None, "have seconds that are not positive")
    theta, covariance = _factors(price, y, np.ones(len(y), dtype=bool))
    plain, bent = price(Calibration()), price(_calibration(theta))
    others = []
    for i in range(len(y) if left_out and len(y) > 1 else 0):
        without, _ = _factors(price, y, np.arange(len(y)) != i)
        others.append(float(100 * (price(_calibration(without))[i] / y[i] - 1)))
    spread = np.sqrt(np.diag(covariance))
    return Fit(
        _calibration(theta, stack, len(y)),
        tuple(map(float, 100 * (plain / y - 1))),
        tuple(map(float, 100 * (bent / y - 1))),
        tuple(others),
        dict(zip(PARTS, map(float, spread), strict=True)),
    )


def _factors(price: Price, y: Floats, seen: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return ln θ of the best fit to the configurations `seen`, and its covariance."""
    theta: Any = np.zeros(len(PARTS))
    weights: Floats = np.array([1 / PRIORS[part] ** 2 for part in PARTS])
    inverse: Any = np.diag(1 / weights)
    for _ in range(_ROUNDS):
        now = np.log(price(_calibration(theta)))
        slopes = np.stack(
            [(np.log(price(_calibration(theta + _STEP * unit))) - now) / _STEP for unit in np.eye(len(PARTS))], axis=1
        )[seen]
        off = (np.log(y) - now)[seen]
        inverse = np.linalg.inv(slopes.T @ slopes / NOISE**2 + np.diag(weights))
        move = inverse @ (slopes.T @ off / NOISE**2 - weights * theta)
        most = _FAR / np.sqrt(weights)
        theta = np.asarray(np.clip(theta + move, -most, most), dtype=np.float64)
        if np.abs(move).max() < 1e-4:
            break
    return theta, inverse


def _calibration(theta: Floats, stack: str = "", steps: int = 0) -> Calibration:
    factors = {part: float(factor) for part, factor in zip(PARTS, np.exp(theta), strict=True)}
    return Calibration(**factors, stack=stack, steps=steps)
