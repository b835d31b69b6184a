"""Fastest collective algorithm on a cluster by size, and its distance from the lower bound."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from phalanx.cost.collectives.closed_form import FORMULAS, best_segments, closed_form
from phalanx.cost.collectives.critical_path import LinkCosts, Path, costs, lower_bound
from phalanx.planning.tables.table import Sheet, columns
from phalanx.schedule.collectives.ir import Schedule
from phalanx.schedule.collectives.registry import ALGORITHMS, SEGMENTED, build, least_size
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.spec import ClusterSpec, Tier
from phalanx.spec.errors import InputError, nearest

_FOLLOWED = 256
"""Most ranks for which messages are simulated one by one; the formulas hold for any number."""
_SIZES = tuple(2.0**k for k in range(8, 33))  # 256 B .. 4 GiB


@dataclass(frozen=True)
class AlgorithmRow:
    """One algorithm at one size."""

    algorithm: str
    segments: int | None
    """Best number of segments; None if the algorithm sends none."""
    rounds: int
    sent_bytes: float
    seconds: float
    bound: float
    """Seconds that no schedule beats on these links."""
    formula_seconds: float | None
    """Seconds by the published closed form; None if the ranks do not share one tier of links."""
    busbw_bytes_per_s: float | None = None
    """What nccl-tests calls busbw; None for a barrier."""


def busbw(op: str, ranks: int, size_bytes: float, seconds: float) -> float | None:
    """Return the bus bandwidth in bytes/s as nccl-tests defines it (doc/PERFORMANCE.md): size over time, times
    2 (p-1)/p for an all-reduce, 1 for broadcast and reduce, (p-1)/p for others; None for a barrier or no time."""
    if op == "barrier" or not seconds:
        return None
    share = 1.0 if op in ("broadcast", "reduce") else (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks
    return share * size_bytes / seconds


@dataclass(frozen=True)
class Crossover:
    """The size (bytes) at which a message spends as long on a tier's latency as on its bandwidth: n* = α/β."""

    tier: str
    bytes: float


@dataclass(frozen=True)
class AlgorithmComparison:
    """All algorithms of an operation on a cluster."""

    rows: tuple[AlgorithmRow, ...]
    """Fastest first."""
    winners: tuple[tuple[float, float, str], ...]
    """(from bytes, to bytes, fastest algorithm)."""
    crossovers: tuple[Crossover, ...]
    """Crossover of every tier of links in use."""


@dataclass(frozen=True)
class _SizedSchedule:
    """A schedule of equal chunks, which can be timed for any number of bytes."""

    schedule: Schedule
    segments: int
    elements: int
    """Elements of the buffer."""
    path: Path

    def seconds(self, n: float) -> float:
        """Time of the critical path for `n` bytes."""
        return self.path.seconds(n / self.elements)


def compare(
    op: str, size_bytes: float, ranks: int, cluster: ClusterSpec, files: Sequence[str] = ()
) -> AlgorithmComparison:
    """Price every algorithm of a collective of `size_bytes` over the first `ranks` ranks of a cluster, and the
    algorithms in `files` (algorithm_file.py). Beyond 256 ranks only the published formulas are used. A barrier
    ignores the size. Raises InputError for an unknown collective or more ranks than the cluster has."""
    if op not in ALGORITHMS:
        raise InputError("op", op, "is not a collective", nearest(op, ALGORITHMS))
    if not 1 <= ranks <= cluster.ranks:
        raise InputError("ranks", ranks, f"{cluster.name} has {cluster.ranks} ranks", "ask for as many or fewer")
    if ranks > _FOLLOWED:
        if files:
            raise InputError("ranks", ranks, "is too many to follow an algorithm of a file", f"at most {_FOLLOWED}")
        return _by_formula(op, 0.0 if op == "barrier" else size_bytes, ranks, cluster)
    links = costs(cluster)
    tiers_used = next((i for i, t in enumerate(cluster.tiers) if t.ranks >= ranks), len(cluster.tiers) - 1) + 1
    priced = _pricing(op, ranks, cluster, links, links.tiers[tiers_used - 1][1:])
    n = 0.0 if op == "barrier" else size_bytes
    _, alpha, beta = links.tiers[0]
    flat = tiers_used == 1 and cluster.tiers[0].uplink_bandwidth_bytes_per_s_per_direction is None
    bound = lower_bound(op, ranks, n, links)
    rows = []
    algorithms = (*ALGORITHMS[op], *files)
    for algorithm in algorithms:
        timed = priced(algorithm, n)
        formula = closed_form(op, algorithm, ranks, n, alpha, beta, links.gamma_s_per_byte, timed.segments)
        row = AlgorithmRow(
            algorithm=algorithm,
            segments=timed.segments if (op, algorithm) in SEGMENTED else None,
            rounds=timed.schedule.rounds,
            sent_bytes=float(timed.schedule.sent.max(initial=0)) * n / timed.elements,
            seconds=timed.seconds(n),
            bound=bound,
            formula_seconds=formula if flat else None,
            busbw_bytes_per_s=busbw(op, ranks, n, timed.seconds(n)),
        )
        rows.append(row)
    return _comparison(
        op,
        rows,
        lambda size: min(algorithms, key=lambda a: priced(a, size).seconds(size)),
        cluster.tiers[:tiers_used],
    )


