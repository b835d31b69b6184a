"""Live tensor bytes, as a maximum over instants and never as a sum of maxima.

State lives through the whole step. A forward pass of a unit leaves what its backward pass needs; a backward pass
frees that, and while it runs holds temporaries above what was live when it started. So every unit has three
numbers: what it keeps, and its temporaries forward and backward. The walk over the step's events adds them up.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from phalanx.cost import compression
from phalanx.cost.kernel import Column
from phalanx.schedule.buckets import buckets, slot_sizes
from phalanx.schedule.tensor_parallel import summed_elements
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model import ModelSpec, parameters
from phalanx.spec.split import Split, local
from phalanx.spec.strategy import Strategy

LOGITS_AT_ONCE = 2**17
"""The cross-entropy works on slices of so many logits, which stay in a core's cache (nn/functions.py)."""


@dataclass(frozen=True)
class State:
    """Bytes that one rank holds throughout a step."""

    parameters: int
    master: int
    gradients: int
    optimizer: int
    buffers: int
    """Memory that buckets and units take turns in: gradients on their way, gathered parameters; and in which tp ranks
    add up gradients."""
    tables: int
    batch: int
    compression: int = 0
    """What was kept back of gradients, and messages."""
    scratch: int = 0
    """Above all of it, what coding a gradient takes for a moment, at no instant that terms know of."""

    @property
    def total(self) -> int:
        held = self.parameters + self.master + self.gradients + self.optimizer
        return held + self.buffers + self.tables + self.batch + self.compression


@dataclass(frozen=True)
class Footprint:
    """Bytes of one unit and micro-batch.

    `kept`: allocated forward, freed backward. `forward`: the forward pass's temporaries above `kept` when it is
    fullest. `backward`: the same above what is live when the backward pass begins. `leaves`: what stays after the
    backward pass (the gradient that flows on, a shared weight's partial gradient).
    """

    kept: Column
    forward: Column
    backward: Column
    leaves: Column


def owned(spec: ModelSpec, job: Job, s: Strategy, shard: int) -> tuple[int, int]:
    """(Elements, pieces of parameters) that a rank of a shard updates: its parts of the buckets without padding."""
    elements = pieces = 0
    for bucket in buckets(spec, job, s):
        part = bucket.padded(s) // s.dp_shard
        low, begins = shard * part, 0
        for p in bucket.parameters:
            mine = min(begins + p.numel, low + part) - max(begins, low)
            elements, pieces = elements + max(0, mine), pieces + (mine > 0)
            begins += p.numel
    return elements, pieces


def state(spec: ModelSpec, job: Job, s: Strategy, shard: int | None = None) -> State:
    """What a rank holds: at stage 0 everything whole, else its shards (of the padded buckets) and the memory in which
    they are whole for a time; and its share of the batch as int64 token ids. `shard`: a certain one, exactly; without
    one no rank holds more."""
    p, stage, shards = job.precision, s.stage, s.dp_shard
    cut = buckets(spec, job, s)
    padded = [b.padded(s) for b in cut]
    whole = sum(padded)  # of gradients; parameters are views of buckets at stages 1 and 2 alone
    own = local(spec, s.tp)
    n = whole if stage else own.parameter_count
    part = n // (shards if stage else 1)
    master, reduce, accumulate = (DTYPE_BYTES[d] for d in (p.master_dtype, p.reduce_dtype, p.accumulate_dtype))
    c = s.compressor
    if c is not None:
        reduce = accumulate  # the compressor reads gradients whole
    compute, narrow = DTYPE_BYTES[p.compute], c is None and p.reduce_dtype != p.accumulate_dtype
    moments = {"adamw": 2, "sgd": 1 if job.optimizer.betas[0] else 0}[job.optimizer.name]
    updated, pieces = part, len(parameters(own))
    if stage and shard is not None:
        updated, pieces = owned(spec, job, s, shard)
    counters = 4 * pieces if job.optimizer.name == "adamw" else 0  # fp32 step counts
    rotary = spec.max_seq * spec.rotary_width * compute if spec.position == "rotary" else 0
    separate = job.documents == "separate"
    mask = job.seq**2 * compute if spec.masked(job.seq) and not separate else 0  # made once, of every sequence
    lent = sum(slot_sizes(padded)) * reduce if stage >= 2 else 0
    if stage == 3:
        units = [b.padded(s) for b in reversed(cut) if b.unit != "model"]
        shared = sum(b.padded(s) for b in cut if b.unit == "model")
        lent += (shared + (sum(units) if s.reshard == "step" else sum(slot_sizes(units)))) * compute
    return State(
        parameters=0 if stage == 3 else n * compute,
        master=part * master if stage == 3 or p.master_dtype != p.compute else 0,
        gradients=whole * (accumulate + reduce * narrow) if stage <= 1 else part * accumulate,
        optimizer=updated * moments * master + counters,
        buffers=lent + copies(spec, job, s),
        tables=rotary + mask,
        batch=job.global_batch // s.dp * (job.seq + 1) * 8 * (2 if separate else 1),
        compression=compression.held(c, cut, s, accumulate) if c else 0,
        scratch=compression.scratch(c, cut, accumulate) if c else 0,
    )


