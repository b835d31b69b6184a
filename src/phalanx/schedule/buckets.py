"""How parameters fall into gradient buckets.

One function for the program that is predicted and for the engine that runs: the order in which gradients become
ready in a backward pass, cut where a bucket is full (Li et al. 2020, "PyTorch Distributed", section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from phalanx.spec.compression import BLOCK
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model import ModelSpec, Parameter, StageSpec, chunks, parameters
from phalanx.spec.split import local
from phalanx.spec.strategy import Strategy

_ALIGNED = 16  # elements: 64 bytes in fp32


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced in one collective, in the order in which they become ready."""

    index: int
    parameters: tuple[Parameter, ...]
    unit: str = ""
    """At zero=3, where a bucket is what a unit gathers."""

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def name(self) -> str:
        return self.unit or f"bucket.{self.index}"

    def padded(self, strategy: Strategy) -> int:
        """Elements of its flat buffer: equal parts, each a whole number of what may not be cut."""
        parts, aligned = layout(strategy)
        return -(-self.numel // (parts * aligned)) * parts * aligned if parts > 1 else self.numel


def layout(strategy: Strategy) -> tuple[int, int]:
    """(Equal parts that a bucket falls into, elements that stay together in one): the shards, of whole cache lines.
    Codes of a quantised gradient are summed part by part at stage 0 too, and their blocks are not cut."""
    c = strategy.compressor
    if c is not None and c.quantised:
        if strategy.stage == 0:
            return strategy.gradient_ranks, BLOCK
        return strategy.shards, BLOCK * strategy.dp_replicate
    return (strategy.shards, _ALIGNED) if strategy.stage else (1, _ALIGNED)


def backward_order(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Parameters in the order in which a backward pass finishes their gradients.

    The reverse of the forward order; what several units share (unit `model`) is finished last.
    """
    backward = tuple(reversed(parameters(spec)))
    if isinstance(spec, StageSpec):  # a chunk after the other
        order = {unit: at for at, chunk in enumerate(reversed(spec.chunks)) for unit in chunk}
        backward = tuple(sorted(backward, key=lambda p: order.get(p.unit, 0)))
    own = tuple(p for p in backward if p.unit != "model")
    return own + tuple(p for p in backward if p.unit == "model")


def fill(order: Sequence[Parameter], element_bytes: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut an order of parameters into buckets of at most `bucket_bytes`; a larger parameter stands alone."""
    buckets: list[Bucket] = []
    waiting: list[Parameter] = []
    size = 0
    for p in order:
        if waiting and size + p.numel * element_bytes > bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(waiting)))
            waiting, size = [], 0
        waiting.append(p)
        size += p.numel * element_bytes
    if waiting:
        buckets.append(Bucket(len(buckets), tuple(waiting)))
    return tuple(buckets)


def unit_buckets(spec: ModelSpec) -> tuple[Bucket, ...]:
    """A bucket for every unit, in the order of the backward pass; what several units share (`model`) comes last."""
    found: dict[str, list[Parameter]] = {}
    for p in backward_order(spec):
        found.setdefault(p.unit, []).append(p)
    return tuple(Bucket(i, tuple(own), unit) for i, (unit, own) in enumerate(found.items()))


def buckets(spec: ModelSpec, job: Job, strategy: Strategy) -> tuple[Bucket, ...]:
    """What a strategy reduces at once: of a rank's own part of the model, where tensor parallelism splits it."""
    held = local(spec, strategy.tp)
    if strategy.stage == 3:
        return unit_buckets(held)
    return gradient_buckets(held, job, strategy.bucket_bytes)


@cache
def gradient_buckets(spec: ModelSpec, job: Job, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of any units, full at `bucket_bytes` of the type that is reduced. A pipeline rank's have units of one
    chunk; and a tied embedding has its own, so that it is cut alike where its other copy is."""
    found: list[Bucket] = []
    order, e = backward_order(spec), DTYPE_BYTES[job.precision.reduce_dtype]
    parts: list[Sequence[Parameter]] = [order]
    if isinstance(spec, StageSpec):
        own = [(*chunk,) for chunk in reversed(spec.chunks)] + [("model",)]
        parts = [[p for p in order if p.unit in units] for units in own]
    for part in parts:
        found += [replace(b, index=len(found) + b.index) for b in fill(part, e, bucket_bytes)]
    return tuple(found)


def of_chunks(cut: Sequence[Bucket], spec: ModelSpec, finished: Sequence[int], early: bool) -> tuple[list[int], ...]:
    """For each chunk that is held, the buckets that its backward passes fill, in the order in which they are issued.
    `finished`: chunks in the order of their last backward passes. What chunks share is complete with the last of
    them; or `early`, where every backward pass is reduced by itself, with each."""
    held = chunks(spec)
    shared = [b.index for b in cut if b.parameters[0].unit == "model"] if isinstance(spec, StageSpec) else []
    users = [i for i in finished if "embed" in held[i] or "head" in held[i]]
    found = []
    for i, units in enumerate(held):
        own = [b.index for b in cut if b.index not in shared and (len(held) == 1 or b.parameters[0].unit in units)]
        if shared and i in (users if early else users[-1:]):
            own = own + shared if "embed" in units else shared + own  # ready last; first
        found.append(own)
    return tuple(found)


def slots(sizes: list[int]) -> list[int]:
    """Which of three buffers each bucket of a sequence uses, when at most two neighbours are in use at a time: the
    first and the last, the largest as a rule, share one; those between take turns. Two have one each."""
    last = len(sizes) - 1
    return [0 if i in (0, last) and last > 1 else 1 + i % 2 for i in range(len(sizes))]


def lent(spec: ModelSpec, cut: Sequence[Bucket], strategy: Strategy) -> tuple[list[int], list[int]]:
    """(The buffer that each bucket uses for gradients on their way, the elements of each buffer.) A pipeline rank's
    tied embedding, which is ready when its neighbours in the order are not, has its own."""
    apart = isinstance(spec, StageSpec) and cut[-1].parameters[0].unit == "model"
    sizes = [b.padded(strategy) for b in cut]
    turns = sizes[:-1] if apart else sizes
    return slots(turns) + [3] * apart, slot_sizes(turns) + sizes[-1:] * apart


def slot_sizes(sizes: list[int]) -> list[int]:
    """Elements of each of these buffers."""
    used = [0, 0, 0]
    for size, slot in zip(sizes, slots(sizes), strict=True):
        used[slot] = max(used[slot], size)
    return used