def _comparison(
    op: str, rows: Sequence[AlgorithmRow], fastest: Callable[[float], str], tiers: Sequence[Tier]
) -> AlgorithmComparison:
    """Return the comparison of rows. `fastest`: from a size in bytes to the fastest algorithm; `tiers`: in use."""
    winners: list[tuple[float, float, str]] = []
    for size in _SIZES if op != "barrier" else ():
        best = fastest(size)
        low = winners.pop()[0] if winners and winners[-1][2] == best else size
        winners.append((low, size, best))
    crossovers = (Crossover(t.name, t.latency_s * t.bandwidth_bytes_per_s_per_gpu_per_direction) for t in tiers)
    return AlgorithmComparison(tuple(sorted(rows, key=lambda r: r.seconds)), tuple(winners), tuple(crossovers))


def cluster_of_links(ranks: int, alpha_s: float, bytes_per_s: float) -> ClusterSpec:
    """Return a cluster with one tier of links between all ranks, and additions that take no time, as texts assume."""
    base = preset("dgx-h100", 1)
    links = replace(
        base.tiers[0],
        name="links",
        ranks=ranks,
        latency_s=alpha_s,
        bandwidth_bytes_per_s_per_gpu_per_direction=bytes_per_s,
    )
    device = replace(base.device, gamma_s_per_byte=0.0)
    name = f"links of {alpha_s * 1e6:g} µs and {bytes_per_s / 1e9:g} GB/s"
    return replace(base, name=name, device=device, ranks_per_node=ranks, nodes=1, tiers=(links,))


def formulas() -> Sheet:
    """Tabulate the published formula of every algorithm that has one, in symbols."""
    rows = [(op, name, f.latency, f.sent, f.reduced, f.condition or "any p") for (op, name), f in FORMULAS.items()]
    return Sheet(
        "time of a collective = messages x alpha + bytes sent x beta + bytes added x gamma",
        columns("operation | algorithm | messages (alpha) | bytes sent (beta) | bytes added (gamma) | for"),
        rows,
        "on the critical path; p ranks, n bytes of the whole (gathered) buffer, m segments, lg: logarithm to base 2, "
        "rounded up where p may be any. Thakur et al. 2005, Rabenseifner 2004, Sanders, Speck & Träff 2009. No "
        "all-reduce sends less than 2 n (p-1)/p: `phalanx collectives bound`",
        keys=2,
    )


def _by_formula(op: str, n: float, ranks: int, cluster: ClusterSpec) -> AlgorithmComparison:
    """Price the algorithms by their published formulas, assuming the slowest tier's links between all ranks."""
    tiers = [t for i, t in enumerate(cluster.tiers) if i == 0 or cluster.tiers[i - 1].ranks < ranks]
    links = costs(cluster)
    _, alpha, beta = links.tiers[len(tiers) - 1]
    bound = lower_bound(op, ranks, n, links)

    def priced(algorithm: str, size: float) -> float | None:
        segments = best_segments(op, algorithm, ranks, size, alpha, beta)
        return closed_form(op, algorithm, ranks, size, alpha, beta, links.gamma_s_per_byte, segments)

    rows = []
    for algorithm in ALGORITHMS[op]:
        seconds = priced(algorithm, n)
        if seconds is None:
            continue
        segments = best_segments(op, algorithm, ranks, n, alpha, beta)
        # With α = 1 alone the formula counts messages, with β = 1 alone the bytes sent.
        rounds, sent = (closed_form(op, algorithm, ranks, n, a, b, 0.0, segments) or 0.0 for a, b in ((1, 0), (0, 1)))
        shown = segments if (op, algorithm) in SEGMENTED else None
        rows.append(
            AlgorithmRow(algorithm, shown, round(rounds), sent, seconds, bound, seconds, busbw(op, ranks, n, seconds))
        )
    names = [row.algorithm for row in rows]
    return _comparison(op, rows, lambda size: min(names, key=lambda a: priced(a, size) or math.inf), tiers)


def _pricing(
    op: str, ranks: int, cluster: ClusterSpec, links: LinkCosts, slowest: tuple[float, float]
) -> Callable[[str, float], _SizedSchedule]:
    """Return a function from algorithm and bytes to a schedule in the best number of segments for the slowest link,
    (α in s, β in s per byte)."""
    inner = math.gcd(ranks, cluster.tiers[0].ranks)

    @cache
    def build_schedule(algorithm: str, segments: int) -> _SizedSchedule:
        # One element per chunk; in a double tree, one per segment of each half.
        elements = 2 * segments if (op, algorithm) in SEGMENTED else least_size(algorithm, ranks)
        tiers = (inner, ranks // inner)
        schedule = build(op, algorithm, ranks, elements, tiers=tiers, segments=segments)
        return _SizedSchedule(schedule, segments, elements, Path(schedule, links))

    return lambda algorithm, n: build_schedule(algorithm, best_segments(op, algorithm, ranks, n, *slowest))
