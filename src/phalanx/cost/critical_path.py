"""What a collective schedule costs: its critical path in the port model, and the bounds below it.

Port model: a rank sends at most one message and receives at most one at a time, full duplex. A message of n bytes
takes α + n β of the link between its two ranks, and n γ more where it is added. It starts when both ports are free
and its data is there; rounds order a port's messages, and nothing else waits for a round to end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.schedule.transfers import Schedule
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import InputError

Floats = npt.NDArray[np.float64]
_CELLS = 60_000_000  # of rank x chunk times that are kept at once


@dataclass(frozen=True)
class Costs:
    """Tiers from the innermost: how many ranks each joins, its α (s) and β (s per byte); γ in s per byte added."""

    tiers: tuple[tuple[int, float, float], ...]
    gamma_s_per_byte: float = 0.0

    def links(self, a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """α and β of the innermost tier that joins each pair."""
        _, alpha_last, beta_last = self.tiers[-1]
        alpha, beta = np.full(len(a), alpha_last), np.full(len(a), beta_last)
        for ranks, alpha_s, beta_s in reversed(self.tiers[:-1]):
            near = a // ranks == b // ranks
            alpha[near], beta[near] = alpha_s, beta_s
        return alpha, beta


def costs(cluster: ClusterSpec) -> Costs:
    """The links of a cluster; γ as two reads and a write at the device's memory bandwidth."""
    tiers = [(t.ranks, t.latency_s, 1 / t.bandwidth_bytes_per_s_per_gpu_per_direction) for t in cluster.tiers]
    return Costs(tuple(tiers), 3 / cluster.device.memory_bandwidth_bytes_per_s)


def seconds(s: Schedule, element_bytes: float, given: Costs) -> float:
    """Time from the start until the last rank has its end. Raises InputError for schedules too large to follow."""
    edges = np.unique(np.concatenate([s.offset, s.offset + s.length, np.array([0, s.size])]))
    if s.ranks * len(edges) > _CELLS:
        raise InputError("--ranks", s.ranks, f"{s.algorithm} {s.op} has too many chunks to follow", "use fewer ranks")
    ready = np.zeros((s.ranks, max(1, len(edges) - 1)))
    sends, receives = np.zeros(s.ranks), np.zeros(s.ranks)
    first = np.searchsorted(s.round, np.arange(s.rounds + 1))
    for number in range(s.rounds):
        rows = slice(int(first[number]), int(first[number + 1]))
        source, destination, length = s.source[rows], s.destination[rows], s.length[rows]
        low = np.searchsorted(edges, s.offset[rows])
        count = np.searchsorted(edges, s.offset[rows] + length) - low
        # (transfer, atom) pairs; several transfers of one pair of ranks are one message
        row = np.repeat(np.arange(len(source)), count)
        atom = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
        there = np.zeros(s.ranks)  # by sender: it has one message in a round
        np.maximum.at(there, source[row], ready[source[row], atom])
        size = np.bincount(source, weights=length, minlength=s.ranks)[source] * element_bytes
        alpha, beta = given.links(source, destination)
        start = np.maximum(np.maximum(sends[source], receives[destination]), there[source])
        arrival = start + alpha + size * beta
        done = arrival
        if s.reduces[rows.start]:
            mine = np.zeros(s.ranks)  # by receiver: what it adds to must be there
            np.maximum.at(mine, destination[row], ready[destination[row], atom])
            done = np.maximum(arrival, mine[destination]) + size * given.gamma_s_per_byte
        sends[source], receives[destination] = arrival, done
        ready[destination[row], atom] = done[row]
    return float(max(ready.max(initial=0.0), receives.max(initial=0.0)))


# Bytes that some rank must send or receive, over the n bytes of the buffer; everything needs ceil(lg p) messages
# one after the other (what is known doubles at best).
def _least_bytes(op: str, p: int) -> float:
    whole = {"broadcast": 1.0, "reduce": 1.0, "all_reduce": 2 * (p - 1) / p}
    return whole.get(op, (p - 1) / p)


def lower_bound(op: str, p: int, n: float, given: Costs) -> float:
    """No schedule is faster on these links: the larger of ceil(lg p) α and the least bytes of a rank's port over
    the fastest link, and, where hosts are joined by a slower tier, of one host's least bytes over its links."""
    if p == 1:
        return 0.0
    alpha = min(a for _, a, _ in given.tiers)
    beta = min(b for _, _, b in given.tiers)
    bound = max(math.ceil(math.log2(p)) * alpha, _least_bytes(op, p) * n * beta)
    for (ranks, _, _), (_, _, outer) in zip(given.tiers, given.tiers[1:], strict=False):
        hosts = math.ceil(p / ranks)
        if hosts > 1 and op in ("all_reduce", "all_gather", "reduce_scatter"):
            # all ranks of a host send for it: 2n(h-1)/h (or half of that) shared by `ranks` ports
            bound = max(bound, _least_bytes(op, hosts) * n / ranks * outer)
    return bound


def closed_form(op: str, algorithm: str, p: int, n: float, alpha: float, beta: float, gamma: float) -> float | None:
    """The published formula, for p a power of two where the algorithm wants that and n divisible by p; None where
    there is none. Sources: Thakur et al. 2005; Rabenseifner 2004; MPICH's file comments."""
    lg = math.log2(p) if p > 1 else 0.0
    part = n * (p - 1) / p
    table: dict[tuple[str, str], Any] = {
        ("broadcast", "flat"): (p - 1) * (alpha + n * beta),
        ("broadcast", "binomial"): lg * (alpha + n * beta),
        ("broadcast", "chain"): (p - 2 + 8) * (alpha + n / 8 * beta),
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
        ("all_reduce", "doubling"): lg * (alpha + n * beta + n * gamma),
        ("all_reduce", "ring"): 2 * (p - 1) * alpha + part * (2 * beta + gamma),
        ("all_reduce", "rabenseifner"): 2 * lg * alpha + part * (2 * beta + gamma),
    }
    found = table.get((op, algorithm))
    return None if found is None else float(found)
