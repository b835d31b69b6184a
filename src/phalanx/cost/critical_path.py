"""What a collective schedule costs: its critical path in the port model, the bounds below it, the published formulas.

Port model: a rank sends at most one message and receives at most one at a time, full duplex. A message of n bytes
takes α + n β of the link between its two ranks, and n γ more where it is added. It starts when both ports are free
and its data is there; rounds order a port's messages, and nothing else waits for a round to end.

Shared links: what leaves a host passes its uplink and the other host's downlink, n bytes in n / bandwidth. Each
serves a round after the other, and within a round who could start first; a message passes on what it has received
(cut-through), so that k equal messages at once take what one of k times the size would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.schedule.collectives.ir import Ints, Schedule, atoms, boundaries
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError

Floats = npt.NDArray[np.float64]
_CELLS = 60_000_000  # of rank x chunk times that are kept at once


@dataclass(frozen=True)
class Costs:
    """Tiers from the innermost: how many ranks each joins, its α (s) and β (s per byte); γ in s per byte added.

    `shared`: from the innermost, how many neighbouring ranks have one uplink together, and its β (s per byte).
    """

    tiers: tuple[tuple[int, float, float], ...]
    gamma_s_per_byte: float = 0.0
    shared: tuple[tuple[int, float], ...] = ()

    def links(self, a: Ints, b: Ints) -> tuple[Floats, Floats]:
        """α and β of the innermost tier that joins each pair."""
        _, alpha_last, beta_last = self.tiers[-1]
        alpha, beta = np.full(len(a), alpha_last), np.full(len(a), beta_last)
        for ranks, alpha_s, beta_s in reversed(self.tiers[:-1]):
            near = a // ranks == b // ranks
            alpha[near], beta[near] = alpha_s, beta_s
        return alpha, beta


def costs(cluster: ClusterSpec) -> Costs:
    """The links of a cluster; γ as measured, else two reads and a write at the device's memory bandwidth."""
    tiers = [(t.ranks, t.latency_s, 1 / t.bandwidth_bytes_per_s_per_gpu_per_direction) for t in cluster.tiers]
    below = [1, *(t.ranks for t in cluster.tiers)]
    shared = [
        (ranks, 1 / t.uplink_bandwidth_bytes_per_s_per_direction)
        for ranks, t in zip(below, cluster.tiers, strict=False)
        if t.uplink_bandwidth_bytes_per_s_per_direction is not None
    ]
    gamma = cluster.device.gamma_s_per_byte
    if gamma is None:
        gamma = 3 / cluster.device.memory_bandwidth_bytes_per_s
    return Costs(tuple(tiers), gamma, tuple(shared))


def seconds(s: Schedule, element_bytes: float, given: Costs) -> float:
    """Time from the start until the last rank has its end. Raises InputError for schedules too large to follow."""
    edges = boundaries(s)
    if s.ranks * len(edges) > _CELLS:
        raise InputError("--ranks", s.ranks, f"{s.algorithm} {s.op} has too many chunks to follow", "use fewer ranks")
    ready = np.zeros((s.ranks, max(1, len(edges) - 1)))
    sends, receives = np.zeros(s.ranks), np.zeros(s.ranks)
    queues = _Queues(given, s.ranks)
    first = np.searchsorted(s.round, np.arange(s.rounds + 1)).tolist()
    for number in range(s.rounds):
        rows = slice(first[number], first[number + 1])
        source, destination, length, adds = s.source[rows], s.destination[rows], s.length[rows], s.reduces[rows]
        row, atom = atoms(edges, s.offset[rows], length)
        # A rank sends one message in a round, of one or more transfers, and receives one.
        receiver = np.full(s.ranks, -1)
        receiver[source] = destination
        sender = np.nonzero(receiver >= 0)[0]
        to = receiver[sender]
        size, added = np.zeros(s.ranks), np.zeros(s.ranks)  # bytes by sender, and bytes to be added by receiver
        np.add.at(size, source, length * element_bytes)
        np.add.at(added, destination, length * adds * element_bytes)
        there, mine = np.zeros(s.ranks), np.zeros(s.ranks)  # what is sent, and what it is added to
        np.maximum.at(there, source[row], ready[source[row], atom])
        np.maximum.at(mine, destination[row], np.where(adds[row], ready[destination[row], atom], 0.0))
        start = np.maximum(np.maximum(sends[sender], receives[to]), there[sender])
        alpha, beta = given.links(sender, to)
        sends[sender] = alpha + queues.passed(sender, to, start, start + size[sender] * beta, size[sender])
        receives[to] = np.maximum(sends[sender], mine[to]) + added[to] * given.gamma_s_per_byte
        ready[destination[row], atom] = np.where(adds, receives[destination], sends[source])[row]
    return float(max(ready.max(initial=0.0), receives.max(initial=0.0)))


