"""A cluster with measured collectives."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit


def fit(transport: str, alpha: float, beta: float, ranks: int = 2, op: str = "all_reduce") -> CollectiveFit:
    sizes = [2**k for k in range(10, 25, 2)]
    points = tuple((n, alpha + beta * n) for n in sizes)
    algorithm = "ring" if transport == "p2p" else ""
    return CollectiveFit(op, ranks, alpha, beta, 0.0, transport, algorithm, points)  # type: ignore[arg-type]


def cluster(*fits: CollectiveFit) -> ClusterSpec:
    return replace(clusters.dgx_h100(1), collectives=fits)
