"""Live bytes of the embedding's passes, and of the head's with its loss; arguments as for footprint.py."""

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.attention_core import Core
from phalanx.cost.memory.live_bytes import Footprint, Parts, Pass, Walk, norm_temporaries, statistics
from phalanx.schedule.layers.head import LOGITS_AT_ONCE, rows_of_slice, sliced, slices_over_ranks
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model.spec import ModelSpec, StageSpec


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
    """Return the bytes of the embedding for `t` tokens; arguments as for `footprint`."""
    h, e = spec.hidden, DTYPE_BYTES[job.precision.compute]
    own_tokens = t // tp if sp else t
    stream = own_tokens * h * e  # the residual stream, and its gradient
    together = t * h * e if sp else 0  # of all tokens, gathered or not yet scattered
    id_copies = 0 if core is not None else _contiguous_ids(t, seq)
    tied_bytes = _shared_bytes(spec, e)
    position = 0
    looked_up = core.part.tokens * h * e if core is not None else 0  # rows that are not a slice of the table
    if spec.position == "learned":
        summed = (core.part.tokens if core is not None else seq) * h * e if not job.separate else 0
        position = spec.max_seq * h * e + summed
    wider = t * h * DTYPE_BYTES[placed] if DTYPE_BYTES[placed] != e else 0
    parts = None
    if in_parts:
        rows = (seq if core is None else core.part.tokens) if not job.separate and not sp else None
        position_ids = own_tokens * 8 if sp else (rows or 0) * (core is None) * 8
        parts = _embed_parts(spec, t, own_tokens, e, DTYPE_BYTES[placed], tp, sp, id_copies, rows, position_ids)
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
    summed = (stream + (stream if job.separate else looked_up)) * (spec.position == "learned")
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
    """Return the bytes of the head and the loss for `t` tokens; arguments as for `footprint`."""
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
    last = norm_temporaries(spec, own_tokens, e) - t * v * e
    loss = _loss_over_ranks(t, v, e) if tp > 1 else cast + 3 * rows * wide
    weight, parts = v * h * e, None
    if in_parts:
        parts = _head_parts(spec, t, own_tokens, e, stream, together, weight * (sp or not in_place))
    return Footprint(
        kept=activations,
        forward=np.maximum(np.maximum(id_copies + loss, norm), together),
        backward=np.maximum(stream + 2 * together + weight * (tp > 1 or not in_place), last + tied_bytes),
        leaves=stream + tied_bytes,
        parts=parts,
    )


def _sliced_head(spec: ModelSpec, t: int, e: int, tied_bytes: int, id_copies: Column) -> Footprint:
    """Return the bytes of the sliced head: it keeps the gradients of its normed input, and of its weight in a wide
    type, and computes both in the forward pass."""
    h, v, wide = spec.hidden, spec.vocab, max(e, 4)
    stream, gradient, narrow = t * h * e, v * h * wide, e < 4
    rows = int(rows_of_slice(t, v))
    loss = rows * v * wide * narrow + 3 * rows * wide
    slice_ = stream + rows * v * e + max(loss, v * h * e * narrow)  # the normed input, logits; the loss or a product
    norm = 2 * t * h * wide - stream - gradient if narrow and spec.norm == "rms" else 0
    return Footprint(
        kept=stream + statistics(spec, t, e) + gradient,
        forward=max(id_copies + slice_, norm),
        # the weight's gradient in its own type; the norm's own temporaries, when the wide one is gone
        backward=max(v * h * e * narrow, norm_temporaries(spec, t, e) - gradient + tied_bytes, 0),
        leaves=stream + tied_bytes,
    )


def _head_over_ranks(
    spec: ModelSpec, t: int, rows: int, own_tokens: int, e: int, tied_bytes: int, id_copies: Column, sp: bool
) -> Footprint:
    """Return the bytes of a sliced head over tp ranks, each with its rows of the vocabulary, in slices of `rows`
    tokens. With sequence parallelism the input of all tokens is gathered, and its gradient kept."""
    h, v, wide = spec.hidden, spec.vocab, max(e, 4)
    stream, every, gradient, narrow = own_tokens * h * e, t * h * e, v * h * wide, e < 4
    slice_ = rows * v * e + max(_loss_over_ranks(rows, v, e), v * h * e * narrow)
    norm = 2 * own_tokens * h * wide - every - gradient if narrow and spec.norm == "rms" else 0
    scattered = stream * sp
    return Footprint(
        kept=every + statistics(spec, own_tokens, e) + gradient,
        forward=max(id_copies + stream + every * sp + slice_, norm),
        backward=max(
            scattered + v * h * e * narrow,
            norm_temporaries(spec, own_tokens, e) + (stream - every) - gradient + tied_bytes,
            0,
        ),
        leaves=stream + tied_bytes,
    )


