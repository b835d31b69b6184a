"""Bytes of a rank's model state: weights, masters, optimizer state, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from phalanx.cost.compute import compression
from phalanx.cost.memory.attention_core import first_visible_bytes
from phalanx.schedule.gradients.buckets import buckets, layout, reduction_slots, slot_sizes
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.routing import depends_on_other_tokens, own_tokens
from phalanx.schedule.layers.tensor import summed_elements
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, as_seen_by, holds_one_tied_copy, parameters, units
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import Split, local_model


@dataclass(frozen=True)
class State:
    """Bytes that one rank holds throughout a step."""

    parameters: int
    master: int
    gradients: int
    optimizer: int
    buffers: int
    """Memory that buckets and units share in turn (gradients being reduced, gathered parameters), and the buffer in
    which tp ranks sum partial gradients."""
    tables: int
    batch: int
    compression: int = 0
    """Residuals (error feedback) and messages of compressed gradients."""
    scratch: int = 0
    """Temporary bytes of coding a gradient; not in `total`, since no term says when they are live."""

    @property
    def total(self) -> int:
        """Bytes held throughout the step."""
        model = self.parameters + self.master + self.gradients + self.optimizer
        return model + self.buffers + self.tables + self.batch + self.compression


Shard = tuple[int, int]
"""A rank's shard index in the model state, and in its experts' state where that is sharded over other ranks."""


def updated_elements(spec: ModelSpec, s: Strategy) -> int:
    """Return the elements that a rank updates, without padding, if shards are equal. `spec`: what the rank holds."""
    experts = sum(p.numel for p in parameters(spec) if p.of_experts) if s.separate_experts else 0
    return (spec.parameter_count - experts) // layout(s)[0] + experts // layout(s, experts=True)[0]


def owned_elements(spec: ModelSpec, job: Job, s: Strategy, shard: Shard) -> tuple[int, int]:
    """Return (elements, pieces of parameters) that the rank with this shard updates: its parts of the buckets,
    without padding."""
    elements = pieces = 0
    for bucket in buckets(spec, job, s):
        part = bucket.padded(s) // bucket.parts(s)
        first, start = shard[bucket.experts] * part, 0
        for p in bucket.parameters:
            overlap = min(start + p.numel, first + part) - max(start, first)
            elements, pieces = elements + max(0, overlap), pieces + (overlap > 0)
            start += p.numel
    return elements, pieces


def model_state(spec: ModelSpec, job: Job, s: Strategy, shard: Shard | None = None) -> State:
    """Return the model state of a rank: unsharded without ZeRO, else its shards of the padded buckets and the memory
    in which they are gathered or reduced; and its share of the batch, as int64 token ids. `shard`: the state of this
    shard exactly; without it, that of the rank that holds the most."""
    p, stage = job.precision, s.effective_zero
    cut = buckets(spec, job, s)
    padded = [b.padded(s) for b in cut]
    gradients = sum(padded)  # elements; parameters are views of buckets only with ZeRO-1 and 2
    local_spec = local_model(spec, s)
    n = gradients if stage else local_spec.parameter_count
    shard_elements = sum(b.padded(s) // b.parts(s) for b in cut) if stage else n
    master, reduce, accumulate = (DTYPE_BYTES[d] for d in (p.master_dtype, p.reduce_dtype, p.accumulate_dtype))
    c = s.compressor
    if c is not None:
        reduce = accumulate  # the compressor reads gradients in the accumulate dtype
    compute, separate_reduce_buffer = DTYPE_BYTES[p.compute], c is None and p.reduce_dtype != p.accumulate_dtype
    moments = {"adamw": 2, "sgd": 1 if job.optimizer.betas[0] else 0}[job.optimizer.name]
    elements, pieces = shard_elements, len(parameters(local_spec))
    if stage and shard is not None:
        elements, pieces = owned_elements(spec, job, s, shard)
    counters = 4 * pieces if job.optimizer.name == "adamw" else 0  # fp32 step counts
    separate = job.documents == "separate"
    context = Context(job.seq, s.ring, s.ulysses)
    rows = context.tokens if context.parallel and not separate else spec.max_seq
    rotary = rows * spec.rotary_width * compute if spec.position == "rotary" else 0
    # The mask of a window is built once, the same for every sequence.
    mask = job.seq**2 * compute if spec.masked(job.seq) and not separate else 0
    if context.parallel:
        mask = 0 if separate else sum(first_visible_bytes(spec, context, 1, False).values())
        mask += (context.tokens + job.seq) * 8  # positions
    in_flight = sum(reduction_slots(spec, cut, s)[1]) * reduce if stage >= 2 else 0
    if stage == 3:
        gathered = sum(b.padded(s) for b in cut if b.unit == "model")
        for experts in (False, True):
            sizes = [b.padded(s) for b in reversed(cut) if b.unit != "model" and b.experts == experts]
            gathered += sum(sizes) if s.gathers_once else sum(slot_sizes(sizes))
        in_flight += gathered * compute
    return State(
        parameters=0 if stage == 3 else n * compute,
        master=shard_elements * master if stage == 3 or p.master_dtype != p.compute else 0,
        gradients=gradients * (accumulate + reduce * separate_reduce_buffer)
        if stage <= 1
        else shard_elements * accumulate,
        optimizer=elements * moments * master + counters,
        buffers=in_flight + partial_gradient_bytes(spec, job, s),
        tables=rotary + mask + _expert_tables(spec, job, s),
        batch=job.global_batch // s.dp * prod(context.shape(1, separate)) * 8,
        compression=compression.held_bytes(c, cut, s, accumulate) if c else 0,
        scratch=compression.scratch_bytes(c, cut, s, accumulate) if c else 0,
    )


def _expert_tables(spec: ModelSpec, job: Job, s: Strategy) -> int:
    """Return bytes of what each layer with experts keeps: load counters, balance biases, and which tokens the rank
    routes."""
    x = spec.experts
    if x is None:
        return 0
    layers = sum(as_seen_by(spec, unit).experts is not None for unit in units(spec) if unit.startswith("blocks"))
    tables = layers * ((x.count + 3) * 8 + x.count * 4 * (x.balance_bias is not None))
    if depends_on_other_tokens(x, s):
        tokens = s.micro_batch * job.seq
        tables += (tokens + own_tokens(tokens // s.cp, s.tp, 0)) * 8
    return tables


def partial_gradient_bytes(spec: ModelSpec, job: Job, s: Strategy) -> int:
    """Return bytes of the buffer in which tp ranks sum gradients of which each has a part."""
    if s.tp == 1:
        return 0
    elements = summed_elements(Split.of(spec, s), buckets(spec, job, s), s)
    return elements * DTYPE_BYTES[job.precision.accumulate_dtype]


def tied_gradient_bytes(spec: ModelSpec, job: Job, s: Strategy) -> int:
    """Return bytes of a tied embedding's gradient, of which the first and the last pipeline rank have a part each;
    else 0."""
    if not holds_one_tied_copy(spec):
        return 0
    bucket = next(b for b in buckets(spec, job, s) if b.parameters[0].unit == "model")
    return bucket.padded(s) // bucket.parts(s) * DTYPE_BYTES[job.precision.accumulate_dtype]


def cast_gradients(elements: int, job: Job) -> int:
    """Return bytes of `elements` gradients cast to the master dtype during the update; 0 if they have it already."""
    p = job.precision
    return 0 if p.master_dtype == p.accumulate_dtype else elements * DTYPE_BYTES[p.master_dtype]
