"""Table of a strategy's traffic in a step: by the formulas of a stack, or from our own runtime's program."""

from __future__ import annotations

from dataclasses import replace

from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.explain.exact import ExactSubject
from phalanx.planning.explain.program_traffic import program_flows
from phalanx.planning.explain.traffic import TrafficRow, flows, job_flows, term_of
from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.cluster.spec import ClusterSpec


def sheet(x: AnalyticSubject) -> Sheet:
    """Tabulate each kind of operation of a strategy in a step: for a rank, and for the job."""
    rows = []
    seconds_of_term: dict[str, float] = {}
    # The exposed part is known by term: divide it over the operations that share the term.
    for f in x.flows:
        seconds_of_term[term_of(f.axis)] = seconds_of_term.get(term_of(f.axis), 0.0) + f.seconds
    for row in job_flows(x.pricing, x.strategy):
        f = row.flow
        term = term_of(f.axis)
        hidden = _hidden(term, x, seconds_of_term[term], f.tier) if f in x.flows else None
        rows.append(
            (
                f.axis,
                f.op,
                f.what,
                row.where,
                f.ranks,
                f.tier,
                f.count,
                f.payload,
                f.sent,
                f.network,
                row.job or None,
                f.seconds,
                hidden,
                _bound(f, x.pricing.cluster),
            )
        )
    # The busiest link is the port of a rank.
    node = x.pricing.cluster.ranks_per_node
    port = sum(f.network for f in x.flows)
    busiest = f"a rank's port, {port / 2**30:.2f} GiB a step, {node * port / 2**30:.2f} a node"
    return Sheet(
        f"what {x.strategy} sends in a step",
        columns(
            "axis | operation | of | by | group [count] | links | times [count] | payload [bytes] "
            "| sent [bytes] | over the network [bytes] | all ranks [bytes] | alone [s] | hidden [share] "
            "| bound by"
        ),
        rows,
        "payload: the buffer of one operation as nccl-tests counts it; sent, over the network: by one rank, "
        "a ring's bytes on the wire; all ranks: what the job sends, once for all rows of an operation; alone: "
        "without overlap; hidden: the part of it that other work covers, over all operations of the axis; bound by "
        "latency where a message (a ring's: the payload over the group) is smaller than n* = alpha x rate of its "
        f"links. Busiest link: {busiest}",
        keys=3,
    )


def _hidden(term: str, x: AnalyticSubject, alone_s: float, tier: str) -> float:
    """Return the share of a term's communication, `alone_s` without overlap, that other work covers. The term of
    expert parallelism also has permutations and waiting, so there it is the stack's covered share of the messages.
    What recomputation sends again is in its own term: it waits as the forward pass does."""
    profile = x.pricing.profile
    if term == "ep" and not profile.overlaps_experts:
        return float(profile.ep_overlap)
    exposed = x.priced.terms.get(term, 0.0)
    if term == "tp" and x.strategy.recompute != "none":
        once = flows(x.pricing, replace(x.strategy, recompute="none"))
        again = alone_s - sum(f.seconds for f in once if term_of(f.axis) == term)
        inside = tier == x.pricing.cluster.tiers[0].name
        exposed += again * (1 - float(profile.tp_overlap) * inside)
    return 1 - min(1.0, exposed / alone_s)


def _bound(f: TrafficRow, cluster: ClusterSpec) -> str:
    """Return whether an operation's messages are bound by "latency" or "bandwidth" on their links."""
    tier = next(t for t in cluster.tiers if t.name == f.tier)
    message = f.payload if f.op == "send" else f.payload / f.ranks
    crossover = tier.latency_s * tier.bandwidth_bytes_per_s_per_gpu_per_direction
    return "latency" if message < crossover else "bandwidth"


def exact_sheet(x: ExactSubject) -> Sheet:
    """Tabulate the collectives and messages of our own runtime's program, by axis and operation."""
    world = x.strategy.world // x.strategy.pp
    rows = [
        (f.axis, f.op, f.ranks, max(f.times), f.payload, max(f.sent), sum(f.sent) * world)
        for f in program_flows(x.model, x.job, x.chosen.strategy)
    ]
    return Sheet(
        f"what {x.strategy} sends in a step",
        columns(
            "axis | operation | group [count] | times [count] | payload [bytes] | sent [bytes] | all ranks [bytes]"
        ),
        rows,
        "payload: the largest buffer of one operation, as nccl-tests counts it; times, sent: by the rank that sends "
        "most, a ring's bytes on the wire; all ranks: what the job sends",
        keys=2,
    )
