"""What a strategy sends in a step, as a table: by the formulas of a stack, or as our own runtime's program has it."""

from __future__ import annotations

from phalanx.cost.step.terms import terms
from phalanx.plan.explain.analytic import AnalyticSubject
from phalanx.plan.explain.exact import ExactSubject
from phalanx.plan.explain.traffic import SENT, term_of
from phalanx.plan.tables.table import Sheet, columns
from phalanx.schedule.layout import Layout


def sheet(x: AnalyticSubject) -> Sheet:
    """Tabulate each kind of operation of a strategy, per rank and step."""
    rows = []
    seconds_of_term: dict[str, float] = {}
    for f in x.flows:
        seconds_of_term[term_of(f.axis)] = seconds_of_term.get(term_of(f.axis), 0.0) + f.seconds
    for f in x.flows:
        term = term_of(f.axis)
        share = min(1.0, x.priced.terms.get(term, 0.0) / seconds_of_term[term])
        visibility = "critical" if share > 0.5 else "hidden" if share < 0.05 else "partly hidden"
        rows.append(
            (
                f.axis,
                f.op,
                f.what,
                f.ranks,
                f.tier,
                f.count,
                f.payload,
                f.sent,
                f.network,
                f.sent * x.strategy.world,
                f.seconds,
                visibility,
            )
        )
    node = x.pricing.cluster.ranks_per_node
    port = sum(f.network for f in x.flows)
    return Sheet(
        f"what {x.strategy} sends in a step",
        columns(
            "axis",
            "operation",
            "of",
            ("ranks", "count"),
            "links",
            ("times", "count"),
            ("payload", "bytes"),
            ("sent", "bytes"),
            ("over the network", "bytes"),
            ("all ranks", "bytes"),
            ("alone", "s"),
            "critical or hidden",
        ),
        rows,
        "payload: the buffer of one operation as nccl-tests counts it; sent, over the network: by one rank, "
        "a ring's bytes on the wire; all ranks: sent x world; alone: without overlap. Busiest link: a rank's "
        f"port, {port / 2**30:.2f} GiB a step, {node * port / 2**30:.2f} a node",
    )


def exact_sheet(x: ExactSubject) -> Sheet:
    """Tabulate the collectives and messages of our own runtime's program, by axis and operation."""
    layout = Layout(x.model, x.job, x.chosen.strategy)
    stages = x.strategy.pp
    ranks: dict[tuple[str, str], int] = {}
    payload: dict[tuple[str, str], int] = {}
    times: dict[tuple[str, str], list[float]] = {}
    sent: dict[tuple[str, str], list[float]] = {}
    for stage, view in enumerate(layout.stage_views()):
        for term in terms(view):
            e = term.event
            if e.kind == "compute" or not term.count or e.op == "recv":
                continue
            key = (e.axis, e.op)
            p = ranks[key] = e.group_size if e.kind == "collective" else 2
            payload[key] = max(payload.get(key, 0), -(-term.bytes // term.count))
            times.setdefault(key, [0.0] * stages)[stage] += term.count
            share = 1.0 if e.kind == "p2p" else SENT.get(e.op, 1.0) * (p - 1) / p
            sent.setdefault(key, [0.0] * stages)[stage] += share * term.bytes
    rows = [
        (*key, ranks[key], max(times[key]), payload[key], max(sent[key]), sum(sent[key]) * x.strategy.world / stages)
        for key in sent
    ]
    return Sheet(
        f"what {x.strategy} sends in a step",
        columns(
            "axis",
            "operation",
            ("ranks", "count"),
            ("times", "count"),
            ("payload", "bytes"),
            ("sent", "bytes"),
            ("all ranks", "bytes"),
        ),
        rows,
        "payload: the largest buffer of one operation, as nccl-tests counts it; times, sent: by the rank that sends "
        "most, a ring's bytes on the wire; all ranks: what the job sends",
    )
