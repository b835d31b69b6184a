"""Traffic of a rank in a step, by axis: operations, payload, bytes on the wire, links, and seconds without overlap.

payload     the buffer of one operation, as nccl-tests counts it: gathered size for all-gather and reduce-scatter
sent        bytes that one rank sends in a step: 2 n (p-1)/p of all-reduce, n (p-1)/p of all-gather,
            reduce-scatter and all-to-all, n of a message: a ring's, whichever algorithm runs
network     the part of `sent` that leaves the node through the rank's own port
job         bytes that all ranks send: in a pipeline every unit and every boundary between chunks counts once, since
            its inner ranks and its ends differ
"""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic.update import bucket_bytes
from phalanx.cost.collectives.nccl_model import collective_s, message_s, ranks_per_block
from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger import flow as ledger
from phalanx.cost.ledger.flow import UnitCount, some_blocks, whole_model
from phalanx.cost.ledger.gradient_flows import Types, gradient_flows, outer_flows, summed_copies, tied_embedding
from phalanx.cost.ledger.layer_flows import boundaries, layer_flows, messages
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import LayoutColumns
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.strategy_columns import columns_of
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@dataclass(frozen=True)
class TrafficRow:
    """One kind of operation over one axis, per rank and step."""

    axis: str
    op: str
    what: str
    """The data sent, in words."""
    ranks: int
    """Group size."""
    tier: str
    """Tier of links spanned by the group."""
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


@dataclass(frozen=True)
class JobFlow:
    """One kind of operation of a whole job."""

    flow: TrafficRow
    """Traffic of one rank of `where` in a step."""
    where: str
    """The ranks with this traffic."""
    job: float
    """Bytes sent by all ranks of the job; for an operation in several rows, in the first of them."""


def flows(pricing: Pricing, s: Strategy) -> list[TrafficRow]:
    """Return the traffic of a rank that its price covers, from the ledger: layers and messages of a rank in the
    middle of the pipeline, and gradients of one that also holds the embedding or the head (in a V both). Axes of one
    rank are left out, and equal operations of different blocks are one row."""
    return _with_gradients_of(pricing, s, 1.0, 1.0 if _in_a_v(pricing, s) else 0.0)


def _in_a_v(pricing: Pricing, s: Strategy) -> bool:
    """Whether the first rank of the pipeline has the model's first and last chunk."""
    return bool(_number(pricing.layout(columns_of([s])).v_shaped))


def _with_gradients_of(pricing: Pricing, s: Strategy, embed: float, head: float = 0.0) -> list[TrafficRow]:
    """Return the traffic of a rank with the gradients of its blocks, of `embed` embeddings and of `head` heads."""
    shape = pricing.shape
    whole = float(s.pp == 1)
    held = some_blocks(shape.kinds, shape.layers / s.pp, whole, whole)
    reduced = UnitCount(held.blocks, embed, max(head, whole))
    inner, end = _boundaries(pricing, s)
    return _of_rank(pricing, s, held, reduced, inner if s.pp > 2 else end)


def job_flows(pricing: Pricing, s: Strategy) -> list[JobFlow]:
    """Return the traffic of the job: `flows`, and the additional traffic of the first and the last pipeline rank."""
    job = _job_bytes(pricing, s)
    typical = flows(pricing, s)
    head_first = _in_a_v(pricing, s)
    # An inner rank has no gradients of embedding or head. In a V the first rank has both, and the last neither.
    inner = _with_gradients_of(pricing, s, 0.0) if s.pp > 2 or head_first else typical
    rows = []
    for f in typical:
        ends = (f.axis == "pp" and s.pp == 2) or f not in inner
        fullest = "first stage" if head_first and f.axis != "pp" else "both ends"
        ranks = "all ranks" if s.pp == 1 else fullest if ends else "inner ranks" if s.pp > 2 else "each stage"
        rows.append(JobFlow(f, ranks, job.pop((f.axis, f.op, f.what), 0.0)))
    others = "other stages" if head_first else "inner ranks"
    rows += [JobFlow(f, others, 0.0) for f in inner if f not in typical]
    if s.pp == 1:
        return rows
    _, end = _boundaries(pricing, s)
    known = {(f.axis, f.op, f.what, f.payload) for f in typical if f.axis != "pp" or s.pp == 2}
    none = (0.0,) * len(pricing.shape.kinds)
    for ranks, units in (
        ("first stage", UnitCount(none, 1.0, float(head_first))),
        ("last stage", UnitCount(none, 0.0, float(not head_first))),
        ("both ends", UnitCount(none)),
    ):
        nothing = UnitCount(none)
        for f in _of_rank(pricing, s, units, nothing, end if ranks == "both ends" else 0.0, ranks == "both ends"):
            if (f.axis, f.op, f.what, f.payload) not in known:
                rows.append(JobFlow(f, ranks, job.pop((f.axis, f.op, f.what), 0.0)))
    return rows


