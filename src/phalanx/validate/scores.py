"""Scores: errors of predicted quantities in percent, and the confusion matrix of what fits in memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def errors(predicted: Sequence[float] | Floats, measured: Sequence[float] | Floats) -> dict[str, Any]:
    """Score predictions of positive quantities against measurements, pair by pair.

    In percent of the measurement: `mape`, `median` and `p90` of the absolute error; `bias`, the mean signed error.
    `spearman`: rank correlation, in [-1, 1]. `n`: pairs. All but `n` are None without pairs.
    """
    p, m = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    if not len(p):
        return {"mape": None, "median": None, "p90": None, "bias": None, "spearman": None, "n": 0}
    signed = 100 * (p / m - 1)
    off = np.abs(signed)
    return {
        "mape": float(off.mean()),
        "median": float(np.median(off)),
        "p90": float(np.percentile(off, 90)),
        "bias": float(signed.mean()),
        "spearman": spearman(p, m),
        "n": len(p),
    }


def spearman(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float | None:
    """Spearman's rank correlation; None if either side is constant."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(_ranks(np.asarray(a)), _ranks(np.asarray(b)))[0, 1])


def _ranks(values: Floats) -> Floats:
    """Ranks from 1, where ties share their mean rank."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[group]


def fit(predicted: Sequence[bool], measured: Sequence[bool]) -> dict[str, Any]:
    """Count correct and wrong predictions of "fits in memory" (the positive class); `accuracy` in percent."""
    p, m = np.asarray(predicted, dtype=bool), np.asarray(measured, dtype=bool)
    tp, fp = int((p & m).sum()), int((p & ~m).sum())
    tn, fn = int((~p & ~m).sum()), int((~p & m).sum())
    n = len(p)
    return {"accuracy": 100 * (tp + tn) / n if n else None, "tp": tp, "fp": fp, "tn": tn, "fn": fn, "n": n}
