"""Memory of the fullest pipeline rank, in columns: what a step holds at its worst instant, by what holds it.

The first rank holds the embedding and the most micro-batches at once, the last one the head and the logits; in
between nobody holds more than one of them. Activations of a block are what its backward pass reads (Korthikanti et
al. 2022, table 2, without its dropout, and with the widths that a model really has):

    2-byte elements per token    4 h / own + (q + 2 kv + out + (2 or 3) ffn) / tp        own: tp with sp, else 1
    scores, unless flash         2.5 heads x seq / tp
    full recomputation           h / own, and one block whole at a time
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from phalanx.cost.profiles import Profile
from phalanx.cost.stack.columns import Column
from phalanx.cost.stack.layout import Layout
from phalanx.cost.stack.shape import Shape
from phalanx.plan.space import NAMES, Strategies
from phalanx.spec.job import DTYPE_BYTES, Job

_INTERLEAVED, _GPIPE, _NAIVE = (NAMES.index(name) for name in ("interleaved", "gpipe", "naive"))
_ZB_H1, _ZB_V, _DUALPIPE = (NAMES.index(name) for name in ("zb-h1", "zb-v", "dualpipe-v"))


@dataclass(frozen=True)
class Footprint:
    """Bytes on the fullest rank."""

    parameters: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    transit: Column
    """Whole gradients of ZeRO-2 and 3 on their way to shards, and parameters that ZeRO-3 has fetched from them."""

    @property
    def total(self) -> Column:
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class Policy:
    """Bytes per parameter: as computed with, its gradient, and what only the update needs (master copy, moments)."""

    parameter: int
    gradient: int
    optimizer: int

    @classmethod
    def of(cls, job: Job) -> Policy:
        p = job.precision
        master = DTYPE_BYTES[p.master_dtype]
        copy = 0 if p.master_dtype == p.compute else master
        moments = 2 if job.optimizer.name == "adamw" else 1
        return cls(DTYPE_BYTES[p.compute], DTYPE_BYTES[p.accumulate_dtype], copy + moments * master)


def footprint(shape: Shape, layout: Layout, rows: Strategies, job: Job, profile: Profile) -> Footprint:
    """Of every row on its fullest rank."""
    first, last = _live(rows, job)
    blocks = np.ceil(shape.layers / rows.pp)
    dense, routed = block_parameters(shape, rows)
    kept, whole = activations(shape, layout, profile)
    again = np.where(
        layout.full > 0, whole - layout.tokens * layout.activation_bytes * shape.hidden / own_of(layout), 0
    )
    pipe = rows.pp > 1
    tied = np.where(shape.head_params > 0, shape.head_params, shape.embedding_params)
    ends = [np.where(pipe, shape.embedding_params, shape.ends), np.where(pipe, tied, shape.ends)]
    v_shaped = (rows.schedule == _ZB_V) | (rows.schedule == _DUALPIPE)
    top = 1.0 * (~pipe | v_shaped), 1.0
    ends[0] = np.where(v_shaped & pipe, shape.embedding_params + tied, ends[0])
    logits = layout.tokens * shape.vocab / layout.tp * (2 * layout.activation_bytes + 4)
    both = [
        _of_rank(blocks, dense, routed, extra / layout.tp, live * blocks * kept + again, has * logits, rows, job)
        for extra, live, has in zip(ends, (first, last), top, strict=True)
    ]
    fuller = both[0].total >= both[1].total
    return Footprint(
        **{f.name: np.where(fuller, *(getattr(b, f.name) for b in both)) for f in fields(Footprint)},
    )


def _of_rank(
    blocks: Column,
    dense: Column,
    routed: Column,
    ends: Column,
    live: Column,
    logits: Column,
    rows: Strategies,
    job: Job,
) -> Footprint:
    policy = Policy.of(job)
    own, own_routed = blocks * dense + ends, blocks * routed
    shards = rows.shards
    expert_shards = np.where(rows.zero > 0, np.maximum(shards * rows.tp // (rows.ep * rows.etp), 1), 1)

    def held(stage: int) -> Column:
        """Parameters of which this rank has the state, from that ZeRO stage on only its shard's."""
        return np.where(rows.zero >= stage, own / shards + own_routed / expert_shards, own + own_routed)

    # ZeRO-2 and 3 reduce bucket by bucket, ZeRO-3 gathers unit by unit and one ahead; in a pipeline all for a step.
    unit = np.maximum(dense + routed, ends)
    buckets = np.where((rows.zero >= 2) & (shards > 1), policy.gradient * unit, 0)
    whole = np.where(rows.pp > 1, own + own_routed, 2 * unit)
    return Footprint(
        parameters=policy.parameter * held(3),
        gradients=policy.gradient * held(2),
        optimizer=policy.optimizer * held(1),
        activations=live,
        logits=logits,
        transit=buckets + np.where((rows.zero == 3) & (shards > 1), policy.parameter * whole, 0),
    )


def block_parameters(shape: Shape, rows: Strategies) -> tuple[Column, Column]:
    """Of an average block on a rank: those that all tokens meet, and experts."""
    moe = shape.moe_layers / shape.layers
    dense = ((1 - moe) * shape.block_params + moe * shape.moe_block_params) / rows.tp
    return dense, moe * shape.expert_params / (rows.ep * rows.etp)


def own_of(layout: Layout) -> Column:
    """Ranks that share what lies between the split layers: those of tp, with sequence parallelism."""
    return np.where(layout.sp > 0, layout.tp, 1)


def activations(shape: Shape, layout: Layout, profile: Profile) -> tuple[Column, Column]:
    """Bytes of a block for a micro-batch: kept until its backward pass, and all of it."""
    own = own_of(layout)
    heads = shape.heads * (shape.head_dim + shape.value_dim) + shape.kv_heads * (shape.head_dim + shape.value_dim)
    latent = shape.q_rank + shape.kv_rank
    moe = shape.moe_layers / shape.layers
    inner = (1 - moe) * shape.ffn * shape.mlp_matrices / layout.tp
    if np.any(shape.moe_layers):
        routed = shape.top_k / layout.tp * (2 * shape.hidden + shape.mlp_matrices * shape.expert_ffn)
        inner = inner + moe * (routed + shape.mlp_matrices * shape.shared_ffn / layout.tp)
    scores = np.where(profile.flash > 0, 0.0, 2.5 * shape.heads * layout.seq / layout.tp)
    token = layout.tokens * layout.activation_bytes
    whole = token * (4 * shape.hidden / own + heads / layout.tp + latent + inner + scores)
    core = token * scores
    kept = layout.full * token * shape.hidden / own + (1 - layout.full) * whole - layout.selective * core
    return kept, whole


def _live(rows: Strategies, job: Job) -> tuple[Column, Column]:
    """Micro-batches whose activations of all its blocks the first rank, and the last one, hold at once."""
    m, p, v = rows.micro_batches(job), rows.pp, rows.virtual
    warm = np.minimum(m, ((v - 1) * p + 2 * (p - 1) + 1) / v)
    one, wave = np.minimum(p, m), np.minimum(p + 0.5, m)
    kinds = [rows.schedule == k for k in (_NAIVE, _GPIPE, _INTERLEAVED, _ZB_H1, _ZB_V, _DUALPIPE)]
    last_warm = np.minimum(m, ((v - 1) * p + 1) / v)
    first = np.select(kinds, [np.ones_like(m), m, warm, one, one, wave], one)
    last = np.select(kinds, [np.ones_like(m), m, last_warm, one, one, wave], 1)
    return np.where(p > 1, first, 1), np.where(p > 1, last, 1)
