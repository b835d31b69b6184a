"""What a rank sends in a step, by axis: operations, payload, bytes on the wire, links, and seconds without overlap.

payload     the buffer of one operation, as nccl-tests counts it: gathered size for all-gather and reduce-scatter
sent        bytes that one rank sends in a step: 2 n (p-1)/p of all-reduce, n (p-1)/p of all-gather,
            reduce-scatter and all-to-all, n of a message: a ring's, whichever algorithm runs
network     the part of `sent` that leaves the node through the rank's own port
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.cost.collectives.nccl_model import collective_s, message_s, together
from phalanx.cost.ledger.rank_layout import Layout
from phalanx.cost.ledger.sharding import sharding
from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.space import of
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


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
    """Return what a rank in the middle of the pipeline sends; axes of one rank are left out."""
    return [flow for flow in _all(pricing, s) if flow.ranks > 1 and flow.payload > 0]


def _all(pricing: Pricing, s: Strategy) -> Iterator[Flow]:
    shape, profile = pricing.shape, pricing.profile
    layout: Layout = pricing.layout(of([s]))
    m = s.accumulation(pricing.job)
    blocks = shape.layers / s.pp
    forwards = 1 + float(layout.full[0])  # forward passes of a block, recomputation included
    moe, how = shape.moe_layers / shape.layers, sharding(layout, profile.policy)
    tokens = float(layout.tokens[0])
    e = layout.activation_bytes
    hidden = tokens * shape.hidden * e
    per_step = m * blocks
    tp_stride, cp_stride = (int(np.ravel(distance)[0]) for distance in (layout.tp_stride, layout.cp_stride))

    def flow(axis: str, op: str, what: str, ranks: int, stride: int, count: float, n: float) -> Flow:
        return _flow(pricing, s, axis, op, what, ranks, stride, count, n)

    if s.sp:
        yield flow("tp", "all_gather", "inputs of layers", s.tp, tp_stride, per_step * 2 * (forwards + 1), hidden)
        yield flow(
            "tp", "reduce_scatter", "outputs of layers", s.tp, tp_stride, per_step * 2 * (forwards + 1), hidden
        )
    else:
        yield flow(
            "tp",
            "all_reduce",
            "outputs of layers, gradients of inputs",
            s.tp,
            tp_stride,
            per_step * 2 * (forwards + 1),
            hidden,
        )
    kv = (shape.heads if shape.kv_rank else shape.kv_heads) * (shape.head_dim + shape.value_dim)
    ring = s.cp // s.ulysses
    hops = per_step * (ring - 1) * (forwards + 2)
    yield flow("ring", "send", "keys and values", ring, cp_stride * s.ulysses, hops, tokens * kv / s.tp * e)
    exchanged = tokens * (shape.heads * (shape.head_dim + shape.value_dim) + kv) / s.tp * e
    yield flow(
        "ulysses", "all_to_all", "heads for tokens", s.ulysses, cp_stride, per_step * (forwards + 1), exchanged
    )
    routed = tokens * shape.top_k * shape.hidden / s.tp * e
    expert_stride = int(np.max(layout.expert_stride))
    yield flow(
        "ep",
        "all_to_all",
        "tokens to experts and back",
        s.ep,
        expert_stride,
        per_step * moe * 2 * (forwards + 1),
        routed,
    )

    dense = ((1 - moe) * shape.block_params + moe * shape.moe_block_params) / s.tp * blocks
    ends = (max(shape.embedding_params, shape.head_params) if s.pp > 1 else shape.ends) / s.tp
    experts = moe * shape.expert_params / (s.ep * s.etp) * blocks
    edp = max(s.dp * s.cp * s.tp // (s.ep * s.etp), 1)
    stride = int(layout.data_stride(pricing.system.tiers[0].ranks)[0])
    parts = [("dp", dense + ends, s.dp * s.cp, stride), ("edp", experts, edp, s.ep * expert_stride)]
    for axis, params, ranks, between in parts:
        shards = min(s.shards, ranks)
        grad, parameters = profile.gradient_bytes * params, profile.parameter_bytes * params
        reductions = m if how.reduces_each > 0 else 1
        gathers = m * (1 + float(how.regathers[0])) if how.gathers_each > 0 else 1
        for op, what, among, distance, often, n in (
            ("reduce_scatter", "gradients", shards, between, reductions, grad),
            ("all_gather", "parameters", shards, between, gathers, parameters),
            ("all_reduce", "gradients", ranks // shards, between * shards, 1, grad / shards),
        ):
            buckets = blocks if how.parameters > 0 else max(math.ceil(n / profile.bucket_bytes), 1)
            yield flow(axis, op, what, among, distance, often * buckets, n / buckets)
    stages = int(layout.pp_stride[0])
    yield flow("pp", "send", "activations and their gradients", s.pp, stages, 2 * m * s.virtual, hidden / s.tp)


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
        sent = _SENT[op] * n * (ranks - 1) / ranks
        network = _SENT[op] * n * (nodes - 1) / nodes / (1 if op == "all_to_all" else per_node)
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
