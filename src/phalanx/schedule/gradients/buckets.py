"""How parameters fall into gradient buckets.

One function for the program that is predicted and for the engine that runs: the order in which gradients become
ready in a backward pass, cut where a bucket is full (Li et al. 2020, "PyTorch Distributed", section 3.2).

Experts whose gradients reduce over other ranks than all others' have buckets of their own, which fill beside the
others; all are issued in the order in which they are full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, Parameter, StageSpec, chunks, parameters
from phalanx.spec.strategy.compression import BLOCK
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local

_ALIGNED = 16  # elements: 64 bytes in fp32


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced in one collective, in the order in which they become ready."""

    index: int
    parameters: tuple[Parameter, ...]
    unit: str = ""
    """At zero=3, where a bucket is what a unit gathers, or its experts are."""
    experts: bool = False
    """Of experts alone, which go over `edp`; all others over the ranks of dp and cp."""

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def name(self) -> str:
        if self.unit:
            return f"{self.unit}.experts" if self.experts else self.unit
        return f"bucket.{self.index}"

    def kind(self, what: str) -> str:
        """What goes over the same ranks as this, by what it is."""
        return f"{what}, experts" if self.experts else what

    def ranks(self, strategy: Strategy) -> int:
        """Whose gradients of it are summed."""
        return strategy.edp if self.experts else strategy.gradient_ranks

    def axis(self, strategy: Strategy) -> str:
        """What its gradients are reduced over, to its parts where it has several."""
        grid = mesh(strategy)
        return "edp" if self.experts else grid.shard_axis if strategy.stage else grid.gradient_axis

    def parts(self, strategy: Strategy) -> int:
        """The equal parts of its flat buffer."""
        return layout(strategy, self.experts)[0]

    def replicas(self, strategy: Strategy) -> int:
        """Ranks that have the same part of its gradients in the end."""
        if strategy.stage:
            return 1 if self.experts else strategy.dp_replicate
        return self.ranks(strategy)

    def across(self, strategy: Strategy) -> bool:
        """Whether its parts are reduced over replicas of them (HSDP)."""
        return strategy.stage > 0 and self.replicas(strategy) > 1

    def padded(self, strategy: Strategy) -> int:
        """Elements of its flat buffer: equal parts, each a whole number of what may not be cut."""
        parts, aligned = layout(strategy, self.experts)
        return -(-self.numel // (parts * aligned)) * parts * aligned if parts > 1 else self.numel


def layout(strategy: Strategy, experts: bool = False) -> tuple[int, int]:
    """(Equal parts that a bucket falls into, elements that stay together in one): the shards, of whole cache lines.
    Those of `experts`, apart, are all ranks that have the same ones. Codes of a quantised gradient are summed part by
    part at stage 0 too, and their blocks are not cut."""
    if experts:
        return (strategy.edp, _ALIGNED) if strategy.stage else (1, _ALIGNED)
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


def unit_buckets(spec: ModelSpec, apart: bool = False) -> tuple[Bucket, ...]:
    """A bucket for every unit, in the order of the backward pass, and before it one of its experts where they are
    `apart`; what several units share (`model`) comes last."""
    found: dict[tuple[str, bool], list[Parameter]] = {}
    for p in backward_order(spec):
        found.setdefault((p.unit, apart and p.of_experts), []).append(p)
    # A unit's experts are done before its attention.
    cut = sorted(found, key=lambda key: (list(dict.fromkeys(unit for unit, _ in found)).index(key[0]), not key[1]))
    return tuple(Bucket(i, tuple(found[key]), *key) for i, key in enumerate(cut))


def buckets(spec: ModelSpec, job: Job, strategy: Strategy) -> tuple[Bucket, ...]:
    """What a strategy reduces at once: of a rank's own part of the model, where tensor parallelism splits it."""
    held = local(spec, strategy)
    if strategy.stage == 3:
        return unit_buckets(held, strategy.experts_apart)
    return gradient_buckets(held, job, strategy.bucket_bytes, strategy.experts_apart)


@cache
def gradient_buckets(spec: ModelSpec, job: Job, bucket_bytes: int, apart: bool = False) -> tuple[Bucket, ...]:
    """Buckets of any units, full at `bucket_bytes` of the type that is reduced; of experts alone, or of none, where
    they are `apart`. A pipeline rank's have units of one chunk; and a tied embedding has its own, so that it is cut
    alike where its other copy is."""
    found: list[Bucket] = []
    order, e = backward_order(spec), DTYPE_BYTES[job.precision.reduce_dtype]
    parts: list[Sequence[Parameter]] = [order]
    if isinstance(spec, StageSpec):
        own = [(*chunk,) for chunk in reversed(spec.chunks)] + [("model",)]
        parts = [[p for p in order if p.unit in units] for units in own]
    at = {p: i for i, p in enumerate(order)}
    for part in parts:
        cut = list(fill([p for p in part if not (apart and p.of_experts)], e, bucket_bytes))
        cut += [replace(b, experts=True) for b in fill([p for p in part if apart and p.of_experts], e, bucket_bytes)]
        cut.sort(key=lambda b: at[b.parameters[-1]])
        found += [replace(b, index=len(found) + i) for i, b in enumerate(cut)]
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
    tied embedding, which is ready when its neighbours in the order are not, has its own; buckets of experts, which
    fill beside the others, take turns among themselves."""
    apart = isinstance(spec, StageSpec) and cut[-1].parameters[0].unit == "model"
    alone = cut[-1:] if apart else ()
    kinds = ([b for b in cut if not b.experts and b not in alone], [b for b in cut if b.experts], alone)
    turn: dict[int, int] = {}
    sizes: list[int] = []
    for kind in kinds:
        own = [b.padded(strategy) for b in kind]
        turn |= {b.index: len(sizes) + slot for b, slot in zip(kind, slots(own), strict=True)}
        sizes += slot_sizes(own)
    return [turn[b.index] for b in cut], sizes


def slot_sizes(sizes: list[int]) -> list[int]:
    """Elements of each of these buffers."""
    used = [0, 0, 0]
    for size, slot in zip(sizes, slots(sizes), strict=True):
        used[slot] = max(used[slot], size)
    return used
