"""Collectives shown round by round, proved, compared on a cluster, and measured on this machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.answers.answer import DRAWN, Answer
from phalanx.answers.machine.this_machine import Announce
from phalanx.answers.tables import require_positive
from phalanx.planning.lookup import cluster_named, require_counts
from phalanx.planning.tables.collectives import AlgorithmComparison, cluster_of_links, compare
from phalanx.progress import in_progress
from phalanx.schedule.collectives import proof
from phalanx.schedule.collectives.compositions import compose_operations
from phalanx.schedule.collectives.gossip import fewest_messages
from phalanx.schedule.collectives.ir import Schedule, atoms
from phalanx.schedule.collectives.registry import build, least_size, sweep, sweep_size, two_tiers
from phalanx.spec.byte_sizes import parse_bytes
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit
from phalanx.spec.errors import InputError

MOST_DRAWN = 26
"""The most ranks whose contributions are drawn, a letter for each."""
_MOST_CHUNKS = 128
"""The most chunks of a file's algorithm that are drawn."""
MOST_PROVED = 33


@dataclass(frozen=True)
class CollectiveProof(Answer):
    """A proved collective: every rank ends with each contribution exactly once, and nothing deadlocks."""

    op: str
    algorithm: str
    ranks: int
    rounds: int
    messages: int
    sent_share: float
    """Bytes sent by the rank that sends most, over the bytes of its buffer."""


@dataclass(frozen=True)
class Sent:
    """A chunk that one rank sends to another, which `adds` it to its own or keeps it."""

    source: int
    destination: int
    chunk: int
    adds: bool


@dataclass(frozen=True)
class CollectiveRound:
    """A round: the chunks sent, and then, `holds[rank][chunk]`, the ranks whose contributions a chunk has. Round 0 is
    the start."""

    round: int
    sends: tuple[Sent, ...]
    holds: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class CollectiveSteps(Answer):
    """An algorithm, round by round."""

    op: str
    algorithm: str
    ranks: int
    rounds: tuple[CollectiveRound, ...]
    schedule: Schedule = field(metadata=DRAWN)
    node: int = field(metadata=DRAWN)
    """Ranks of a node in a hierarchical algorithm, else 0."""


@dataclass(frozen=True)
class ProofCount(Answer):
    """All schedules of 1 to `max_ranks` ranks: how many there are, and which are refused and why."""

    schedules: int
    refused: tuple[str, ...]
    passed: bool
    max_ranks: int


@dataclass(frozen=True)
class AllReduceBound(Answer):
    """The fewest messages that an all-reduce needs. `sent_share`: bytes that some rank sends at least, over the
    buffer's bytes; `states`: number that fewer messages can reach, in none of which an element is complete."""

    ranks: int
    messages: int
    sent_share: float
    states: int


@dataclass(frozen=True)
class CollectiveComparison(AlgorithmComparison, Answer):
    """All algorithms of an operation on a cluster, for a buffer of `size`."""

    rows_of = "rows"
    op: str
    size: str
    ranks: int
    cluster: str


@dataclass(frozen=True)
class MeasuredWay:
    """A measured transport and algorithm, with its seconds for the buffer."""

    way: str
    seconds: float
    fit: CollectiveFit


@dataclass(frozen=True)
class CollectiveMeasurement(Answer):
    """A collective between ranks of this machine: every way to execute it, and which serves which size."""

    op: str
    ranks: int
    size_bytes: int
    rows: tuple[MeasuredWay, ...]
    choices: tuple[Choice, ...]


def show(
    op: str,
    algorithm: str | None = None,
    ranks: int = 4,
    root: int = 0,
    *,
    node: int | None = None,
    composition: str | None = None,
) -> CollectiveSteps:
    """Return the rounds of an algorithm, or of a composition such as "reduce_scatter+all_gather". `node`: ranks of a
    node, in a hierarchical algorithm. Raises InputError."""
    if ranks > MOST_DRAWN:
        raise InputError("ranks", ranks, "is too many to draw", f"use at most {MOST_DRAWN}")
    if node is not None and algorithm != "hierarchical":
        raise InputError("node", node, f"is nothing that {algorithm or composition} knows", "show hierarchical")
    if composition is None:
        size = least_size(str(algorithm), ranks)
        if size > _MOST_CHUNKS:
            reason = f"has {size:,} chunks, too many to draw"
            raise InputError("algorithm", algorithm, reason, "phalanx collectives prove takes it")
        schedule = build(op, str(algorithm), ranks, size, root, tiers=two_tiers(ranks, node))
    elif ranks < 1:
        raise InputError("ranks", ranks, "must be at least 1")
    else:
        schedule = compose_operations(op, composition, ranks, ranks, root)
    inside = two_tiers(ranks, node)[0] if algorithm == "hierarchical" else 0
    return CollectiveSteps(op, str(composition or algorithm), ranks, tuple(_rounds(schedule)), schedule, inside)


