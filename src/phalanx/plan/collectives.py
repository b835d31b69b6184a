"""Which collective algorithm wins on a cluster, at which size, and how far it is from what cannot be beaten."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.cost.critical_path import closed_form, costs, lower_bound
from phalanx.cost.critical_path import seconds as path_seconds
from phalanx.schedule.collectives import ALGORITHMS, build
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import InputError, nearest

_SIZES = tuple(2.0**k for k in range(8, 33))  # 256 B .. 4 GiB


@dataclass(frozen=True)
class Row:
    """One algorithm at one size; `bound`: no schedule is faster on these links."""

    algorithm: str
    rounds: int
    sent_bytes: float
    seconds: float
    bound: float
    formula_seconds: float | None
    """The published closed form, where all ranks share one tier of links."""


@dataclass(frozen=True)
class Comparison:
    """All algorithms of an operation, fastest first; and who wins from which size (bytes) to which."""

    rows: tuple[Row, ...]
    winners: tuple[tuple[float, float, str], ...]


def compare(op: str, size_bytes: float, ranks: int, cluster: ClusterSpec) -> Comparison:
    """Price every algorithm of a collective over the first `ranks` ranks of a cluster. Raises InputError."""
    if op not in ALGORITHMS:
        raise InputError("--op", op, "is not a collective", nearest(op, ALGORITHMS))
    if not 1 <= ranks <= cluster.ranks:
        raise InputError("--ranks", ranks, f"{cluster.name} has {cluster.ranks} ranks", "give more --nodes")
    links = costs(cluster)
    inner = math.gcd(ranks, cluster.tiers[0].ranks)
    # As many elements as ranks: chunks are equal, and an element stands for n / ranks bytes.
    built = {a: build(op, a, ranks, ranks, tiers=(inner, ranks // inner)) for a in ALGORITHMS[op]}

    def time(algorithm: str, n: float) -> float:
        return path_seconds(built[algorithm], n / ranks, links)

    within, alpha, beta = links.tiers[0]
    flat = ranks <= within
    bound = lower_bound(op, ranks, size_bytes, links)
    rows = [
        Row(
            algorithm=a,
            rounds=s.rounds,
            sent_bytes=float(s.sent.max(initial=0)) * size_bytes / ranks,
            seconds=time(a, size_bytes),
            bound=bound,
            formula_seconds=closed_form(op, a, ranks, size_bytes, alpha, beta, links.gamma_s_per_byte)
            if flat
            else None,
        )
        for a, s in built.items()
    ]
    winners: list[tuple[float, float, str]] = []
    for n in _SIZES:
        best = min(built, key=lambda a: time(a, n))
        if winners and winners[-1][2] == best:
            winners[-1] = (winners[-1][0], n, best)
        else:
            winners.append((n, n, best))
    return Comparison(tuple(sorted(rows, key=lambda r: r.seconds)), tuple(winners))
