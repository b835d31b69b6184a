"""Correction factors of a prediction, fitted to steps that a user has measured.

Each factor θ_j multiplies the seconds of one part of a step (spec/cluster/calibration.py). With y_i the measured and
f_i(θ) the predicted seconds of configuration i, the fit minimises

    Σ_i ((ln y_i - ln f_i(θ)) / s)² + Σ_j (ln θ_j / s_j)²

by Gauss-Newton steps on ln θ. The second sum is a prior: three steps cannot move a factor far, and a part that they
hardly constrain stays as predicted. s is the error that no factor explains, and s_j are the spreads of these parts
over published families of runs, all times a number of at least 1. Both are the likeliest given the steps themselves
(type II maximum likelihood; Bishop 2006, section 3.5): steps that contradict each other bend little.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from phalanx.spec.cluster.calibration import PARTS, Calibration
from phalanx.spec.errors import InputError

Floats = npt.NDArray[np.float64]
Price = Callable[[Calibration], Floats]
"""Predicted seconds of every measured configuration."""
_NOISES = np.geomspace(0.015, 0.25, 16)
"""Values of s that are tried."""
_USUAL, _SURE = 0.06, 0.7
"""Prior of s: its median, and the spread of its logarithm, about as the fitted errors of families."""
_WIDER, _SELDOM = (1.0, 1.5, 2.0, 3.0), 0.5
"""Numbers that multiply all s_j, and the prior spread of their logarithm."""
PRIORS = {"products": 0.10, "attention": 0.15, "memory": 0.15, "inside": 0.2, "between": 0.3, "host": 0.2}
"""s_j: relative spread of each part's factor."""
_STEP, _ROUNDS, _NEAR, _FAR = 0.02, 12, 1e-3, 3.5
"""Step of a finite difference in ln θ; most rounds; the move below which they end; the most s_j that ln θ_j moves."""


@dataclass(frozen=True)
class Fit:
    """The factors, and the error of each configuration in percent: before the fit, after it, and with factors fitted
    to the others alone (linearised at the fit, so that no step is priced again)."""

    calibration: Calibration
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: tuple[float, ...]
    spread: dict[str, float]
    """Relative standard deviation of each factor that remains; near its prior where nothing constrains it."""


def calibrate(price: Price, measured_s: Sequence[float] | Floats, stack: str = "", left_out: bool = True) -> Fit:
    """Fit the factors of `stack` to measured steps; `left_out`: also each without its own configuration. Raises
    InputError without a step, or with seconds that are not positive."""
    y = np.asarray(measured_s, dtype=float)
    if not len(y):
        raise InputError("steps", None, "none were measured", "name a log, or FILE=SECONDS")
    if not np.all(np.isfinite(y)) or np.any(y <= 0):
        raise InputError("steps", None, "have seconds that are not positive")
    theta, slopes = _factors(price, y)
    plain, bent = price(Calibration()), price(_calibration(theta))
    off = np.log(y / bent) + slopes @ theta  # from f(0), as far as slopes reach
    others = []
    for i in range(len(y) if left_out and len(y) > 1 else 0):
        rest = np.arange(len(y)) != i
        without = _posterior(slopes[rest], off[rest])[0]
        others.append(float(100 * (bent[i] * np.exp(slopes[i] @ (without - theta)) / y[i] - 1)))
    covariance = _posterior(slopes, off)[1]
    spread = np.sqrt(np.diag(covariance))
    return Fit(
        _calibration(theta, stack, len(y)),
        tuple(map(float, 100 * (plain / y - 1))),
        tuple(map(float, 100 * (bent / y - 1))),
        tuple(others),
        dict(zip(PARTS, map(float, spread), strict=True)),
    )


def _factors(price: Price, y: Floats) -> tuple[Floats, Floats]:
    """Return ln θ of the best fit, and the slopes there of each configuration's ln f by each ln θ_j."""
    theta = np.zeros(len(PARTS))
    for _ in range(_ROUNDS):
        now = np.log(price(_calibration(theta)))
        slopes = np.stack(
            [(np.log(price(_calibration(theta + _STEP * unit))) - now) / _STEP for unit in np.eye(len(PARTS))], axis=1
        )
        moved = _posterior(slopes, np.log(y) - now + slopes @ theta)[0]
        far, theta = np.abs(moved - theta).max(), moved
        if far < _NEAR:
            break
    return theta, slopes


def _posterior(slopes: Floats, off: Floats) -> tuple[Floats, Floats]:
    """Return the posterior mean and covariance of ln θ given `off` = `slopes` ln θ + noise, at the likeliest s and
    s_j."""
    one, eye = np.diag([PRIORS[part] ** 2 for part in PARTS]), np.eye(len(off))

    def unlikely(wider: float, s: float) -> float:
        sums = wider**2 * slopes @ one @ slopes.T + s**2 * eye
        before = (np.log(s / _USUAL) / _SURE) ** 2 + (np.log(wider) / _SELDOM) ** 2
        return float(np.linalg.slogdet(sums)[1] + off @ np.linalg.solve(sums, off) + before)

    wider, s = min(product(_WIDER, _NOISES), key=lambda pair: unlikely(*pair))
    prior = wider**2 * one
    gain = prior @ slopes.T @ np.linalg.inv(slopes @ prior @ slopes.T + s**2 * eye)
    most = _FAR * np.sqrt(np.diag(one))
    return np.clip(gain @ off, -most, most), prior - gain @ slopes @ prior


def _calibration(theta: Floats, stack: str = "", steps: int = 0) -> Calibration:
    factors = {part: float(factor) for part, factor in zip(PARTS, np.exp(theta), strict=True)}
    return Calibration(**factors, stack=stack, steps=steps)