def copies(spec: ModelSpec, job: Job, s: Strategy) -> int:
    """Bytes of the buffer in which tp ranks add up gradients of which each has a part."""
    if s.tp == 1:
        return 0
    elements = summed_elements(Split(spec, s.tp), buckets(spec, job, s), s)
    return elements * DTYPE_BYTES[job.precision.accumulate_dtype]


def cast_gradients(elements: int, job: Job) -> int:
    """So many gradients once more, in the master type, during the update; 0 where they are of it already."""
    p = job.precision
    return 0 if p.master_dtype == p.accumulate_dtype else elements * DTYPE_BYTES[p.master_dtype]


def documents(spec: ModelSpec, job: Job, tokens: Column) -> dict[int, Column]:
    """What keeps the documents of a micro-batch apart: a mask for each window that blocks have, and every token's
    angles. By the block whose backward pass is the last to use it."""
    if job.documents != "separate":
        return {}
    last: dict[int | None, int] = {}
    for i in range(spec.layers):
        last.setdefault(spec.window_of(i) if spec.masked(job.seq) else None, i)
    e = DTYPE_BYTES[job.precision.compute]
    held: dict[int, Column] = {i: tokens * job.seq * e for i in last.values()}
    held[0] = held[0] + tokens * (spec.rotary_width if spec.position == "rotary" else 0) * e
    return held


