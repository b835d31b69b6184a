"""Live tensor bytes, as a maximum over instants and never as a sum of maxima.

State lives through the whole step. A forward pass of a unit leaves what its backward pass needs; a backward pass
frees that, and while it runs holds temporaries above what was live when it started. So every unit has three
numbers: what it keeps, and its temporaries forward and backward. The walk over the step's events adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost import compression
from phalanx.cost.kernel import Column
from phalanx.schedule.buckets import buckets, slot_sizes
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model import ModelSpec, parameters
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
    """Memory that buckets and units take turns in: gradients on their way, gathered parameters."""
    tables: int
    batch: int
    compression: int = 0
    """What was kept back of gradients, and messages."""

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


def state(spec: ModelSpec, job: Job, s: Strategy) -> State:
    """What a rank holds: at stage 0 everything whole, else its shards (of the padded buckets) and the memory in which
    they are whole for a time; and its share of the batch as int64 token ids."""
    p, stage, shards = job.precision, s.stage, s.dp_shard
    cut = buckets(spec, job, s)
    padded = [b.padded(s) for b in cut]
    whole = sum(padded)  # of gradients; parameters are views of buckets at stages 1 and 2 alone
    n = whole if stage else spec.parameter_count
    part = n // (shards if stage else 1)
    master, reduce, accumulate = (DTYPE_BYTES[d] for d in (p.master_dtype, p.reduce_dtype, p.accumulate_dtype))
    c = s.compressor
    if c is not None:
        reduce = accumulate  # the compressor reads gradients whole
    compute, narrow = DTYPE_BYTES[p.compute], c is None and p.reduce_dtype != p.accumulate_dtype
    moments = {"adamw": 2, "sgd": 1 if job.optimizer.betas[0] else 0}[job.optimizer.name]
    counters = 4 * len(parameters(spec)) if job.optimizer.name == "adamw" else 0  # fp32 step counts
    rotary = spec.max_seq * spec.head_dim * compute if spec.position == "rotary" else 0
    lent = sum(slot_sizes(padded)) * reduce if stage >= 2 else 0
    if stage == 3:
        units = [b.padded(s) for b in reversed(cut) if b.unit != "model"]
        shared = sum(b.padded(s) for b in cut if b.unit == "model")
        lent += (shared + (sum(units) if s.reshard == "step" else sum(slot_sizes(units)))) * compute
    return State(
        parameters=0 if stage == 3 else n * compute,
        master=part * master if stage == 3 or p.master_dtype != p.compute else 0,
        gradients=whole * (accumulate + reduce * narrow) if stage <= 1 else part * accumulate,
        optimizer=part * moments * master + counters,
        buffers=lent,
        tables=rotary,
        batch=job.global_batch // s.dp * (job.seq + 1) * 8 * (2 if job.documents == "separate" else 1),
        compression=compression.held(c, cut, s, accumulate) if c else 0,
    )


def cast_gradients(spec: ModelSpec, job: Job, shards: int) -> int:
    """This rank's gradients once more, in the master type, during the update; 0 where they are of it already."""
    p = job.precision
    if p.master_dtype == p.accumulate_dtype:
        return 0
    return spec.parameter_count // shards * DTYPE_BYTES[p.master_dtype]


def documents(spec: ModelSpec, job: Job, tokens: Column) -> Column:
    """What keeps documents apart in a micro-batch: the mask that all blocks share, and the angles of every token."""
    if job.documents == "packed":
        return 0
    angles = spec.head_dim if spec.position == "rotary" else 0
    return tokens * (job.seq + angles) * DTYPE_BYTES[job.precision.compute]


def footprint(spec: ModelSpec, unit: str, tokens: Column, seq: int, job: Job) -> Footprint:
    """Bytes of a unit class (`embed`, `blocks`, `head`) for `tokens` tokens of one micro-batch."""
    t, h, q, kv, f, v = tokens, spec.hidden, spec.q_width, spec.kv_width, spec.ffn, spec.vocab
    e = DTYPE_BYTES[job.precision.compute]
    wide = max(e, 4)  # statistics and sums
    stream = t * h * e  # the residual stream, and its gradient
    statistics = t * wide * (1 if spec.norm == "rms" else 2)
    normed_temporaries = (3 if e < 4 else 2) * t * h * wide + t * wide if spec.norm == "rms" else stream
    shared = v * h * e if spec.tied else 0  # the head's share of a tied weight's gradient waits for embed's
    if unit == "embed":
        position = spec.max_seq * h * e if spec.position == "learned" else 0
        # the rows of the embedding's gradient are those of the stream's, unless another type wants a copy
        wider = DTYPE_BYTES[job.precision.accumulate_dtype]
        return Footprint(
            kept=stream,
            forward=stream * (2 if job.documents == "separate" else 1) if spec.position == "learned" else 0,
            backward=np.maximum(t * h * wider if wider != e else 0, position),
            leaves=-stream - shared,
        )
    if unit == "head":
        kept = stream + statistics + t * v * e
        cast = np.minimum(t * v, max(v, LOGITS_AT_ONCE)) * wide if e < 4 else 0
        # backward: gradients of input and weight of the projection, or the norm's own temporaries, when the
        # normed input (one stream) has given way to its gradient
        normed = normed_temporaries - t * v * e
        return Footprint(
            kept=kept,
            forward=cast + 3 * t * wide,
            backward=np.maximum(stream + v * h * e, normed + shared),
            leaves=stream + shared,
        )
    gates = 3 if spec.activation == "swiglu" else 2
    attention = t * (2 * q + 2 * kv) * e + t * spec.heads * wide  # q, k, v, output, log-sum-exp
    mlp = gates * t * f * e
    norms = 2 * (stream + statistics)
    # Backward instants, in order, above the start: the MLP's second product, its activation, the norm, attention.
    down = t * f * e + f * h * e
    gate = (3 if spec.activation == "swiglu" else 1) * t * f * e
    into = 2 * stream + (f * h * e) - t * f * e
    after_mlp = -mlp  # and the normed input has given way to its gradient
    norm = after_mlp + normed_temporaries
    core = after_mlp + 2 * t * q * e + 2 * t * kv * e - statistics
    instants = [down, gate, into, norm, core]
    peak: Column = instants[0]
    for instant in instants[1:]:
        peak = np.maximum(peak, instant)
    return Footprint(kept=norms + attention + mlp + 2 * stream, forward=stream, backward=peak, leaves=0)