def _rounds(schedule: Schedule) -> Iterator[CollectiveRound]:
    symbolic = proof.run(schedule)
    for number, counts in symbolic.states():
        rows = np.nonzero(schedule.round == number - 1)[0]
        row, chunk = atoms(symbolic.edges, schedule.offset[rows], schedule.length[rows])
        fields = (schedule.source[rows][row], schedule.destination[rows][row], chunk, schedule.reduces[rows][row])
        sends = tuple(Sent(*values) for values in zip(*(c.tolist() for c in fields), strict=True))
        holds = tuple(tuple(tuple(np.nonzero(c)[0].tolist()) for c in of_rank) for of_rank in counts)
        yield CollectiveRound(number, sends, holds)


def prove_all(max_ranks: int = MOST_PROVED, announce: Announce = lambda _: None) -> ProofCount:
    """Prove every algorithm for every number of ranks from 1 to `max_ranks`. Raises InputError."""
    if max_ranks < 1:
        raise InputError("max_ranks", max_ranks, "must be at least 1")
    if max_ranks > MOST_PROVED:
        reason = "takes minutes: an algorithm that holds for 1 to 33 ranks has no new case beyond"
        raise InputError("max_ranks", max_ranks, reason, f"use at most {MOST_PROVED}")
    results = list(in_progress(sweep(max_ranks), "schedules proved", announce, sweep_size(max_ranks)))
    refused = tuple(line for line in results if line is not None)
    return ProofCount(len(results), refused, not refused, max_ranks)


def bound(ranks: int = 4) -> AllReduceBound:
    """Search all sequences of messages of a few ranks for the fewest that make an all-reduce. Raises InputError."""
    least = fewest_messages(ranks)
    return AllReduceBound(ranks, least.messages, least.sent_share, least.states)


def prove(
    op: str, algorithm: str | None = None, ranks: int = 4, *, composition: str | None = None
) -> CollectiveProof:
    """Prove an algorithm, or a composition such as "reduce_scatter+all_gather", over `ranks` ranks.

    Raises InputError for an unknown one, Unproved with rank, chunk and round if it is wrong."""
    if composition is not None:
        return proof_of(compose_operations(op, composition, ranks, ranks))
    return proof_of(build(op, str(algorithm), ranks, ranks))


def proof_of(schedule: Schedule) -> CollectiveProof:
    """Prove a schedule. Raises Unproved with rank, chunk and round if it is wrong."""
    cost = proof.prove(schedule)
    share = cost.sent / max(1, schedule.buffer)
    return CollectiveProof(schedule.op, schedule.algorithm, schedule.ranks, cost.rounds, cost.messages, share)


def collectives(
    op: str = "all_reduce",
    size: str = "100MB",
    ranks: int = 8,
    cluster: str | ClusterSpec = "dgx-h100",
    files: Sequence[str] = (),
) -> CollectiveComparison:
    """Compare all algorithms of an operation on a cluster by rounds, bytes, time and lower bound; `files`: further
    algorithms. Raises InputError."""
    require_counts(("ranks", ranks))
    on = cluster if isinstance(cluster, ClusterSpec) else cluster_named(cluster)(ranks)
    compared = compare(op, parse_bytes(size), ranks, on, files)
    return CollectiveComparison(compared.rows, compared.winners, compared.crossovers, op, size, ranks, on.name)


def on_links(
    op: str, size: str, ranks: int, alpha_us: float | None, rate_gb_s: float | None, files: Sequence[str] = ()
) -> CollectiveComparison:
    """Compare all algorithms over links that all have one latency (µs) and rate (GB/s). Raises InputError."""
    if alpha_us is None or rate_gb_s is None:
        raise InputError("rate" if rate_gb_s is None else "alpha", None, "is missing", "give both --alpha and --rate")
    require_counts(("ranks", ranks))
    require_positive(alpha=alpha_us, rate=rate_gb_s)
    return collectives(op, size, ranks, cluster_of_links(ranks, alpha_us * 1e-6, rate_gb_s * 1e9), files)


def measure_collective(op: str, size: str, ranks: int, announce: Announce = lambda _: None) -> CollectiveMeasurement:
    """Measure a collective between ranks of this machine. Raises InputError."""
    from phalanx.answers.machine.measure import local_collectives

    n = int(parse_bytes(size))
    fits, choices = local_collectives(op, ranks, announce)
    rows = (MeasuredWay(fit.way, float(fit.seconds(n)), fit) for fit in fits)
    return CollectiveMeasurement(op, ranks, n, tuple(rows), tuple(choices))
