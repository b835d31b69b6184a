"""How parameters are grouped into gradient buckets, and which buckets ZeRO-3 gathers in 8 bits.

The predicted program and the running engine share one function: gradients in the order in which a backward pass
completes them, cut where a bucket is full (Li et al. 2020, "PyTorch Distributed", section 3.2).

If the gradients of experts reduce over other ranks than the rest, experts have separate buckets, which fill
independently; all buckets are issued in the order in which they become full.

With job.precision.gather = "float8", ZeRO-3 gathers in 8 bits the matrices that products of 8-bit floats read. A
whole matrix has one scale, but each rank has only part of the matrix. So once a step, as soon as parameters are
updated, ranks reduce to their maximum

    the largest magnitude in each matrix (of each expert)     from which every rank finds the same scale
    what is not a matrix: norms, biases, routers              from the rank that has it; the others send -inf

and each rounds its shard. A gather then moves one byte an element. What arrives is what rounding the whole matrix
would give, to the bit. Reference: torchao's float8 all-gather for FSDP2 (torchao/float8/fsdp_utils.py,
`precompute_float8_dynamic_scale_for_fsdp`), which finds the scales of all matrices in one all-reduce after the
optimizer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.spec.job import DTYPE_BYTES, Job, Precision
from phalanx.spec.model.spec import ModelSpec, Parameter, StageSpec, chunks, parameters
from phalanx.spec.strategy.compressors import BLOCK
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_ALIGNED = 16  # elements: 64 bytes in fp32


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced in one collective, in the order in which they become ready."""

    index: int
    parameters: tuple[Parameter, ...]
    unit: str = ""
    """The unit whose parameters (or whose experts') the bucket gathers at zero=3; else empty."""
    experts: bool = False
    """Whether the bucket holds only experts, which reduce over `edp`; other buckets reduce over dp and cp."""
    fragment: int = 0
    """Number of the fragment with which it is synchronised by replicas that take steps alone."""

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(p.numel for p in self.parameters)

    @property
    def name(self) -> str:
        """Name in events: the unit's at zero=3, else `bucket.N`."""
        if self.unit:
            return f"{self.unit}.experts" if self.experts else self.unit
        return f"bucket.{self.index}"

    def kind(self, what: str) -> str:
        """Return `what`, a name of traffic, marked if this is a bucket of experts: they communicate over other
        ranks."""
        return f"{what}, experts" if self.experts else what

    def ranks(self, strategy: Strategy) -> int:
        """Return the number of ranks over which its gradients are summed."""
        return strategy.edp if self.experts else strategy.gradient_ranks

    def axis(self, strategy: Strategy) -> str:
        """Return the mesh axis that its gradients are reduced (or, if sharded, reduce-scattered) over."""
        grid = mesh(strategy)
        return "edp" if self.experts else grid.shard_axis if strategy.shards > 1 else grid.gradient_axis

    def parts(self, strategy: Strategy) -> int:
        """Return the number of equal parts of its flat buffer."""
        return layout(strategy, self.experts)[0]

    def replicas(self, strategy: Strategy) -> int:
        """Return the number of ranks that end with the same part of its gradients."""
        if strategy.shards > 1:
            return 1 if self.experts else strategy.dp_replicate
        return self.ranks(strategy)

    def across(self, strategy: Strategy) -> bool:
        """Whether each part is also reduced over its replicas (HSDP)."""
        return strategy.shards > 1 and self.replicas(strategy) > 1

    def padded(self, strategy: Strategy) -> int:
        """Return the elements of its flat buffer: equal parts, each a multiple of the aligned granule."""
        parts, aligned = layout(strategy, self.experts)
        return -(-self.numel // (parts * aligned)) * parts * aligned if parts > 1 else self.numel


def layout(strategy: Strategy, experts: bool = False) -> tuple[int, int]:
    """Return (number of equal parts, granule in elements) of a bucket: one part per shard, each a multiple of a cache
    line. Separate buckets of `experts` are cut over all ranks that hold the same experts. Quantised gradients are
    summed part by part at zero 0 too, and their blocks are not cut."""
    if experts:
        return (strategy.edp, _ALIGNED) if strategy.shards > 1 else (1, _ALIGNED)
    c = strategy.compressor
    if c is not None and c.quantised:
        if strategy.shards == 1:
            return strategy.gradient_ranks, BLOCK
        return strategy.shards, BLOCK * strategy.dp_replicate
    c = strategy.outer_compressor  # of the changes of replicas that take steps alone, in the memory of the gradients
    if c is not None and c.quantised:
        shards, replicas = strategy.shards, strategy.dp_local
        return (replicas, BLOCK) if shards == 1 else (shards, BLOCK * replicas)
    return strategy.shards, _ALIGNED


def backward_order(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Return the parameters in the order in which a backward pass completes their gradients. That is the reverse of
    the forward order; what several units share (unit `model`) is complete last."""
    backward = tuple(reversed(parameters(spec)))
    if isinstance(spec, StageSpec):  # one chunk after the other
        order = {unit: at for at, chunk in enumerate(reversed(spec.chunks)) for unit in chunk}
        backward = tuple(sorted(backward, key=lambda p: order.get(p.unit, 0)))
    of_units = tuple(p for p in backward if p.unit != "model")
    return of_units + tuple(p for p in backward if p.unit == "model")


def fill(order: Sequence[Parameter], element_bytes: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut a sequence of parameters into buckets of at most `bucket_bytes`; a larger parameter gets its own."""
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


def unit_buckets(spec: ModelSpec, separate: bool = False) -> tuple[Bucket, ...]:
    """Return one bucket per unit, in the order of the backward pass, preceded by one of its experts if they reduce
    separately (`separate`); what several units share (`model`) comes last."""
    groups: dict[tuple[str, bool], list[Parameter]] = {}
    for p in backward_order(spec):
        groups.setdefault((p.unit, separate and p.of_experts), []).append(p)
    # A backward pass completes a unit's experts before its attention.
    cut = sorted(groups, key=lambda key: (list(dict.fromkeys(unit for unit, _ in groups)).index(key[0]), not key[1]))
    return tuple(Bucket(i, tuple(groups[key]), *key) for i, key in enumerate(cut))


def buckets(local: ModelSpec, job: Job, strategy: Strategy) -> tuple[Bucket, ...]:
    """Return the buckets of a strategy. `local`: the part of the model that a rank holds."""
    count = job.outer.fragments if strategy.local else 1
    if sharding_of(strategy).parameters:
        cut = unit_buckets(local, strategy.separate_experts)
    else:
        cut = gradient_buckets(local, job, strategy.bucket_bytes, strategy.separate_experts, count)
    return tuple(replace(b, fragment=fragment(b.parameters[0], local, count)) for b in cut)


def fragment(p: Parameter, spec: ModelSpec, count: int) -> int:
    """Return the number of a parameter's fragment, out of `count` with equally many blocks: 0 for embeddings, the
    last for the head."""
    if p.unit == "head":
        return count - 1
    return int(p.unit.removeprefix("blocks.")) * count // spec.layers if p.unit.startswith("blocks.") else 0


def gradient_buckets(
    spec: ModelSpec, job: Job, bucket_bytes: int, separate: bool = False, fragments: int = 1
) -> tuple[Bucket, ...]:
    """Return buckets of up to `bucket_bytes` of the reduced type, across units. With `separate`, experts share none
    with other parameters; different `fragments` share none. On a pipeline rank no bucket crosses chunks, and a tied
    embedding has its own, so that it is cut in the same way as its copy on the other rank."""
    result: list[Bucket] = []
    order, e = backward_order(spec), DTYPE_BYTES[job.precision.reduce_dtype]
    parts: list[Sequence[Parameter]] = [order]
    if isinstance(spec, StageSpec):
        groups = [(*chunk,) for chunk in reversed(spec.chunks)] + [("model",)]
        parts = [[p for p in order if p.unit in units] for units in groups]
    if fragments > 1:
        parts = [tuple(run) for part in parts for _, run in groupby(part, lambda p: fragment(p, spec, fragments))]
    at = {p.fqn: i for i, p in enumerate(order)}
    for part in parts:
        alone = [p for p in part if separate and p.of_experts]
        cut = list(fill([p for p in part if not (separate and p.of_experts)], e, bucket_bytes))
        cut += [replace(b, experts=True) for b in fill(alone, e, bucket_bytes)]
        cut.sort(key=lambda b: at[b.parameters[-1].fqn])
        result += [replace(b, index=len(result) + i) for i, b in enumerate(cut)]
    return tuple(result)


def chunk_buckets(
    cut: Sequence[Bucket], spec: ModelSpec, finished: Sequence[int], early: bool
) -> tuple[list[int], ...]:
    """Return for each chunk of a rank the indices of the buckets that its backward passes fill, in the order in which
    they are issued.

    `finished`: chunks in the order of their last backward passes. The bucket that chunks share is complete with the
    last of them; with `early`, where every backward pass is reduced separately, with each of them.
    """
    held = chunks(spec)
    shared = [b.index for b in cut if b.parameters[0].unit == "model"] if isinstance(spec, StageSpec) else []
    users = [i for i in finished if "embed" in held[i] or "head" in held[i]]
    result = []
    for i, units in enumerate(held):
        indices = [
            b.index for b in cut if b.index not in shared and (len(held) == 1 or b.parameters[0].unit in units)
        ]
        if shared and i in (users if early else users[-1:]):
            indices = indices + shared if "embed" in units else shared + indices  # ready last; first
        result.append(indices)
    return tuple(result)


def slots(sizes: list[int]) -> list[int]:
    """Return the buffer, 0 to 2, of each bucket of a sequence, of which at most two neighbours are in use at a time.
    The first and the last, usually the largest, share one; those between alternate. Two buckets have one each."""
    last = len(sizes) - 1
    return [0 if i in (0, last) and last > 1 else 1 + i % 2 for i in range(len(sizes))]


def reduction_slots(spec: ModelSpec, cut: Sequence[Bucket], strategy: Strategy) -> tuple[list[int], list[int]]:
    """Return (the buffer that each bucket uses for gradients in flight, the elements of each buffer). A pipeline
    rank's tied embedding, which is complete at another time than its neighbours in the order, has its own buffer;
    buckets of experts, which fill independently, alternate among themselves."""
    tied = isinstance(spec, StageSpec) and cut[-1].parameters[0].unit == "model"
    last = cut[-1:] if tied else ()
    kinds = ([b for b in cut if not b.experts and b not in last], [b for b in cut if b.experts], last)
    turn: dict[int, int] = {}
    sizes: list[int] = []
    for kind in kinds:
        elements = [b.padded(strategy) for b in kind]
        turn |= {b.index: len(sizes) + slot for b, slot in zip(kind, slots(elements), strict=True)}
        sizes += slot_sizes(elements)
    return [turn[b.index] for b in cut], sizes


def slot_sizes(sizes: list[int]) -> list[int]:
    """Return the elements of each of the three buffers of `slots`."""
    used = [0, 0, 0]
    for size, slot in zip(sizes, slots(sizes), strict=True):
        used[slot] = max(used[slot], size)
    return used


SCALES = "scales"
"""The unit, in events, of the all-reduce of scales."""
PARAMETERS, PARAMETERS_IN_8_BITS = "parameters", "8-bit parameters"
"""Names, in terms, of gathers in the compute type and in 8 bits."""
NUMBER_BYTES = 4
"""Bytes of an element of the all-reduce of scales: fp32, which represents every number of the compute type."""


def scales(p: Parameter) -> int:
    """Return the number of scales of a parameter in 8 bits: one for each matrix that products read. 0: it keeps its
    type, as a router does, whose products are of the compute type."""
    return p.matrices


def gathers_in_8_bits(bucket: Bucket, precision: Precision) -> bool:
    """Whether a bucket is gathered in 8 bits: a block's is, at zero=3."""
    return precision.gathers_narrow and bucket.unit.startswith("blocks.")


def gathered_elements(bucket: Bucket, padded: int, precision: Precision) -> int:
    """Return the size of a gathered bucket of `padded` elements in memory, in elements of the compute type (two bytes
    if it is gathered in 8 bits)."""
    return -(-padded // 2) if gathers_in_8_bits(bucket, precision) else padded


def scale_elements(cut: Iterable[Bucket]) -> int:
    """Return the number of elements in the all-reduce of scales for the buckets gathered in 8 bits."""
    return sum(scales(p) or p.numel for bucket in cut for p in bucket.parameters)
