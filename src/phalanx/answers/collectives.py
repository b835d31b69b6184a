"""Collectives: proved, and compared on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.answers.answer import Answer
from phalanx.answers.tables import Tables
from phalanx.planning.lookup import cluster_on
from phalanx.planning.tables.collectives import compare
from phalanx.planning.tables.table import Sheet, columns
from phalanx.schedule.collectives import proof
from phalanx.schedule.collectives.compositions import composed
from phalanx.schedule.collectives.ir import Schedule
from phalanx.schedule.collectives.registry import build
from phalanx.spec.byte_sizes import parse_bytes
from phalanx.spec.cluster.spec import ClusterSpec


@dataclass(frozen=True)
class CollectiveProof(Answer):
    """A proved collective: every rank ends with each contribution exactly once, and nothing deadlocks."""

    op: str
    algorithm: str
    ranks: int
    rounds: int
    messages: int
    sent_share: float
    """What the rank that sends most sends, over the bytes of the buffer."""


def prove(
    op: str, algorithm: str | None = None, ranks: int = 4, *, composition: str | None = None
) -> CollectiveProof:
    """Prove an algorithm, or a composition such as "reduce_scatter+all_gather", over `ranks` ranks.

    Raises InputError for an unknown one, Unproved with rank, chunk and round if it is wrong."""
    if composition is not None:
        schedule = composed(op, composition, ranks, ranks)
    else:
        schedule = build(op, str(algorithm), ranks, ranks)
    return proof_of(schedule)


def proof_of(schedule: Schedule) -> CollectiveProof:
    """Prove a schedule. Raises Unproved with rank, chunk and round if it is wrong."""
    cost = proof.prove(schedule)
    share = cost.sent / max(1, schedule.size)
    return CollectiveProof(schedule.op, schedule.algorithm, schedule.ranks, cost.rounds, cost.messages, share)


def collectives(
    op: str = "all_reduce", size: str = "100MB", ranks: int = 8, cluster: str | ClusterSpec = "dgx-h100"
) -> Tables:
    """Compare all algorithms of an operation on a cluster: rounds, bytes, time, lower bound. Raises InputError."""
    on = cluster_on(cluster)(ranks)
    compared = compare(op, parse_bytes(size), ranks, on)
    rows = [(r.algorithm, r.rounds, r.sent_bytes, r.seconds, r.bound) for r in compared.rows]
    names = columns("algorithm", ("rounds", "count"), ("most sent", "bytes"), ("takes", "s"), ("bound", "s"))
    return Tables(None, (Sheet(f"{op} of {size} over {ranks} ranks of {on.name}", names, rows, "fastest first"),))
