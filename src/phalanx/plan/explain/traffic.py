"""What a rank sends in a step, axis by axis: operations, payload, bytes on the wire, links, and how long unhidden.

payload     the buffer of one operation, as nccl-tests counts it (DESIGN: all-gather and reduce-scatter gathered)
sent        bytes that one rank sends in a step: 2 n (p-1)/p of all-reduce, n (p-1)/p of all-gather,
            reduce-scatter and all-to-all, n of a message; the ring's, whatever algorithm serves
network     the part of `sent` that leaves the node through the rank's own port
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic.rank_layout import Layout
from phalanx.cost.collectives.nccl_model import collective_s, message_s, together
from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.space import of
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@dataclass(frozen=True)
class Flow:
    """One kind of operation over one axis. `ranks` of the group, `count` operations of a rank in a step, `payload` of
    one (bytes), `sent` and `network` by a rank in a step (bytes), `seconds` that all take where nothing hides them;
    `tier`: the links that the group spans."""

    axis: str
    op: str
    what: str
    ranks: int
    tier: str
    count: float
    payload: float
    sent: float
    network: float
    seconds: float


def flows(pricing: Pricing, s: Strategy) -> list[Flow]:
    """Of a rank in the middle of the pipeline; nothing of axes of one rank."""
    return [flow for flow in _all(pricing, s) if flow.ranks > 1 and flow.payload > 0]


def _all(pricing: Pricing, s: Strategy) -> Iterator[Flow]:
    shape, profile = pricing.shape, pricing.profile
    layout: Layout = pricing.layout(of([s]))
    m = s.accumulation(pricing.job)
    blocks = shape.layers / s.pp
    again = 1 + float(layout.full[0])  # forward passes
    moe = shape.moe_layers / shape.layers
    tokens = float(layout.tokens[0])
    e = layout.activation_bytes
    hidden = tokens * shape.hidden * e
    each = m * blocks

    def flow(axis: str, op: str, what: str, ranks: int, stride: int, count: float, n: float) -> Flow:
        return _flow(pricing, s, axis, op, what, ranks, stride, count, n)

    if s.sp:
        yield flow("tp", "all_gather", "inputs of layers", s.tp, 1, each * 2 * (again + 1), hidden)
        yield flow("tp", "reduce_scatter", "outputs of layers", s.tp, 1, each * 2 * (again + 1), hidden)
    else:
        yield flow(
            "tp", "all_reduce", "outputs of layers, gradients of inputs", s.tp, 1, each * 2 * (again + 1), hidden
        )
    kv = (shape.heads if shape.kv_rank else shape.kv_heads) * (shape.head_dim + shape.value_dim)
    ring = s.cp // s.ulysses
    hops = each * (ring - 1) * (again + 2)
    yield flow("ring", "send", "keys and values", ring, s.tp * s.ulysses, hops, tokens * kv / s.tp * e)
    turned = tokens * (shape.heads * (shape.head_dim + shape.value_dim) + kv) / s.tp * e
    yield flow("ulysses", "all_to_all", "heads for tokens", s.ulysses, s.tp, each * (again + 1), turned)
    routed = tokens * shape.top_k * shape.hidden / s.tp * e
    apart = int(np.max(layout.expert_stride))
    yield flow("ep", "all_to_all", "tokens to experts and back", s.ep, apart, each * moe * 2 * (again + 1), routed)

    dense = ((1 - moe) * shape.block_params + moe * shape.moe_block_params) / s.tp * blocks
    ends = (max(shape.embedding_params, shape.head_params) if s.pp > 1 else shape.ends) / s.tp
    experts = moe * shape.expert_params / (s.ep * s.etp) * blocks
    edp = max(s.dp * s.cp * s.tp // (s.ep * s.etp), 1)
    stride = int(layout.data_stride(pricing.system.tiers[0].ranks)[0])
    parts = [("dp", dense + ends, s.dp * s.cp, stride), ("edp", experts, edp, s.ep * apart)]
    for axis, params, ranks, between in parts:
        shards = min(s.shards, ranks)
        grad, own = profile.gradient_bytes * params, profile.parameter_bytes * params
        passes = s.zero == 3 and not s.gathers_once
        times = m if passes else 1
        for op, what, among, apart, often, n in (
            ("reduce_scatter", "gradients", shards, between, times, grad),
            ("all_gather", "parameters", shards, between, 2 * times if passes else 1, own),
            ("all_reduce", "gradients", ranks // shards, between * shards, 1, grad / shards),
        ):
            buckets = blocks if passes else max(math.ceil(n / profile.bucket_bytes), 1)
            yield flow(axis, op, what, among, apart, often * buckets, n / buckets)
    stages = int(layout.pp_stride[0])
    yield flow("pp", "send", "activations and their gradients", s.pp, stages, 2 * m * s.virtual, hidden / s.tp)


def _flow(
    pricing: Pricing, s: Strategy, axis: str, op: str, what: str, ranks: int, stride: int, count: float, n: float
) -> Flow:
    system, inner = pricing.system, pricing.system.tiers[0]
    if op == "send":
        sent, leaves = n, n if stride >= inner.ranks else 0.0
        if axis == "ring":
            leaves = n / max(1, int(together(ranks, stride, inner)))  # the last of a node's ranks alone
        seconds = message_s(n, stride, system)
    else:
        inside = int(together(ranks, stride, inner))
        over = -(-ranks // inside)
        sent = _SENT[op] * n * (ranks - 1) / ranks
        leaves = _SENT[op] * n * (over - 1) / over / (1 if op == "all_to_all" else inside)
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
        network=count * leaves,
        seconds=float(np.asarray(seconds)) * count,
    )


def _tier(pricing: Pricing, s: Strategy, axis: str, ranks: int, stride: int) -> str:
    """The innermost links that hold every group: as far apart as its ranks lie."""
    reach = (2 if axis == "pp" else ranks) * stride
    if axis in ("tp", "cp", "ring", "ulysses"):
        return mesh(s).tier("cp" if axis in ("ring", "ulysses") else axis, pricing.cluster).name
    tiers = pricing.cluster.tiers
    return next((t.name for t in tiers if reach <= t.ranks), tiers[-1].name)


def term_of(axis: str) -> str:
    """The term of a step that says how much of an axis's traffic nothing hides; some axes share one."""
    return {"ring": "cp", "ulysses": "cp", "edp": "dp", "pp": "transfers"}.get(axis, axis)
