"""A cluster with measured collectives."""

from __future__ import annotations

from dataclasses import asdict, replace

from phalanx.measure.this_machine import describe
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit, KernelRates, Rates
from phalanx.spec.files.job_file import build


def fit(transport: str, alpha: float, beta: float, ranks: int = 2, op: str = "all_reduce") -> CollectiveFit:
    sizes = [2**k for k in range(10, 25, 2)]
    points = tuple((n, alpha + beta * n) for n in sizes)
    algorithm = "ring" if transport == "p2p" else ""
    return CollectiveFit(op, ranks, alpha, beta, 0.0, transport, algorithm, points)  # type: ignore[arg-type]


def cluster(*fits: CollectiveFit) -> ClusterSpec:
    return replace(clusters.preset("dgx-h100", 1), collectives=fits)


def laptop(ranks: int) -> ClusterSpec:
    """A measured host of `ranks` CPU ranks, with the rates of a laptop."""
    rows = {"kernels": [asdict(_kernels(n)) for n in (1, ranks)], "figures": []}
    rows["collectives"] = [
        asdict(fit(way, 2e-5, 1e-9, ranks, op))
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for way in ("native", "p2p", "shm")
        if ranks > 1
    ]
    machine = {"gpus": [], "memory_bytes": 2**34, "cpu": ["laptop"]}
    return build(ClusterSpec, describe(machine, ranks, "float32", rows), "cluster")


def _kernels(concurrent: int) -> KernelRates:
    forward, backward = Rates(2e-11, 4e-11, 1e-10, 5e-6), Rates(3e-11, 5e-11, 1e-10, 8e-6)
    return KernelRates("float32", concurrent, 1, forward, backward, 1e-10, 1.1, 5e10, 0.1, "measured")
