"""Fit the constants of links on published times of single collectives (collectives.csv)."""

from __future__ import annotations

import numpy as np

from phalanx.cost.analytic.chips import _DEFAULTS
from phalanx.validate.collectives import points, predicted_s
from phalanx.validate.records import COLLECTIVES, load

KEYS = (
    "nvidia.node_hop_s",
    "nvidia.node_bulk_s",
    "nvidia.net_hop_s",
    "nvidia.net_bulk_s",
    "nvidia.cloud_hop_s",
    "nvidia.cloud_bulk_s",
    "nvidia.bulk_bytes",
    "nvidia.bulk_reduce_bytes",
    "nvidia.nic",
    "nvidia.nvlink",
    "ampere.nvlink",
    "ampere.start_s",
    "hopper.reduce_gain",
    "blackwell.nvlink",
    "blackwell.reduce_gain",
)
_OTHERS = 0.4
"""Weight of a point of a collective other than all-reduce, which has 1."""


def fitted(sweeps: int = 25) -> dict[str, float]:
    """Fit constants one by one, with steps that grow on success and shrink on failure."""
    published, _ = points(load(COLLECTIVES, ("hardware", "collective")))
    weight = np.array([1.0 if p.op == "all_reduce" else _OTHERS for p in published])
    measured = np.array([p.measured_s for p in published])
    x = {key: _DEFAULTS[key.split(".")[1]] or 30e-6 for key in KEYS}  # a factor moves nothing from 0
    steps = dict.fromkeys(KEYS, 0.3)

    def cost(tried: dict[str, float]) -> float:
        predicted = np.array([predicted_s(p, tried) for p in published])
        return float((weight * np.abs(np.log(predicted / measured))).mean())

    best = cost(x)
    for _ in range(sweeps):
        for key in KEYS:
            for sign in (1, -1):
                tried = {**x, key: x[key] * float(np.exp(sign * steps[key]))}
                if not _possible(key, tried[key]):
                    continue
                value = cost(tried)
                if value < best - 1e-7:
                    best, x = value, tried
                    steps[key] *= 1.4
                    break
            else:
                steps[key] *= 0.5
    return x


def _possible(key: str, value: float) -> bool:
    """Whether a value is physical: a share of at most 0.92, a hop of at least 1 us in a node, 5 us over a network."""
    if key.endswith(("nic", "nvlink")):
        return value <= 0.92
    if key == "nvidia.net_hop_s":
        return value >= 5e-6
    return value >= 1e-6 if key.endswith("hop_s") else True