def _boundaries(pricing: Pricing, s: Strategy) -> tuple[float, float]:
    """Return the number of boundaries between chunks over which an inner rank sends, and an end of the pipeline, on
    average of both directions. With v chunks in turn an end sends one message less; in a V, half as many."""
    layout = pricing.layout(columns_of([s]))
    v = _number(layout.virtual)
    return v, v / 2 if _number(layout.v_shaped) else v - 0.5


def _rows(
    pricing: Pricing, s: Strategy, units: UnitCount, reduced: UnitCount, crossed: float, tied: bool
) -> list[tuple[ledger.Flow, float]]:
    """Return the ledger's flows of a rank that holds `units` and reduces the gradients of `reduced`, with the number
    of times each is issued. `crossed`: boundaries between chunks over which it sends, in each direction; `tied`:
    whether it shares the embedding with the other end."""
    shape, profile = pricing.shape, pricing.profile
    layout: LayoutColumns = pricing.layout(columns_of([s])).on_nodes(pricing.system.tiers[0].ranks)
    stride = layout.data_stride(pricing.system.tiers[0].ranks)
    types = Types(profile.gradient_bytes, profile.parameter_bytes, profile.gradient_bytes)
    how = sharding(layout, profile.policy)
    rows = [
        *layer_flows(shape, layout, profile.policy),
        *gradient_flows(shape, layout, how, types, reduced, stride, bucket_bytes(layout, profile)),
        summed_copies(shape, layout, profile.policy, how, types, reduced),
        *outer_flows(shape, layout, how, types, reduced, bucket_bytes(layout, profile)),
    ]
    if crossed:
        rows.append(messages(shape, layout, profile.policy, crossed))
    if tied:
        rows.append(tied_embedding(shape, layout, how, types))
    m = s.accumulation(pricing.job)
    counted = [(row, _number(row.count()) * (1.0 if row.unit == "rank" else m * units.of(row.unit))) for row in rows]
    return [(row, n) for row, n in counted if _number(row.ranks) > 1 and n * _number(row.bytes) > 0]


def _of_rank(
    pricing: Pricing, s: Strategy, units: UnitCount, reduced: UnitCount, crossed: float, tied: bool = False
) -> list[TrafficRow]:
    """Return the traffic of a rank as `_rows` describes it; equal operations of different blocks are one row."""
    merged: dict[tuple[str, str, str, float], list[tuple[ledger.Flow, float]]] = {}
    for row, count in _rows(pricing, s, units, reduced, crossed, tied):
        merged.setdefault((row.axis, row.op, row.what, _number(row.bytes)), []).append((row, count))
    return [_traffic(pricing, s, same[0][0], sum(n for _, n in same)) for same in merged.values()]


def _job_bytes(pricing: Pricing, s: Strategy) -> dict[tuple[str, str, str], float]:
    """Return the bytes sent by all ranks, by axis, operation and kind of data: the sum over one rank of each stage,
    times the ranks of a stage."""
    shape = pricing.shape
    whole = whole_model(shape.kinds)
    result: dict[tuple[str, str, str], float] = {}
    for row, count in _rows(
        pricing, s, whole, whole, _number(boundaries(pricing.layout(columns_of([s])))), tied=True
    ):
        p = _number(row.ranks)
        both = 2.0 if row.axis == "embed" else 1.0  # the first and the last rank send it
        sent = both * _number(row.bytes) * (1.0 if row.op == "send" else SENT[row.op] * (p - 1) / p)
        key = (row.axis, row.op, row.what)
        result[key] = result.get(key, 0.0) + count * sent * s.world / s.pp
    return result


def _number(column: Column) -> float:
    """Return the number in a column of one row."""
    return float(np.max(column))


def _traffic(pricing: Pricing, s: Strategy, flow: ledger.Flow, count: float) -> TrafficRow:
    """Return the traffic of `count` operations of a flow in a step."""
    axis, op, n = flow.axis, flow.op, _number(flow.bytes)
    ranks, stride = int(_number(flow.ranks)), int(_number(flow.stride))
    system, inner = pricing.system, pricing.system.tiers[0]
    if op == "send":
        sent, network = n, n if stride >= inner.ranks else 0.0
        if axis == "ring":
            # Only the last rank of a node sends to another one.
            network = n / max(1, int(ranks_per_block(ranks, stride, inner)))
        seconds = message_s(n, stride, system, _number(flow.chain))
    else:
        per_node = int(ranks_per_block(ranks, stride, inner))
        nodes = -(-ranks // per_node)
        sent = SENT[op] * n * (ranks - 1) / ranks
        network = SENT[op] * n * (nodes - 1) / nodes / (1 if op == "all_to_all" else per_node)
        seconds = collective_s(op, n, ranks, stride, system)
    return TrafficRow(
        axis=axis,
        op=op,
        what=flow.what,
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
    """Return the name of the step's term that has an axis's exposed communication; some axes share one."""
    return {"ring": "cp", "ulysses": "cp", "edp": "dp", "etp": "ep", "pp": "transfers"}.get(axis, axis)
