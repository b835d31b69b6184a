"""Live tensor bytes, as a maximum over instants and never as a sum of maxima.

State lives through the whole step. A forward pass of a unit leaves what its backward pass needs; a backward pass
frees that, and while it runs holds temporaries above what was live when it started. So every unit has three
numbers: what it keeps, and its temporaries forward and backward (those of blocks: block.py). The walk over the
step's events adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory import split_backward
from phalanx.cost.memory.attention_core import Core, lowest
from phalanx.cost.memory.block import Block
from phalanx.cost.memory.live_bytes import normed, statistics
from phalanx.cost.memory.mla import LatentBlock, SplitLatentBlock
from phalanx.cost.memory.moe import ExpertsBlock, SplitExpertsBlock
from phalanx.cost.memory.split_backward import Parts, SplitBlock
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.head import LOGITS_AT_ONCE
from phalanx.schedule.layers.routing import Routed
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model.spec import ModelSpec, StageSpec
from phalanx.spec.strategy.spec import Recompute


@dataclass(frozen=True)
class Footprint:
    """Bytes of one unit and micro-batch.

    `kept`: allocated forward, freed backward. `forward`: the forward pass's temporaries above `kept` when it is
    fullest. `backward`: the same above what is live when the backward pass begins. `leaves`: what stays after the
    backward pass (the gradient that flows on, a shared weight's partial gradient). `masked`: of a block, `backward`
    until masks are not needed any more.
    """

    kept: Column
    forward: Column
    backward: Column
    leaves: Column
    masked: Column = 0
    parts: Parts | None = None
    """The same backward pass in two parts, of a model whose layers may put gradients of weights off."""


def documents(
    spec: ModelSpec, job: Job, tokens: Column, part: Context | None = None, blocks: Sequence[int] | None = None
) -> dict[int, Column]:
    """What keeps the documents of a micro-batch apart: a mask for each window that blocks have, and every token's
    angles; over several ranks no masks, but what they are made of. By the block whose backward pass is the last to
    use it. `blocks`: of a chunk, which makes its own; else all."""
    blocks = spec.held_blocks if blocks is None else blocks
    if job.documents != "separate" or not blocks:
        return {}
    first = blocks[0]
    angles = tokens * (spec.rotary_width if spec.position == "rotary" else 0) * DTYPE_BYTES[job.precision.compute]
    if part is not None and part.parallel:
        held = lowest(spec, part, tokens // part.tokens, True, blocks)
        return held | {first: held[first] + angles}
    last: dict[int | None, int] = {}
    for i in blocks:
        last.setdefault(spec.window_of(i) if spec.masked(job.seq) else None, i)
    e = DTYPE_BYTES[job.precision.compute]
    held = {i: tokens * job.seq * e for i in last.values()}
    held[first] = held[first] + angles
    return held


def footprint(
    spec: ModelSpec,
    unit: str,
    tokens: Column,
    seq: int,
    job: Job,
    placed: DType,
    tp: int = 1,
    sp: bool = False,
    repeat: Recompute = "none",
    core: Core | None = None,
    in_parts: bool = False,
    routed: Routed | None = None,
) -> Footprint:
    """Bytes of a unit class (`embed`, `blocks`, `head`) for `tokens` tokens of one micro-batch. `placed`: the type of
    the memory in which gradients are put. With several `tp` ranks `spec` is what each of them holds; with `sp` the
    stream is of this rank's own tokens. `repeat`: what a block repeats. With several ranks that share sequences
    `core` is that of attention. `in_parts`: layers may put gradients of weights off, and do not make the others where
    whoever takes them can. `routed`: rows of a block that has experts."""
    t, h, v = tokens, spec.hidden, spec.vocab
    e = DTYPE_BYTES[job.precision.compute]
    wide = max(e, 4)  # statistics and sums
    own = t // tp if sp else t
    stream = own * h * e  # the residual stream, and its gradient
    together = t * h * e if sp else 0  # of all tokens, brought together or not yet scattered
    several = 0 if core is not None else _several(t, seq)
    # In one backward pass the head's share of a tied weight's gradient waits for embed's.
    shared = v * h * e if spec.tied and not isinstance(spec, StageSpec) else 0
    in_place = in_parts and placed == job.precision.compute  # products are made right where gradients are put
    if unit == "embed":
        position = 0
        looked_up = core.part.tokens * h * e if core is not None else 0  # rows that are no slice
        if spec.position == "learned":
            summed = (core.part.tokens if core is not None else seq) * h * e if job.documents == "packed" else 0
            position = spec.max_seq * h * e + summed
        wider = t * h * DTYPE_BYTES[placed] if DTYPE_BYTES[placed] != e else 0
        parts = None
        if in_parts:
            rows = (seq if core is None else core.part.tokens) if job.documents == "packed" and not sp else None
            ids = own * 8 if sp else (rows or 0) * (core is None) * 8
            parts = split_backward.embed(spec, t, own, e, DTYPE_BYTES[placed], tp, sp, several, rows, ids)
            if rows is not None and spec.position == "learned":
                looked_up = rows * h * e
        if sp:
            learned = spec.position == "learned"
            places = own * 8 * learned
            found = _places(t) + together
            return Footprint(
                kept=stream + places,
                forward=np.maximum(found, 2 * stream * learned),
                # a copy in another type is made when the gradient that came is gone
                backward=np.maximum(found, together + t * 8 + wider - stream - places),
                leaves=-stream - shared,
                parts=parts,
            )
        # the rows of the embedding's gradient are those of the stream's, unless another type wants a copy; or a copy
        # of them, in which those that other ranks have are zeros
        rows_held = np.maximum(wider, stream) + _places(t) if tp > 1 else wider + several
        summed = (stream + (stream if job.documents == "separate" else looked_up)) * (spec.position == "learned")
        if in_parts:
            position = (rows or 0) * (h * e + wider // t) * (spec.position == "learned")
        made = 0 if parts is None else ids * (spec.position == "learned")
        return Footprint(
            kept=stream + made,
            forward=np.maximum(summed, _places(t)) if tp > 1 else summed,
            backward=np.maximum(rows_held, position),
            leaves=-stream - shared,
            parts=parts,
        )
    if unit == "head":
        kept = stream + statistics(spec, own, e) + t * v * e
        rows = np.minimum(t, max(1, LOGITS_AT_ONCE // v))
        cast = rows * v * wide if e < 4 else 0
        # before there are logits
        norm = 2 * own * h * wide - stream - t * v * e if e < 4 and spec.norm == "rms" else 0
        # backward: gradients of input and weight of the projection, or the norm's own temporaries, when the
        # normed input (one stream) has given way to its gradient
        last = normed(spec, own, e) - t * v * e
        loss = cast + 3 * rows * wide
        if tp > 1:  # of every token: its place, three sums, whether it is here, and the loss; or slices of logits
            loss = np.maximum(t * wide + t * e, cast + np.maximum(rows * wide, t * e)) + _places(t) + 3 * t * wide
        return Footprint(
            kept=kept,
            forward=np.maximum(np.maximum(several + loss, norm), together),
            backward=np.maximum(stream + 2 * together + v * h * e * (tp > 1 or not in_place), last + shared),
            leaves=stream + shared,
            parts=split_backward.head(spec, t, own, e, stream, together, v * h * e * (sp or not in_place))
            if in_parts
            else None,
        )
    named: dict[str, Any] = {} if routed is None or spec.experts is None else {"rows": routed}
    if in_parts:
        named["in_place"] = in_place
    block: Block = _kind(spec.latent is not None, "rows" in named, in_parts)(
        spec, t, e, tp, sp, repeat, core, **named
    )
    there, back = block.passes()
    return Footprint(
        kept=there.live,
        forward=there.highest - there.live,
        backward=back.highest,
        leaves=0,
        masked=back.masked,
        parts=block.parts() if isinstance(block, SplitBlock) else None,
    )


@cache
def _kind(latent: bool, experts: bool, in_parts: bool) -> type[Block]:
    """The class of a block with latent attention, or experts, or both."""
    of_mlp = (SplitExpertsBlock if in_parts else ExpertsBlock) if experts else (SplitBlock if in_parts else Block)
    if not latent:
        return of_mlp
    of_attention = SplitLatentBlock if in_parts else LatentBlock
    return type("LatentExpertsBlock", (of_attention, of_mlp), {}) if experts else of_attention


def _places(t: Column) -> Column:
    """Where tokens are in a rank's part of the vocabulary, and whether they are."""
    return t * 9


def _several(t: Column, seq: int) -> Column:
    """The token ids of several sequences of a batch, made contiguous."""
    return (t > seq) * t * 8
