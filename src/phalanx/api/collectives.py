"""Collectives: proved, and compared on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.api.results import Table, table
from phalanx.schedule.collectives import proof
from phalanx.schedule.collectives.compositions import composed
from phalanx.schedule.collectives.registry import build


@dataclass(frozen=True)
class CollectiveProof:
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
    cost = proof.prove(schedule)
    return CollectiveProof(
        op, schedule.algorithm, ranks, cost.rounds, cost.messages, cost.sent / max(1, schedule.size)
    )


def table_of_collectives(
    op: str = "all_reduce", size: str = "100MB", ranks: int = 8, cluster: str = "dgx-h100"
) -> Table:
    """Compare all algorithms of an operation on a cluster, as `phalanx collectives table` does. Raises InputError."""
    from phalanx.planning import question
    from phalanx.planning.tables.collectives import compare
    from phalanx.planning.tables.table import Sheet, columns
    from phalanx.spec.byte_sizes import parse_bytes

    compared = compare(op, parse_bytes(size), ranks, question.cluster_named(cluster)(ranks))
    rows = [(r.algorithm, r.rounds, r.sent_bytes, r.seconds, r.bound) for r in compared.rows]
    names = columns("algorithm", ("rounds", "count"), ("most sent", "bytes"), ("takes", "s"), ("bound", "s"))
    return table(Sheet(f"{op} of {size} over {ranks} ranks of {cluster}", names, rows, "fastest first"))
