"""The price of a collective schedule: its critical path in the port model, and a lower bound for any schedule.

Port model: a rank sends at most one message and receives at most one at a time, full duplex. A message of n bytes
takes α + n β of the link between its two ranks, and n γ more where it is added. It starts when both ports are free
and its data is there; rounds order a port's messages, and nothing else waits for a round to end.

Shared links: a message that leaves a host passes its uplink and the other host's downlink, n bytes in n / bandwidth.
Each link serves one round after the other, and within a round first come, first served. Messages are forwarded as
they arrive (cut-through), so k equal messages at once take as long as one of k times the size.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from phalanx.schedule.collectives.ir import Ints, Schedule, atoms, boundaries
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError

Floats = npt.NDArray[np.float64]
_CELLS = 60_000_000  # (rank, chunk) times kept at once, at most


@dataclass(frozen=True)
class LinkCosts:
    """The links of a cluster. `tiers`, innermost first: (ranks that it joins, α in s, β in s per byte). γ in s per
    byte added. `shared`, innermost first: (neighbouring ranks that share an uplink, its β in s per byte)."""

    tiers: tuple[tuple[int, float, float], ...]
    gamma_s_per_byte: float = 0.0
    shared: tuple[tuple[int, float], ...] = ()

    def links(self, a: Ints, b: Ints) -> tuple[Floats, Floats]:
        """Return α and β of the innermost tier that joins each pair of ranks (a[i], b[i])."""
        _, alpha_last, beta_last = self.tiers[-1]
        alpha, beta = np.full(len(a), alpha_last), np.full(len(a), beta_last)
        for ranks, alpha_s, beta_s in reversed(self.tiers[:-1]):
            near = a // ranks == b // ranks
            alpha[near], beta[near] = alpha_s, beta_s
        return alpha, beta


def costs(cluster: ClusterSpec) -> LinkCosts:
    """Return the costs of a cluster; γ as measured, else two reads and a write at the device's memory bandwidth."""
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
    return LinkCosts(tuple(tiers), gamma, tuple(shared))


def seconds(s: Schedule, element_bytes: float, links: LinkCosts) -> float:
    """Return seconds until the last rank has finished. Raises InputError for schedules too large to follow."""
    return Path(s, links).seconds(element_bytes)


@dataclass(frozen=True)
class _Round:
    """A round without its times: messages by `sender` and their `target`, and the atoms that their transfers move."""

    sender: Ints
    target: Ints
    sent: Floats
    """Elements of each message; `added`: the elements that are added."""
    added: Floats
    alpha: Floats
    beta: Floats
    source: Ints
    """Source, destination and atom of each moved atom, as indices of (rank, atom) times."""
    destination: Ints
    atom: Ints
    adds: npt.NDArray[np.bool_]


class Path:
    """A schedule on the links of a cluster, prepared once for simulation with any number of bytes."""

    def __init__(self, s: Schedule, links: LinkCosts) -> None:
        """Raises InputError for schedules too large to follow."""
        edges = boundaries(s)
        if s.ranks * len(edges) > _CELLS:
            raise InputError(
                "ranks", s.ranks, f"{s.algorithm} {s.op} has too many chunks to follow", "use fewer ranks"
            )
        self._shape, self._links = (s.ranks, max(1, len(edges) - 1)), links
        first = np.searchsorted(s.round, np.arange(s.rounds + 1)).tolist()
        self._rounds = [_round(s, edges, slice(*rows), links) for rows in pairwise(first)]

    def seconds(self, element_bytes: float) -> float:
        """Return seconds until the last rank has finished."""
        ranks = self._shape[0]
        ready = np.zeros(self._shape)
        sends, receives = np.zeros(ranks), np.zeros(ranks)
        queues = _Queues(self._links, ranks)
        for r in self._rounds:
            # The times at which the sent data is ready, and the data to which it is added.
            sent_ready, local_ready = np.zeros(ranks), np.zeros(ranks)
            np.maximum.at(sent_ready, r.source, ready[r.source, r.atom])
            if r.adds.any():
                np.maximum.at(local_ready, r.destination, np.where(r.adds, ready[r.destination, r.atom], 0.0))
            size = r.sent * element_bytes
            start = np.maximum(np.maximum(sends[r.sender], receives[r.target]), sent_ready[r.sender])
            left = queues.passed(r.sender, r.target, start, start + size * r.beta, size)
            sends[r.sender] = r.alpha + left
            arrived = np.maximum(sends[r.sender], local_ready[r.target])
            receives[r.target] = arrived + r.added * element_bytes * self._links.gamma_s_per_byte
            ready[r.destination, r.atom] = np.where(r.adds, receives[r.destination], sends[r.source])
        return float(max(ready.max(initial=0.0), receives.max(initial=0.0)))


