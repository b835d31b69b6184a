"""Bytes of a rank's model state: weights, masters, optimizer state, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from phalanx.cost.compute import compression
from phalanx.cost.memory.attention_core import lowest
from phalanx.schedule.gradients.buckets import buckets, layout, lent, slot_sizes
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.routing import looks_around, own_tokens
from phalanx.schedule.layers.tensor import summed_elements
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, parameters, seen_from, tied_apart, units
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import Split, local


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


Shard = tuple[int, int]
"""Which shard of the model state is a rank's, and which of its experts' where those are sharded over other ranks."""


def updated_elements(spec: ModelSpec, s: Strategy) -> int:
    """Elements that a rank updates, padding aside, where they fall into equal parts. `spec`: what it holds."""
    experts = sum(p.numel for p in parameters(spec) if p.of_experts) if s.experts_apart else 0
    return (spec.parameter_count - experts) // layout(s)[0] + experts // layout(s, experts=True)[0]


def owned_elements(spec: ModelSpec, job: Job, s: Strategy, shard: Shard) -> tuple[int, int]:
    """(Elements, pieces of parameters) that a rank of a shard updates: its parts of the buckets without padding."""
    elements = pieces = 0
    for bucket in buckets(spec, job, s):
        part = bucket.padded(s) // bucket.parts(s)
        low, begins = shard[bucket.experts] * part, 0
        for p in bucket.parameters:
            mine = min(begins + p.numel, low + part) - max(begins, low)
            elements, pieces = elements + max(0, mine), pieces + (mine > 0)
            begins += p.numel
    return elements, pieces


def model_state(spec: ModelSpec, job: Job, s: Strategy, shard: Shard | None = None) -> State:
    """What a rank holds: at stage 0 everything whole, else its shards (of the padded buckets) and the memory in which
    they are whole for a time; and its share of the batch as int64 token ids. `shard`: a certain one, exactly; without
    one no rank holds more."""
    p, stage = job.precision, s.stage
    cut = buckets(spec, job, s)
    padded = [b.padded(s) for b in cut]
    whole = sum(padded)  # of gradients; parameters are views of buckets at stages 1 and 2 alone
    own = local(spec, s)
    n = whole if stage else own.parameter_count
    part = sum(b.padded(s) // b.parts(s) for b in cut) if stage else n
    master, reduce, accumulate = (DTYPE_BYTES[d] for d in (p.master_dtype, p.reduce_dtype, p.accumulate_dtype))
    c = s.compressor
    if c is not None:
        reduce = accumulate  # the compressor reads gradients whole
    compute, narrow = DTYPE_BYTES[p.compute], c is None and p.reduce_dtype != p.accumulate_dtype
    moments = {"adamw": 2, "sgd": 1 if job.optimizer.betas[0] else 0}[job.optimizer.name]
    elements, pieces = part, len(parameters(own))
    if stage and shard is not None:
        elements, pieces = owned_elements(spec, job, s, shard)
    counters = 4 * pieces if job.optimizer.name == "adamw" else 0  # fp32 step counts
    separate = job.documents == "separate"
    part_of = Context(job.seq, s.ring, s.ulysses)
    rows = part_of.tokens if part_of.parallel and not separate else spec.max_seq
    rotary = rows * spec.rotary_width * compute if spec.position == "rotary" else 0
    mask = job.seq**2 * compute if spec.masked(job.seq) and not separate else 0  # made once, of every sequence
    if part_of.parallel:
        mask = 0 if separate else sum(lowest(spec, part_of, 1, False).values())
        mask += (part_of.tokens + job.seq) * 8  # positions
    on_their_way = sum(lent(spec, cut, s)[1]) * reduce if stage >= 2 else 0
    if stage == 3:
        gathered = sum(b.padded(s) for b in cut if b.unit == "model")
        for experts in (False, True):
            of = [b.padded(s) for b in reversed(cut) if b.unit != "model" and b.experts == experts]
            gathered += sum(of) if s.gathers_once else sum(slot_sizes(of))
        on_their_way += gathered * compute
    return State(
        parameters=0 if stage == 3 else n * compute,
        master=part * master if stage == 3 or p.master_dtype != p.compute else 0,
        gradients=whole * (accumulate + reduce * narrow) if stage <= 1 else part * accumulate,
        optimizer=elements * moments * master + counters,
        buffers=on_their_way + partial_gradient_bytes(spec, job, s),
        tables=rotary + mask + _of_experts(spec, job, s),
        batch=job.global_batch // s.dp * prod(part_of.shape(1, separate)) * 8,
        compression=compression.held(c, cut, s, accumulate) if c else 0,
        scratch=compression.scratch(c, cut, accumulate) if c else 0,
    )


def _of_experts(spec: ModelSpec, job: Job, s: Strategy) -> int:
    """What is counted of experts in each layer, their balance biases, and which tokens are a rank's."""
    x = spec.experts
    if x is None:
        return 0
    layers = sum(seen_from(spec, unit).experts is not None for unit in units(spec) if unit.startswith("blocks"))
    tables = layers * ((x.count + 3) * 8 + x.count * 4 * (x.balance_bias is not None))
    if looks_around(x, s):
        tokens = s.micro_batch * job.seq
        tables += (tokens + own_tokens(tokens // s.cp, s.tp, 0)) * 8
    return tables


def partial_gradient_bytes(spec: ModelSpec, job: Job, s: Strategy) -> int:
    """Bytes of the buffer in which tp ranks add up gradients of which each has a part."""
    if s.tp == 1:
        return 0
    elements = summed_elements(Split.of(spec, s), buckets(spec, job, s), s)
    return elements * DTYPE_BYTES[job.precision.accumulate_dtype]


def tied_gradient_bytes(spec: ModelSpec, job: Job, s: Strategy) -> int:
    """Bytes of the gradient of a tied embedding, of which the first and the last pipeline rank have a part each."""
    if not tied_apart(spec):
        return 0
    bucket = next(b for b in buckets(spec, job, s) if b.parameters[0].unit == "model")
    return bucket.padded(s) // bucket.parts(s) * DTYPE_BYTES[job.precision.accumulate_dtype]


def cast_gradients(elements: int, job: Job) -> int:
    """So many gradients once more, in the master type, during the update; 0 where they are of it already."""
    p = job.precision
    return 0 if p.master_dtype == p.accumulate_dtype else elements * DTYPE_BYTES[p.master_dtype]