class _Queues:
    """The shared links of all hosts: until when each is busy."""

    def __init__(self, given: Costs, ranks: int) -> None:
        up = [(below, beta, np.zeros(-(-ranks // below))) for below, beta in given.shared]
        down = [(below, beta, np.zeros(-(-ranks // below))) for below, beta in reversed(given.shared)]
        self.path = [(True, *link) for link in up] + [(False, *link) for link in down]

    def passed(self, source: Ints, destination: Ints, head: Floats, tail: Floats, size: Floats) -> Floats:
        """When the last byte of each message is through, of those whose first one could leave at `head` and whose
        last one at `tail`."""
        for up, below, beta, free in self.path:
            out = np.nonzero(source // below != destination // below)[0]
            if len(out):
                link = (source if up else destination)[out] // below
                head[out] = _in_turn(link, head[out], size[out] * beta, free)
                tail[out] = np.maximum(tail[out], head[out] + size[out] * beta)
        return tail


def _in_turn(link: Ints, head: Floats, work: Floats, free: Floats) -> Floats:
    """When each message's turn comes on its link: first come, first served. `free`, by link, moves on."""
    order = np.lexsort((head, link))
    place = np.arange(len(order)) - np.searchsorted(link[order], link[order])  # in its link's queue
    begin = head.copy()
    for k in range(int(place.max()) + 1):
        turn = order[place == k]
        begin[turn] = np.maximum(head[turn], free[link[turn]])
        free[link[turn]] = begin[turn] + work[turn]
    return begin


def lower_bound(op: str, p: int, n: float, given: Costs) -> float:
    """No schedule is faster on these links, for n bytes. The larger of: ceil(lg p) α, as what is known doubles at
    best; the least bytes of some rank's port over the fastest link; and the least bytes that must enter or leave
    some host, over all its ports together or over the uplink that they share."""
    if p == 1:
        return 0.0
    alpha = min(a for _, a, _ in given.tiers)
    beta = min(b for _, _, b in given.tiers)
    bound = max(math.ceil(math.log2(p)) * alpha, _crossing(op, p, 1) * n * beta)
    for i, (ranks, _, _) in enumerate(given.tiers[:-1]):
        if ranks < p:
            outer = min(b for _, _, b in given.tiers[i + 1 :])
            bound = max(bound, _crossing(op, p, ranks) * n * outer / ranks)
    for ranks, shared in given.shared:
        if ranks < p:
            bound = max(bound, _crossing(op, p, ranks) * n * shared)
    return bound


def _crossing(op: str, p: int, q: int) -> float:
    """Bytes, over the n of the buffer, that at least one of the hosts of q ranks (the last perhaps of fewer) must
    send or must receive."""
    hosts = math.ceil(p / q)
    return {
        "broadcast": 1.0,
        "reduce": 1.0,
        "scatter": (p - q) / p,
        "gather": (p - q) / p,
        "all_gather": (hosts - 1) / hosts,
        "reduce_scatter": (hosts - 1) / hosts,
        "all_reduce": 2 * (hosts - 1) / hosts,
        "all_to_all": q * (p - q) / p,
        "barrier": 0.0,
    }[op]


def best_segments(op: str, algorithm: str, p: int, n: float, alpha: float, beta: float) -> int:
    """The power of two nearest to the number of segments that is best for n bytes over p ranks: where the algorithm
    takes (c + d m)(α + n β / e m), that is m = sqrt(c n β / (d e α)). At most 1,024."""
    if (op, algorithm) == ("broadcast", "chain"):
        fixed, per, parts = p - 2, 1, 1
    elif (op, algorithm) == ("all_reduce", "double_tree"):
        fixed, per, parts = 4 * math.ceil(math.log2(p)) - 4, 4, 2
    else:
        return 1
    if fixed <= 0 or n <= 0 or beta <= 0:
        return 1
    best = math.log2(fixed * n * beta / (per * parts * alpha)) / 2 if alpha > 0 else 10
    return int(2 ** min(10, max(0, round(best))))


_POWERS = {("all_gather", "doubling"), ("reduce_scatter", "halving"), ("all_to_all", "bruck")}


def closed_form(
    op: str, algorithm: str, p: int, n: float, alpha: float, beta: float, gamma: float, segments: int = 8
) -> float | None:
    """The published formula (s) for n bytes, where p, or the pieces that a pipeline cuts, divide n. None where there
    is none: for hierarchies, and where it wants what is not so, such as p a power of two. Sources: Thakur et al.
    2005, Rabenseifner 2004; MPICH's file comments; Sanders, Speck & Träff 2009, see `_double_tree`."""
    lg = math.ceil(math.log2(p))
    m = 1 << (p.bit_length() - 1)
    if m != p and (op, algorithm) in _POWERS:
        return None
    part = n * (p - 1) / p
    # Other p: those beyond the power of two m fold into it, and get the result back.
    folded = m.bit_length() - 1
    fold = 0.0 if m == p else 2 * alpha + 2 * n * beta + n * gamma
    table: dict[tuple[str, str], float | None] = {
        ("broadcast", "flat"): (p - 1) * (alpha + n * beta),
        ("broadcast", "binomial"): lg * (alpha + n * beta),
        ("broadcast", "chain"): (p - 2 + segments) * (alpha + n / segments * beta) if p > 1 else 0.0,
        ("broadcast", "scatter_all_gather"): (lg + p - 1) * alpha + 2 * part * beta,
        ("reduce", "flat"): (p - 1) * (alpha + n * beta + n * gamma),
        ("reduce", "binomial"): lg * (alpha + n * beta + n * gamma),
        ("scatter", "flat"): (p - 1) * (alpha + n / p * beta),
        ("scatter", "binomial"): lg * alpha + part * beta,
        ("gather", "flat"): (p - 1) * (alpha + n / p * beta),
        ("gather", "binomial"): lg * alpha + part * beta,
        ("all_gather", "ring"): (p - 1) * alpha + part * beta,
        ("all_gather", "doubling"): lg * alpha + part * beta,
        ("all_gather", "bruck"): lg * alpha + part * beta,
        ("reduce_scatter", "ring"): (p - 1) * alpha + part * (beta + gamma),
        ("reduce_scatter", "pairwise"): (p - 1) * alpha + part * (beta + gamma),
        ("reduce_scatter", "halving"): lg * alpha + part * (beta + gamma),
        ("all_to_all", "pairwise"): (p - 1) * alpha + part * beta,
        ("all_to_all", "bruck"): lg * (alpha + n / 2 * beta),
        ("all_reduce", "naive"): (p - 1) * (2 * alpha + 2 * n * beta + n * gamma),
        ("all_reduce", "binomial"): lg * (2 * alpha + 2 * n * beta + n * gamma),
        ("all_reduce", "doubling"): folded * (alpha + n * beta + n * gamma) + fold,
        ("all_reduce", "double_tree"): _double_tree(p, n, alpha, beta, gamma, segments),
        ("all_reduce", "ring"): 2 * (p - 1) * alpha + part * (2 * beta + gamma),
        ("all_reduce", "rabenseifner"): 2 * folded * alpha + n * (m - 1) / m * (2 * beta + gamma) + fold,
        ("barrier", "dissemination"): lg * alpha,
    }
    return table.get((op, algorithm))


def _double_tree(p: int, n: float, alpha: float, beta: float, gamma: float, k: int) -> float | None:
    """(4 k + 4 lg p - 5)(α + n β / 2k), or 2 hops less if lg p is odd: a rank forwards 4 k pieces of n / 2k, and the
    first goes up lg p edges and down again, waiting its turn (every other round) at nearly each. With k =
    `best_segments` that is 2 n β + 4 lg p α + O(sqrt(lg p α n β)).

    For p a power of two, k > 1, and adding a piece (n γ / 2k) no slower than sending it. Elsewhere None: any other
    p takes less than 4 k + 4 lg p hops, with lg p rounded up.
    """
    if p == 1:
        return 0.0
    if p & (p - 1) or k == 1:
        return None
    lg = p.bit_length() - 1
    hops = 4 * k + 4 * lg - 5 - 2 * (lg % 2) if p > 2 else 2 * k
    adds = 2 * k + 2 * lg - 4 if p > 2 else k
    return hops * (alpha + n / (2 * k) * beta) + adds * n / (2 * k) * gamma