def _round(s: Schedule, edges: Ints, rows: slice, links: LinkCosts) -> _Round:
    """Return the round of a schedule's transfers `rows`, whose buffer is cut into atoms at `edges`."""
    source, destination, length, adds = s.source[rows], s.destination[rows], s.length[rows], s.reduces[rows]
    transfer, atom = atoms(edges, s.offset[rows], length)
    # A rank sends one message in a round, of one or more transfers, and receives one.
    receiver = np.full(s.ranks, -1)
    receiver[source] = destination
    sender = np.nonzero(receiver >= 0)[0]
    target = receiver[sender]
    sent, added = np.zeros(s.ranks), np.zeros(s.ranks)  # by sender, and by receiver
    np.add.at(sent, source, length)
    np.add.at(added, destination, length * adds)
    alpha, beta = links.links(sender, target)
    moved = (source[transfer], destination[transfer], atom, adds[transfer])
    return _Round(sender, target, sent[sender], added[target], alpha, beta, *moved)


class _Queues:
    """The shared links of all hosts, with the time until which each is busy."""

    def __init__(self, links: LinkCosts, ranks: int) -> None:
        up = [(below, beta, np.zeros(-(-ranks // below))) for below, beta in links.shared]
        down = [(below, beta, np.zeros(-(-ranks // below))) for below, beta in reversed(links.shared)]
        self.path = [(True, *link) for link in up] + [(False, *link) for link in down]

    def passed(self, source: Ints, destination: Ints, head: Floats, tail: Floats, size: Floats) -> Floats:
        """Return the times at which the last byte of each message has passed all shared links. `head`, `tail`: the
        times at which its first and its last byte could leave; changed in place."""
        for up, below, beta, free in self.path:
            out = np.nonzero(source // below != destination // below)[0]
            if len(out):
                link = (source if up else destination)[out] // below
                head[out] = _in_turn(link, head[out], size[out] * beta, free)
                tail[out] = np.maximum(tail[out], head[out] + size[out] * beta)
        return tail


def _in_turn(link: Ints, head: Floats, work: Floats, free: Floats) -> Floats:
    """Return the time at which each message starts on its link, first come, first served. `free`: the time from which
    each link is free; advanced in place."""
    order = np.lexsort((head, link))
    place = np.arange(len(order)) - np.searchsorted(link[order], link[order])  # in its link's queue
    start = head.copy()
    for k in range(int(place.max()) + 1):
        turn = order[place == k]
        start[turn] = np.maximum(head[turn], free[link[turn]])
        free[link[turn]] = start[turn] + work[turn]
    return start


def lower_bound(op: str, p: int, n: float, links: LinkCosts) -> float:
    """Return a lower bound in seconds on every schedule for n bytes on these links: the largest of ceil(lg p) α,
    since each round at best doubles the ranks that have the data; the least bytes through some rank's port, over the
    fastest link; and the least bytes that must enter or leave some host, over all its ports together or over their
    shared uplink."""
    if p == 1:
        return 0.0
    alpha = min(a for _, a, _ in links.tiers)
    beta = min(b for _, _, b in links.tiers)
    bound = max(math.ceil(math.log2(p)) * alpha, _crossing(op, p, 1) * n * beta)
    for i, (ranks, _, _) in enumerate(links.tiers[:-1]):
        if ranks < p:
            outer = min(b for _, _, b in links.tiers[i + 1 :])
            bound = max(bound, _crossing(op, p, ranks) * n * outer / ranks)
    for ranks, uplink_beta in links.shared:
        if ranks < p:
            bound = max(bound, _crossing(op, p, ranks) * n * uplink_beta)
    return bound


def _crossing(op: str, p: int, q: int) -> float:
    """Return the bytes, as a share of the n of the buffer, that at least one host of q ranks (the last may have
    fewer) must send or must receive."""
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
