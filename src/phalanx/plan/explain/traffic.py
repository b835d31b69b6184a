"""What a rank sends in a step, by axis: operations, payload, bytes on the wire, links, and seconds without overlap.

payload     the buffer of one operation, as nccl-tests counts it: gathered size for all-gather and reduce-scatter
sent        bytes that one rank sends in a step: 2 n (p-1)/p of all-reduce, n (p-1)/p of all-gather,
            reduce-scatter and all-to-all, n of a message: a ring's, whichever algorithm runs
network     the part of `sent` that leaves the node through the rank's own port
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic.step import bucket_bytes
from phalanx.cost.collectives.nccl_model import collective_s, message_s, together
from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger import flow as ledger
from phalanx.cost.ledger.flow import Held
from phalanx.cost.ledger.gradient_flows import Types, gradient_flows
from phalanx.cost.ledger.layer_flows import layer_flows, messages
from phalanx.cost.ledger.rank_layout import Layout
from phalanx.cost.ledger.sharding import sharding
from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.space import of
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@dataclass(frozen=True)
class Flow:
    """One kind of operation over one axis, per rank and step."""

    axis: str
    op: str
    what: str
    """What is sent."""
    ranks: int
    """Group size."""
    tier: str
    """The links that the group spans."""
    count: float
    """Operations of a rank in a step."""
    payload: float
    """Bytes of one operation's buffer."""
    sent: float
    """Bytes that a rank sends in a step."""
    network: float
    """Bytes of `sent` that leave the node."""
    seconds: float
    """Time of all operations of a step, without overlap."""


def flows(pricing: Pricing, s: Strategy) -> list[Flow]:
    """Return what a rank in the middle of the pipeline sends, read from the ledger. Axes of one rank are left out,
    and equal operations of different blocks are one row."""
    shape, profile = pricing.shape, pricing.profile
    layout: Layout = pricing.layout(of([s])).on_nodes(pricing.system.tiers[0].ranks)
    moe, blocks, whole = shape.moe_layers / shape.layers, shape.layers / s.pp, float(s.pp == 1)
    held = Held(blocks * (1 - moe), blocks * moe, whole, whole)
    # Of embedding and head a rank has gradients of at most one, as its price has it.
    reduced = Held(held.dense, held.experts, 1.0, whole)
    stride = layout.data_stride(pricing.system.tiers[0].ranks)
    types = Types(profile.gradient_bytes, profile.parameter_bytes, profile.gradient_bytes)
    how = sharding(layout, profile.policy)
    rows = [
        *layer_flows(shape, layout, profile.policy),
        *gradient_flows(shape, layout, how, types, reduced, stride, bucket_bytes(layout, profile)),
        messages(shape, layout, profile.policy, layout.virtual),
    ]
    merged: dict[tuple[str, str, str, float], list[tuple[ledger.Flow, float]]] = {}
    for row in rows:
        times = 1.0 if row.unit == "rank" else s.accumulation(pricing.job) * held.of(row.unit)
        count = _number(row.count()) * _number(times)
        if _number(row.ranks) > 1 and count * _number(row.bytes) > 0:
            merged.setdefault((row.axis, row.op, row.what, _number(row.bytes)), []).append((row, count))
    return [
        _flow(
            pricing,
            s,
            axis,
            op,
            what,
            int(_number(same[0][0].ranks)),
            int(_number(same[0][0].stride)),
            sum(n for _, n in same),
            size,
        )
        for (axis, op, what, size), same in merged.items()
    ]


def _number(column: Column) -> float:
    """Return the number of a column of one row."""
    return float(np.max(column))


def _flow(
    pricing: Pricing, s: Strategy, axis: str, op: str, what: str, ranks: int, stride: int, count: float, n: float
) -> Flow:
    system, inner = pricing.system, pricing.system.tiers[0]
    if op == "send":
        sent, network = n, n if stride >= inner.ranks else 0.0
        if axis == "ring":
            # Only the last rank of a node sends to another one.
            network = n / max(1, int(together(ranks, stride, inner)))
        seconds = message_s(n, stride, system)
    else:
        per_node = int(together(ranks, stride, inner))
        nodes = -(-ranks // per_node)
        sent = SENT[op] * n * (ranks - 1) / ranks
        network = SENT[op] * n * (nodes - 1) / nodes / (1 if op == "all_to_all" else per_node)
        seconds = collective_s(op, n, ranks, stride, system)
    return Flow(
        axis=axis,
        op=op,
        what=what,
        ranks=ranks,
        tier=_tier(pricing, s, axis, ranks, stride),
        count=count,
        payload=n,
        sent=count * sent,
        network=count * network,
        seconds=float(np.asarray(seconds)) * count,
    )


def _tier(pricing: Pricing, s: Strategy, axis: str, ranks: int, stride: int) -> str:
    """Name the innermost tier of links that spans every group."""
    reach = (2 if axis == "pp" else ranks) * stride
    if axis in ("tp", "cp", "ring", "ulysses"):
        return mesh(s).tier("cp" if axis in ("ring", "ulysses") else axis, pricing.cluster).name
    tiers = pricing.cluster.tiers
    return next((t.name for t in tiers if reach <= t.ranks), tiers[-1].name)


def term_of(axis: str) -> str:
    """Return the term of a step that holds an axis's exposed communication; some axes share one."""
    return {"ring": "cp", "ulysses": "cp", "edp": "dp", "pp": "transfers"}.get(axis, axis)