def _loss_over_ranks(t: Column, v: int, e: int) -> Column:
    """Return bytes of the cross-entropy of t tokens over tp ranks, in addition to the logits of v rows of the
    vocabulary: each token's row, three sums, whether it is local, and the loss; or slices of logits."""
    wide, rows = max(e, 4), np.minimum(t, max(1, LOGITS_AT_ONCE // v))
    cast = rows * v * wide if e < 4 else 0
    return np.maximum(t * wide + t * e, cast + np.maximum(rows * wide, t * e)) + _lookup_bytes(t) + 3 * t * wide


def _lookup_bytes(t: Column) -> Column:
    """Return bytes of the row indices of t tokens in a rank's part of the vocabulary, and of the mask of local
    ones."""
    return t * 9


def _contiguous_ids(t: Column, seq: int) -> Column:
    """Return bytes of the token ids of several sequences of a batch, copied to be contiguous; 0 for one sequence."""
    return (t > seq) * t * 8


def _shared_bytes(spec: ModelSpec, e: int) -> int:
    """Return the bytes of the head's part of a tied weight's gradient, which is kept until the embedding's part is
    computed, if both are in one backward pass."""
    return spec.vocab * spec.hidden * e if spec.tied and not isinstance(spec, StageSpec) else 0


def _embed_parts(
    spec: ModelSpec,
    t: Column,
    own_tokens: Column,
    e: int,
    placed: int,
    tp: int,
    sp: bool,
    index: Column,
    rows: Column | None,
    ids: Column,
) -> Parts:
    """Return the bytes of the embedding's split backward pass. Its input needs no gradient, so I keeps the incoming
    one. `placed`: bytes per element of gradient memory. `index`: bytes of token ids, if they are copied. `rows`: rows
    of the position embedding's gradient if it is summed over sequences, else None. `ids`: bytes of position ids that
    the forward pass keeps."""
    inputs, weights, h = Walk(), Walk(), spec.hidden
    wider = h * placed if placed != e else 0
    if spec.position == "learned":
        if rows is not None:
            inputs.alloc(rows * h * e)
            weights.touch(rows * wider)
        else:
            weights.touch(index * (not sp) + own_tokens * wider)
        weights.free((0 if rows is None else rows * h * e) + ids)
    if tp > 1:
        lookup = t * h * e  # rows of tokens that this rank has, else zeros
        weights.touch(lookup + t * 9)
        weights.touch(lookup + t * 8 + t * wider)
    else:
        weights.touch(index + t * wider)
    weights.free(own_tokens * h * e)
    return Parts(Pass.from_walk(inputs), Pass.from_walk(weights))


def _head_parts(
    spec: ModelSpec, t: Column, own_tokens: Column, e: int, stream: Column, together: Column, weight: int
) -> Parts:
    """Return the bytes of the head's split backward pass. The gradient of the logits reuses their memory. `weight`:
    bytes of the projection's weight gradient before it is written to gradient memory; 0 if it is computed there."""
    logits = t * spec.vocab * e
    inputs, weights = Walk(), Walk()
    inputs.alloc(stream)
    inputs.touch(together)
    inputs.alloc(_norm_weights(spec, e))
    inputs.touch(norm_temporaries(spec, own_tokens, e))
    inputs.free(statistics(spec, own_tokens, e) + stream)
    weights.alloc(together)
    weights.touch(weight)
    weights.free(together)
    weights.free(logits + stream + _norm_weights(spec, e))
    return Parts(Pass.from_walk(inputs), Pass.from_walk(weights))


def _norm_weights(spec: ModelSpec, e: int) -> int:
    """Return bytes of the weight gradients of a norm of the residual stream."""
    parts = 2 if spec.norm == "layer" and spec.norm_bias else 1
    return parts * spec.hidden * e
