"""Live tensor bytes, as a maximum over instants and never as a sum of maxima.

Model state lives through the whole step. A unit's forward pass keeps what its backward pass needs; the backward pass
frees that, and while it runs holds temporaries above what was live when it started. So every unit has three numbers:
the bytes it keeps, and its temporaries forward and backward (here for the embedding and the head with its loss, in
block.py for blocks). The walk over the step's events (cost/step/program.py) adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory import split_backward
from phalanx.cost.memory.attention_core import Core, first_visible_bytes
from phalanx.cost.memory.block import Block
from phalanx.cost.memory.live_bytes import Footprint, normed, statistics
from phalanx.cost.memory.mla import LatentBlock, SplitLatentBlock
from phalanx.cost.memory.moe import ExpertsBlock, SplitExpertsBlock
from phalanx.cost.memory.split_backward import SplitBlock
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.head import LOGITS_AT_ONCE, rows_of_slice, sliced, slices_over_ranks
from phalanx.schedule.layers.routing import Routed
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model.spec import ModelSpec, StageSpec
from phalanx.spec.strategy.spec import Recompute


def embed(
    spec: ModelSpec,
    t: Column,
    seq: int,
    job: Job,
    placed: DType,
    tp: int = 1,
    sp: bool = False,
    core: Core | None = None,
    in_parts: bool = False,
) -> Footprint:
    """Return the bytes of the embedding of `t` tokens; arguments as for `footprint`."""
    h, e = spec.hidden, DTYPE_BYTES[job.precision.compute]
    own_tokens = t // tp if sp else t
    stream = own_tokens * h * e  # the residual stream, and its gradient
    together = t * h * e if sp else 0  # of all tokens, gathered or not yet scattered
    id_copies = 0 if core is not None else _contiguous_ids(t, seq)
    tied_bytes = _shared_bytes(spec, e)
    position = 0
    looked_up = core.part.tokens * h * e if core is not None else 0  # rows that are not a slice of the table
    if spec.position == "learned":
        summed = (core.part.tokens if core is not None else seq) * h * e if job.documents == "packed" else 0
        position = spec.max_seq * h * e + summed
    wider = t * h * DTYPE_BYTES[placed] if DTYPE_BYTES[placed] != e else 0
    parts = None
    if in_parts:
        rows = (seq if core is None else core.part.tokens) if job.documents == "packed" and not sp else None
        position_ids = own_tokens * 8 if sp else (rows or 0) * (core is None) * 8
        parts = split_backward.embed(
            spec, t, own_tokens, e, DTYPE_BYTES[placed], tp, sp, id_copies, rows, position_ids
        )
        if rows is not None and spec.position == "learned":
            looked_up = rows * h * e
    if sp:
        learned = spec.position == "learned"
        places = own_tokens * 8 * learned
        lookup = _lookup_bytes(t) + together
        return Footprint(
            kept=stream + places,
            forward=np.maximum(lookup, 2 * stream * learned),
            # the cast copy is made after the incoming gradient is freed
            backward=np.maximum(lookup, together + t * 8 + wider - stream - places),
            leaves=-stream - tied_bytes,
            parts=parts,
        )
    # rows of the embedding's gradient are views of the stream's gradient, unless dtypes differ; with tp a copy of
    # them, zero where the row belongs to another rank
    rows_held = np.maximum(wider, stream) + _lookup_bytes(t) if tp > 1 else wider + id_copies
    summed = (stream + (stream if job.documents == "separate" else looked_up)) * (spec.position == "learned")
    if in_parts:
        position = (rows or 0) * (h * e + wider // t) * (spec.position == "learned")
    kept_ids = 0 if parts is None else position_ids * (spec.position == "learned")
    return Footprint(
        kept=stream + kept_ids,
        forward=np.maximum(summed, _lookup_bytes(t)) if tp > 1 else summed,
        backward=np.maximum(rows_held, position),
        leaves=-stream - tied_bytes,
        parts=parts,
    )


def head(
    spec: ModelSpec,
    t: Column,
    seq: int,
    job: Job,
    placed: DType,
    tp: int = 1,
    sp: bool = False,
    core: Core | None = None,
    in_parts: bool = False,
) -> Footprint:
    """Return the bytes of the head and the loss of `t` tokens; arguments as for `footprint`."""
    h, v, e = spec.hidden, spec.vocab, DTYPE_BYTES[job.precision.compute]
    own_tokens = t // tp if sp else t
    id_copies = 0 if core is not None else _contiguous_ids(t, seq)
    tied_bytes = _shared_bytes(spec, e)
    if tp == 1 and not in_parts and sliced(t, v, h, e):
        return _sliced_head(spec, t, e, tied_bytes, id_copies)
    if tp > 1 and not in_parts and (slices := int(slices_over_ranks(t, v, h, e))) > 1:
        return _head_over_ranks(spec, t, t // slices, own_tokens, e, tied_bytes, id_copies, sp)
    wide = max(e, 4)  # statistics and sums
    stream = own_tokens * h * e  # the residual stream, and its gradient
    together = t * h * e if sp else 0  # of all tokens, gathered or not yet scattered
    in_place = in_parts and placed == job.precision.compute  # products write straight into gradient memory
    activations = stream + statistics(spec, own_tokens, e) + t * v * e
    rows = np.minimum(t, max(1, LOGITS_AT_ONCE // v))
    cast = rows * v * wide if e < 4 else 0
    # before there are logits
    norm = 2 * own_tokens * h * wide - stream - t * v * e if e < 4 and spec.norm == "rms" else 0
    # backward: gradients of input and weight of the projection, or the norm's own temporaries, when the
    # normed input (one stream) has given way to its gradient
    last = normed(spec, own_tokens, e) - t * v * e
    loss = cast + 3 * rows * wide
    if tp > 1:
        loss = _loss_over_ranks(t, v, e)
    return Footprint(
        kept=activations,
        forward=np.maximum(np.maximum(id_copies + loss, norm), together),
        backward=np.maximum(stream + 2 * together + v * h * e * (tp > 1 or not in_place), last + tied_bytes),
        leaves=stream + tied_bytes,
        parts=split_backward.head(spec, t, own_tokens, e, stream, together, v * h * e * (sp or not in_place))
        if in_parts
        else None,
    )


def _sliced_head(spec: ModelSpec, t: int, e: int, tied_bytes: int, id_copies: Column) -> Footprint:
    """Return the bytes of the sliced head: it keeps the gradients of its normed input, and of its weight in a wide
    type, and computes both in the forward pass."""
    h, v, wide = spec.hidden, spec.vocab, max(e, 4)
    stream, gradient, narrow = t * h * e, v * h * wide, e < 4
    rows = int(rows_of_slice(t, v))
    loss = rows * v * wide * narrow + 3 * rows * wide
    slice_ = (
        stream + rows * v * e + max(loss, v * h * e * narrow)
    )  # the normed input; a slice of logits, or a product
    norm = 2 * t * h * wide - stream - gradient if narrow and spec.norm == "rms" else 0
    return Footprint(
        kept=stream + statistics(spec, t, e) + gradient,
        forward=max(id_copies + slice_, norm),
        # the weight's gradient in its own type; the norm's own temporaries, when the wide one is gone
        backward=max(v * h * e * narrow, normed(spec, t, e) - gradient + tied_bytes, 0),
        leaves=stream + tied_bytes,
    )


def _head_over_ranks(
    spec: ModelSpec, t: int, rows: int, own_tokens: int, e: int, tied_bytes: int, id_copies: Column, sp: bool
) -> Footprint:
    """Return the bytes of the sliced head of tp ranks, each with its rows of the vocabulary, in slices of `rows`
    tokens. With sequence parallelism the input is gathered, and its gradient kept, of all tokens."""
    h, v, wide = spec.hidden, spec.vocab, max(e, 4)
    stream, every, gradient, narrow = own_tokens * h * e, t * h * e, v * h * wide, e < 4
    slice_ = rows * v * e + max(_loss_over_ranks(rows, v, e), v * h * e * narrow)
    norm = 2 * own_tokens * h * wide - every - gradient if narrow and spec.norm == "rms" else 0
    scattered = stream * sp
    return Footprint(
        kept=every + statistics(spec, own_tokens, e) + gradient,
        forward=max(id_copies + stream + every * sp + slice_, norm),
        backward=max(
            scattered + v * h * e * narrow, normed(spec, own_tokens, e) + (stream - every) - gradient + tied_bytes, 0
        ),
        leaves=stream + tied_bytes,
    )


def _loss_over_ranks(t: Column, v: int, e: int) -> Column:
    """Return bytes of the cross-entropy of t tokens over tp ranks, in addition to the logits of v rows of the
    vocabulary: each token's place, three sums, whether it is local, and the loss; or slices of logits."""
    wide, rows = max(e, 4), np.minimum(t, max(1, LOGITS_AT_ONCE // v))
    cast = rows * v * wide if e < 4 else 0
    return np.maximum(t * wide + t * e, cast + np.maximum(rows * wide, t * e)) + _lookup_bytes(t) + 3 * t * wide


def _lookup_bytes(t: Column) -> Column:
    """Return bytes of the rows of t tokens in a rank's part of the vocabulary, and of the mask of local ones."""
    return t * 9


def _contiguous_ids(t: Column, seq: int) -> Column:
    """Return bytes of the token ids of several sequences of a batch, copied to be contiguous; 0 for one sequence."""
    return (t > seq) * t * 8


def _shared_bytes(spec: ModelSpec, e: int) -> int:
    """Return the bytes of the head's share of a tied weight's gradient, which waits for the embedding's in one
    backward pass."""
    return spec.vocab * spec.hidden * e if spec.tied and not isinstance(spec, StageSpec) else 0


def documents(
    spec: ModelSpec, job: Job, tokens: Column, part: Context | None = None, blocks: Sequence[int] | None = None
) -> dict[int, Column]:
    """Return bytes of the separation of documents in a micro-batch, by the block whose backward pass is the last to
    use it: a mask for each attention window, and every token's rotary angles; with context parallelism, the first
    visible positions in place of masks. `blocks`: a chunk's blocks, which have their own masks; by default all."""
    blocks = spec.held_blocks if blocks is None else blocks
    if job.documents != "separate" or not blocks:
        return {}
    first = blocks[0]
    angles = tokens * (spec.rotary_width if spec.position == "rotary" else 0) * DTYPE_BYTES[job.precision.compute]
    if part is not None and part.parallel:
        result = first_visible_bytes(spec, part, tokens // part.tokens, True, blocks)
        return result | {first: result[first] + angles}
    last: dict[int | None, int] = {}
    for i in blocks:
        last.setdefault(spec.window_of(i) if spec.masked(job.seq) else None, i)
    e = DTYPE_BYTES[job.precision.compute]
    result = {i: tokens * job.seq * e for i in last.values()}
    result[first] = result[first] + angles
    return result


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
    gathered: bool = False,
) -> Footprint:
    """Return the bytes of a unit kind (`embed`, `blocks`, `head`) for `tokens` tokens of one micro-batch.

    `spec`: one rank's part of the model. `sp`: the residual stream has only this rank's tokens. `placed`: dtype of
    the memory that gradients are written to. `repeat`: recomputation of a block. `core`: attention over ranks that
    share sequences. `in_parts`: layers can defer weight gradients, which are then computed directly into their memory
    where dtypes allow. `routed`: rows of a block with experts. `gathered`: weights are gathered in 8 bits."""
    if unit == "embed":
        return embed(spec, tokens, seq, job, placed, tp, sp, core, in_parts)
    if unit == "head":
        return head(spec, tokens, seq, job, placed, tp, sp, core, in_parts)
    e = DTYPE_BYTES[job.precision.compute]
    # Only what the kind of block takes.
    kwargs: dict[str, Any] = {} if routed is None or spec.experts is None else {"rows": routed}
    if job.documents == "separate":
        part = core and core.part
        kwargs["mask"] = (
            first_visible_bytes(spec, part, tokens // part.tokens, True, [0])[0] if part else tokens * seq * e
        )
    if in_parts:
        kwargs["in_place"] = placed == job.precision.compute
    if job.precision.operands is not None:
        kwargs["operands"], kwargs["gathered"] = job.precision.operands, gathered
        kwargs["narrow_stream"] = sp and job.precision.gathers_narrow
    block: Block = _BLOCKS[spec.latent is not None, "rows" in kwargs, in_parts](
        spec, tokens, e, tp, sp, repeat, core, **kwargs
    )
    forward, backward = block.passes()
    return Footprint(
        kept=forward.live,
        forward=forward.highest - forward.live,
        backward=backward.highest,
        leaves=0,
        masked=backward.masked,
        parts=block.parts() if isinstance(block, SplitBlock) else None,
    )


class LatentExpertsBlock(LatentBlock, ExpertsBlock):
    """A block with latent attention and experts."""


class SplitLatentExpertsBlock(SplitLatentBlock, SplitExpertsBlock):
    """A block with latent attention and experts whose layers can defer weight gradients."""


_BLOCKS: dict[tuple[bool, bool, bool], type[Block]] = {
    (False, False, False): Block,
    (False, False, True): SplitBlock,
    (False, True, False): ExpertsBlock,
    (False, True, True): SplitExpertsBlock,
    (True, False, False): LatentBlock,
    (True, False, True): SplitLatentBlock,
    (True, True, False): LatentExpertsBlock,
    (True, True, True): SplitLatentExpertsBlock,
}
"""Class of a block, by whether it has latent attention, experts, and a split backward pass."""
