"""Table of a strategy's traffic in a step: by the formulas of a stack, or from our own runtime's program."""

from collections.abc import Callable

from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.explain.exact import ExactSubject
from phalanx.planning.explain.program_traffic import program_flows
from phalanx.planning.explain.traffic import TrafficRow, job_flows, term_of
from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS


def sheet(x: AnalyticSubject) -> Sheet:
    """Tabulate the operations of a strategy in a step by kind: for a rank, and for the job."""
    rows = []
    for row in job_flows(x.pricing, x.strategy):
        f = row.flow
        hidden = x.hidden(f.axis) if f in x.flows else None
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
        stacked=("sent",),
        charted=False,
        keys=3,
    )


def overlap_sheet(x: AnalyticSubject) -> Sheet:
    """Tabulate the share of each axis's communication that other work covers, and why not more."""
    rows = []
    for term in dict.fromkeys(term_of(f.axis) for f in x.flows):
        same = [f for f in x.flows if term_of(f.axis) == term]
        alone_s = sum(f.seconds for f in same)
        if alone_s and term in _COVERED:
            axes, hidden = list(dict.fromkeys(f.axis for f in same)), x.hidden(same[0].axis)
            exposed_s = sum(x.exposed_seconds(axis) for axis in axes)
            rows.append((", ".join(axes), exposed_s, alone_s * hidden, hidden, _COVERED[term](x)))
    heads = columns("axis | exposed [s] | covered [s] | hidden [share] | what can cover it")
    return Sheet("what other work covers of it", heads, rows, stacked=("exposed", "covered"), charted=False)


def _covers_tp(x: AnalyticSubject) -> str:
    if x.pricing.profile.tp_overlap:
        what = (
            f"{x.pricing.stack} cuts products in parts, and overlaps a part with the next one's rows, inside a node"
        )
    elif x.hidden("tp"):
        what = "products of weights' gradients; nothing in the forward pass, where a product waits for its rows"
    else:
        what = "nothing: a product waits for its rows, and the next layer for its sum"
    again = x.repeated_s
    return what + (f"; {again:.3g} s of what is exposed is in predict's recomputation" if again else "")


def _covers_dp(x: AnalyticSubject) -> str:
    profile, s = x.pricing.profile, x.strategy
    if not profile.dp_overlap and not profile.gather_overlap:
        return "nothing: gradients reduce after the backward pass"
    if ZERO_LEVELS[s.zero].parameters:
        return "the passes of the units before, which gathers run ahead of; after them nothing is left to cover it"
    micro_batches = x.pricing.job.global_batch // (s.micro_batch * s.dp)
    if micro_batches == 1:
        return "the rest of the backward pass, bucket by bucket; parameters: the next forward pass"
    of = f"1 of {micro_batches} micro-batches"
    return f"the last backward pass, {of}: gradients are complete only there; parameters: the next forward pass"


def _covers_pp(x: AnalyticSubject) -> str:
    if x.strategy.virtual > 1:
        return "the compute of a rank's other chunks"
    return "nothing: a stage has nothing else to do before its input comes"


def _covers_ep(x: AnalyticSubject) -> str:
    if x.pricing.profile.overlaps_experts:
        return "the compute of another micro-batch"
    return "as published runs of this stack show; in itself nothing, for experts wait for their tokens"


_COVERED: dict[str, Callable[[AnalyticSubject], str]] = {
    "tp": _covers_tp,
    "dp": _covers_dp,
    "transfers": _covers_pp,
    "cp": lambda x: "attention over the keys and values that came before",
    "ep": _covers_ep,
}
"""What covers the communication of a term, if anything."""


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
        stacked=("sent",),
        charted=False,
        keys=2,
    )