def footprint(
    spec: ModelSpec, unit: str, tokens: Column, seq: int, job: Job, placed: DType, tp: int = 1
) -> Footprint:
    """Bytes of a unit class (`embed`, `blocks`, `head`) for `tokens` tokens of one micro-batch. `placed`: the type of
    the memory in which gradients are put. With several `tp` ranks `spec` is what each of them holds."""
    t, h, v = tokens, spec.hidden, spec.vocab
    e = DTYPE_BYTES[job.precision.compute]
    wide = max(e, 4)  # statistics and sums
    stream = t * h * e  # the residual stream, and its gradient
    shared = v * h * e if spec.tied else 0  # the head's share of a tied weight's gradient waits for embed's
    if unit == "embed":
        position = 0
        if spec.position == "learned":
            rows = seq * h * e if job.documents == "packed" else 0  # summed over sequences
            position = spec.max_seq * h * e + rows
        # the rows of the embedding's gradient are those of the stream's, unless another type wants a copy; or a copy
        # of them, in which those that other ranks have are zeros
        wider = t * h * DTYPE_BYTES[placed] if DTYPE_BYTES[placed] != e else 0
        rows_held = np.maximum(wider, stream) + _places(t) if tp > 1 else wider
        return Footprint(
            kept=stream,
            forward=stream * (2 if job.documents == "separate" else 1) if spec.position == "learned" else 0,
            backward=np.maximum(_several(t, seq) + rows_held, position),
            leaves=-stream - shared,
        )
    if unit == "head":
        kept = stream + _statistics(spec, t, e) + t * v * e
        rows = np.minimum(t, max(1, LOGITS_AT_ONCE // v))
        cast = rows * v * wide if e < 4 else 0
        norm = 2 * t * h * wide - stream - t * v * e if e < 4 and spec.norm == "rms" else 0  # before there are logits
        # backward: gradients of input and weight of the projection, or the norm's own temporaries, when the
        # normed input (one stream) has given way to its gradient
        normed = _normed(spec, t, e) - t * v * e
        over_ranks = _places(t) + t * (4 * wide + e) if tp > 1 else 0
        return Footprint(
            kept=kept,
            forward=np.maximum(_several(t, seq) + over_ranks + cast + 3 * rows * wide, norm),
            backward=np.maximum(stream + v * h * e, normed + shared),
            leaves=stream + shared,
        )
    return _block(spec, t, e, tp)


def _places(t: Column) -> Column:
    """Where tokens are in a rank's part of the vocabulary, and whether they are."""
    return t * 9


def _several(t: Column, seq: int) -> Column:
    """The token ids of several sequences of a batch, made contiguous."""
    return (t > seq) * t * 8


def _statistics(spec: ModelSpec, t: Column, e: int) -> Column:
    """What a norm keeps beside its input and output."""
    return t * (max(e, 4) if spec.norm == "rms" else 2 * e)


def _normed(spec: ModelSpec, t: Column, e: int) -> Column:
    """What a norm of the stream holds in its backward pass."""
    return _rms_temporaries(t, spec.hidden, e) if spec.norm == "rms" else t * spec.hidden * e


def _rms_temporaries(rows: Column, width: int, e: int) -> Column:
    """What an RMSNorm's backward pass holds, its result included (nn/functions.py)."""
    wide = max(e, 4)
    return (3 if e < 4 else 2) * rows * width * wide + rows * wide


def _block(spec: ModelSpec, t: Column, e: int, tp: int) -> Footprint:
    """S: the stream. A: the width of the MLP. Q, K: all query and all key heads. R: the products of the MLP that are
    kept. The passes are followed from one matrix product to the next; each instant is counted from the start."""
    h, q, kv, f, wide = spec.hidden, spec.q_width, spec.kv_width, spec.ffn, max(e, 4)
    S, A, Q, K = t * h * e, t * f * e, t * q * e, t * kv * e
    R = (3 if spec.gated else 2) * A
    serial, one_norm = spec.residual == "serial", spec.residual == "parallel_one_norm"
    statistics, normed = _statistics(spec, t, e), _normed(spec, t, e)
    q_sums, k_sums = t * spec.heads * wide, t * spec.kv_heads * wide  # one number per head: log-sum-exp, or a norm's
    qk = Q + K + q_sums + k_sums if spec.qk_norm else 0  # queries and keys before they are normed
    kept = (1 if one_norm else 2) * (S + statistics) + qk + 2 * Q + 2 * K + q_sums + R + (2 if serial else 1) * S

    # Forward, above what is kept: the sums at the end, or norms that compute wider than they keep.
    forward = [S if serial else 2 * S]
    if e < 4 and spec.norm == "rms" and not one_norm:
        forward.append(2 * t * h * wide - (2 if serial else 1) * S - R)
    if e < 4 and spec.qk_norm:
        forward.append(S + statistics + Q + 2 * K + q_sums + 2 * t * q * wide - kept)

    # Backward. The MLP: its second product, its activation, the products that read the normed input.
    backward = [f * h * e + A, 3 * A if spec.gated else A, f * h * e + S - A]
    if tp > 1:  # gradients of all weights that read one input are made beside its own, which travels
        backward.append((2 if spec.gated else 1) * f * h * e + S - A)
    elif spec.gated:
        backward.append(f * h * e + 2 * S - 2 * A)
    if not one_norm:  # the normed input has given way to its gradient
        backward.append(normed - R)
    elif spec.gated and tp == 1:  # it stays, and the gate's gradient of it is added to that of its twin
        backward.append(3 * S - R + (0 if spec.mlp_bias else f * h * e))
    # Attention starts with the stream's gradient, or with that and what the MLP's branch adds to it.
    start = -R - (2 * S + statistics if serial else 0 if one_norm else S + statistics)
    beside = S if one_norm else 0  # the MLP's gradient of the one normed input
    backward.append(start + beside + Q + q * h * e + (0 if serial or one_norm else S))
    backward.append(start + beside + 2 * Q + 2 * K)
    left = start - Q - q_sums  # the gradients of queries, keys and values are there; what attention kept is not
    if spec.qk_norm:
        backward.append(left + beside + _rms_temporaries(t * spec.kv_heads, spec.head_dim, e))
        backward.append(left + beside - K - k_sums + _rms_temporaries(t * spec.heads, spec.head_dim, e))
        left = left - qk
    if tp > 1:
        backward.append(left + beside + S + (q + 2 * kv) * h * e)
    else:
        backward.append(left + beside + S + kv * h * e)  # values
        backward.append(left + 2 * S - K + kv * h * e)  # keys
        backward.append(left + 2 * S - 2 * K + q * h * e)  # queries
        # What flows into the normed input from here is added to what did before. A bias has torch flatten the input,
        # and the weight's gradient is gone by then.
        backward.append(left + 3 * S - (K if one_norm else 2 * K) + (0 if spec.qkv_bias else kv * h * e))
    backward.append(left - 2 * K - Q + normed)
    return Footprint(kept=kept, forward=_highest(forward), backward=_highest(backward), leaves=0)


def _highest(instants: list[Column]) -> Column:
    return functools.reduce(np.maximum, instants)
