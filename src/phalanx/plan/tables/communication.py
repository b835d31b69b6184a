"""The table of what a strategy sends in a step."""

from __future__ import annotations

from phalanx.plan.explain.analytic import AnalyticSubject
from phalanx.plan.explain.traffic import term_of
from phalanx.plan.tables.table import Sheet, columns


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
