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
