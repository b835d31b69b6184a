"""Legality: whether a strategy fits a model, a batch and a world size (`check`), and whether the trainer runs it
(`require_runnable`).

Every rule raises an InputError with the numbers that clash and, if there is one, a remedy.

Requirements of context parallelism on a model and a sequence: equal parts for all of its ranks.

cp = ring x ulysses: the ring passes keys and values around (Liu et al. 2023), Ulysses gives each of its ranks a part
of the heads (Jacobs et al. 2023). Both together: Fang & Zhao 2024, "USP". A ring of r ranks cuts a sequence into
2r chunks, two per rank, so that causal attention costs all of them the same.
"""

import math
from collections.abc import Iterator
from typing import Literal

from phalanx.spec.errors import InputError
from phalanx.spec.job import DType, Job, Precision, Train
from phalanx.spec.model.blocks.block import Block, products_of
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Conv, Dim, Scan
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import OuterOptimizer
from phalanx.spec.strategy import compressors
from phalanx.spec.strategy.spec import AXES, Strategy, divisors, pieces
from phalanx.spec.strategy.split import require_split


def require_context(spec: ModelSpec, seq: int, s: Strategy) -> None:
    """Raise InputError where cp does not cut sequences of `seq` tokens, or the heads, into equal parts."""
    if s.cp == 1:
        return
    chunks = 2 * s.ring if s.ring > 1 else 1
    for n, label in ((s.cp, f"strategy.cp = {s.cp}"), (chunks, f"{chunks}, the chunks of a ring of {s.ring}")):
        if seq % n:
            raise InputError(
                "job.seq", seq, f"is not divisible by {label}", f"use a multiple of {math.lcm(s.cp, chunks)}"
            )
    for block in architecture(spec).kinds:
        for attend in block.all(Attend):
            _require_parts(attend.y.dim, "ulysses", s)
            _require_parts(attend.kv, "ulysses", s, copies=True)
        for scan in block.all(Scan):
            _require_parts(scan.y.dim, "cp", s)
            _require_parts(scan.groups, "cp", s, copies=scan.groups.copies)
        conv, tokens = block.first(Conv), seq // s.cp // pieces(s.ring, s.ulysses)
        if conv is not None and block.first(Scan) is None and tokens < conv.taps - 1:
            reason = f"leaves pieces of {tokens} tokens, and a convolution sees {conv.taps - 1} before each"
            raise InputError("strategy.cp", s.cp, reason, "use a smaller cp, or longer sequences")


def _require_parts(heads: Dim, field: Literal["ulysses", "cp"], s: Strategy, copies: bool = False) -> None:
    """Require that the ranks of a field divide a tp rank's heads, or that several can hold `copies` of one."""
    ranks, held = getattr(s, field), heads.groups(s)
    if held % ranks == 0 or (copies and ranks % held == 0):
        return
    name = f"model.{heads.of} = {held}" + (f" of a tp rank ({heads.count} / {s.tp})" if s.tp > 1 else "")
    if copies:
        remedy = "a key head is not split: one rank holds it, or several hold copies"
        raise InputError(f"strategy.{field}", ranks, f"neither divides {name} nor is a multiple of it", remedy)
    remedy = "every rank must take the same number of heads"
    raise InputError(f"strategy.{field}", ranks, f"does not divide {name}", remedy)


def check(strategy: Strategy, model: ModelSpec, job: Job, world: int | None) -> None:
    """Require that a strategy fits this model and this job on `world` ranks (None: any number of them).

    Raises InputError for a wrong world size, a batch that does not split over dp and micro_batch, layers, sequences
    or tokens that do not split evenly, and a sequence that is too long for the model.
    """
    s = strategy
    # Ranks and the batch.
    if world is not None and s.world != world:
        factors = " x ".join(f"{axis}={getattr(s, axis)}" for axis in AXES)
        remedy = f"make the product {world}"
        raise InputError("strategy", str(s), f"{factors} = {s.world} ranks, but there are {world}", remedy)
    if job.global_batch % (s.micro_batch * s.dp):
        if job.global_batch % s.dp:
            fits = divisors(job.global_batch)
            remedy = f"use one of {_first_twelve(fits)}"
            raise InputError("strategy.dp", s.dp, f"does not divide job.global_batch = {job.global_batch}", remedy)
        per_replica = job.global_batch // s.dp
        fits = divisors(per_replica)
        reason = f"micro_batch x dp = {s.micro_batch} x {s.dp} does not divide job.global_batch = {job.global_batch}"
        raise InputError("strategy.micro_batch", s.micro_batch, reason, f"use one of {_first_twelve(fits)}")
    # Layers, and how many of them are recomputed.
    require_split(model, s)
    kind, _, k = s.recompute.partition(":")
    if kind in ("block", "uniform") and int(k) > model.layers:
        raise InputError("strategy.recompute", s.recompute, f"the model has {model.layers} blocks", "use fewer")
    if kind == "every" and int(k) > model.layers:
        reason = f"recomputes the first block alone: there are {model.layers}"
        raise InputError("strategy.recompute", s.recompute, reason, f"use every:k with k up to {model.layers}")
    if model.experts is not None and s.separate_experts and (s.compressor or s.outer_compressor):
        reason = "needs all gradients to reduce over the same ranks, and expert gradients reduce over others"
        raise InputError("strategy.compression", s.compression, reason, "use ep=1 and etp=1, or leave it out")
    if s.local and model.experts is not None and model.experts.balance_bias is not None:
        reason = "takes steps alone, but the experts' balance bias follows the counts of all replicas in every step"
        raise InputError("strategy.local", s.local, reason, "use local=0, or a model without balance_bias")
    if s.local:
        _require_fragments(job.outer, s.local, model.layers)
    # Sequences and tokens.
    require_context(model, job.seq, s)
    if s.sp and s.micro_batch * job.seq // s.cp % s.tp:
        raise InputError(
            "strategy.sp",
            1,
            f"tp = {s.tp} does not divide the tokens of a micro-batch, micro_batch x job.seq = "
            f"{s.micro_batch} x {job.seq}" + (f", over cp = {s.cp}" if s.cp > 1 else ""),
            "use another micro_batch, or leave sp out",
        )
    # Number formats.
    if job.precision.operands is not None:
        require_narrow(model, job, s)
    if job.precision.gathers_narrow and not (s.level.parameters and s.shards > 1) and not s.sp:
        shards = "1 rank" if s.shards == 1 else f"{s.shards} ranks"
        reason = f"is of what zero=3 and sp gather, and zero={s.zero} over {shards} without sp gathers nothing"
        remedy = "use zero=3 over several ranks or sp=1, or leave it out"
        raise InputError("job.precision.gather", "float8", reason, remedy)
    if job.seq > model.max_seq:
        remedy = f"shorten seq, or set model.max_seq={job.seq}"
        raise InputError("job.seq", job.seq, f"is longer than model.max_seq = {model.max_seq}", remedy)


def require_narrow(model: ModelSpec, job: Job, s: Strategy) -> None:
    """Require that products of a model's blocks can be of the job's narrow format, whose kernels take multiples of a
    few numbers (torch's _scaled_mm). Raises InputError."""
    field, value, operands = "job.precision.products", job.precision.products, job.precision.operands
    assert operands is not None
    multiple = operands.multiple
    tokens = s.micro_batch * job.seq // s.cp
    sizes = [("model.hidden", model.hidden, model.hidden)]  # (name, all of it, a rank's part)
    for block in architecture(model).kinds:
        dims = sorted(_narrow_dims(block), key=lambda named: not named[1].of)  # a field's before what follows from it
        sizes += [(name, dim.size, dim.here(s)) for name, dim in dims]
    sizes.append(("tokens of a micro-batch on a rank", tokens, tokens))
    # Whole and divided, each must be a multiple.
    for name, size, held in sizes:
        if size % multiple or held % multiple:
            what = f"{name} = {size}" if size % multiple else f"{name} over {size // held} ranks = {held}"
            reason = f"takes multiples of {multiple}, and {what}"
            raise InputError(field, value, reason, "change it, or leave it out")


def _narrow_dims(block: Block) -> Iterator[tuple[str, Dim]]:
    """Yield the inner and outer dimensions, with names, of a block's products that may be of a narrow format: not a
    router's, and not numbers for each token or head."""
    for sublayer in block.sublayers:
        for op in products_of(sublayer):
            if op.weights[0].role == "router" or op.y[0].dim.size == 1:
                continue
            by_head = any(out.dim.each > 1 for out in op.y)
            dims = [(out.name, out.dim) for out in op.y if not (by_head and out.dim.axis and out.dim.each == 1)]
            for name, dim in ((op.x, op.into), *dims):
                if dim.of:
                    yield f"model.{dim.of}" + (f" x {dim.each}" if dim.each > 1 else ""), dim
                elif name not in ("n", "y"):
                    yield f"{sublayer.name}.{name}", dim


def require_runnable(strategy: Strategy, job: Job) -> None:
    """Require that the trainer can run a strategy with the job's number types.

    Raises InputError naming a field value that is part of the grammar but not run or priced yet.
    """
    p = job.precision
    _require_in_range(p)
    # When gradients reduce and parameters are gathered.
    if strategy.grad_sync == "micro" and not strategy.level.gradients:
        raise InputError(
            "strategy.grad_sync", "micro", f"zero={strategy.zero} reduces gradients once a step", "use zero=2 or 3"
        )
    if strategy.grad_sync == "step" and strategy.level.parameters:
        raise InputError(
            "strategy.grad_sync", "step", "zero=3 has no room for unsharded gradients", "use zero=2, or leave it out"
        )
    if strategy.reshard is not None and not strategy.level.parameters:
        raise InputError("strategy.reshard", strategy.reshard, "only zero=3 gathers parameters", "leave it out")
    if strategy.reshard == "action" and strategy.pp > 1:
        reason = "is part of the grammar but not yet runnable with pp > 1"
        raise InputError("strategy.reshard", "action", reason, "leave it out: each unit is gathered once a step")
    # Compression.
    require_compressible(strategy, p.accumulate_dtype)
    compressor = strategy.compressor or strategy.outer_compressor
    if strategy.tp > 1 and compressor is not None:
        reason = "rounds replicated gradients differently on each tp rank"
        raise InputError("strategy.compression", strategy.compression, reason, "use tp=1, or leave it out")
    if strategy.pp > 1 and compressor is not None:
        reason = "keeps residuals that differ between pipeline ranks, which checkpoints cannot store yet"
        raise InputError("strategy.compression", strategy.compression, reason, "use pp=1, or leave it out")
    if job.optimizer.row.whole and p.compute == "float16":
        reason = "sends directions in the compute type, and float16 has no room for their smallest numbers"
        raise InputError("job.optimizer.name", job.optimizer.name, reason, "use bfloat16")
    if strategy.local:
        _require_alone(strategy, p)
    # Fields with only some runnable values.
    strategy.recompute_of(0)  # refuses recomputation of other stacks
    if strategy.prefetch > 1:
        reason = "is part of the grammar but not yet runnable"
        raise InputError("strategy.prefetch", strategy.prefetch, reason, "leave it out or use 0, 1")


def _require_alone(s: Strategy, p: Precision) -> None:
    """Refuse options that replicas that take steps alone cannot have: a loss scale, of which checkpoints hold one for
    all, and a compressor that takes gradients only. Raises InputError."""
    if p.compute == "float16":
        reason = f"has a loss scale, which replicas would change alone (local = {s.local})"
        raise InputError("job.precision.compute", p.compute, reason, "leave it out, or local=0")
    if s.outer_compressor is not None and s.outer_compressor.name == "powersgd":
        reason = f"takes gradients of whole matrices, not the changes of replicas that step alone (local = {s.local})"
        raise InputError("strategy.compression", s.compression, reason, "use one of the others, or local=0")


def _require_fragments(outer: OuterOptimizer, local: int, layers: int) -> None:
    """Require that fragments with a block each synchronise at regular steps, and are applied before they are sent
    again. Raises InputError."""
    if outer.fragments > layers:
        reason = f"needs a block for each fragment, and the model has {layers}"
        raise InputError("job.outer.fragments", outer.fragments, reason, f"use at most {layers}")
    if local % outer.fragments:
        fits = [n for n in divisors(local) if n <= layers]
        reason = f"does not divide strategy.local = {local}"
        raise InputError("job.outer.fragments", outer.fragments, reason, f"use one of {_first_twelve(fits)}")
    if outer.delay >= local // outer.fragments:
        reason = f"is not below the {local // outer.fragments} steps between two synchronisations"
        raise InputError("job.outer.delay", outer.delay, reason, f"use at most {local // outer.fragments - 1}")


def require_synchronised(s: Strategy, train: Train) -> None:
    """Require that replicas that take steps alone synchronise before every evaluation, checkpoint and comparison, and
    before the end. Raises InputError."""
    if not s.local:
        return
    for name in ("steps", "eval_every", "save_every", "check_sync"):
        if (n := getattr(train, name)) % s.local:
            low = n - n % s.local
            reason = f"does not end with a synchronisation, which takes place every {s.local} steps (local)"
            remedy = f"use {low + s.local}" if not low else f"use {low} or {low + s.local}"
            raise InputError(f"train.{name}", n, reason, remedy)


def _require_in_range(p: Precision) -> None:
    """Raise InputError for float16 where no loss scale keeps the numbers within its range (Micikevicius et al. 2018),
    and for narrow products without bfloat16, the one result type of their kernels with a scale per row."""
    operands = p.operands
    if operands is not None and p.compute != "bfloat16":
        reason = f"needs job.precision.compute = bfloat16, not {p.compute}"
        raise InputError("job.precision.products", p.products, reason, "set both")
    if p.gathers_narrow and not (operands and operands.gathers):
        scales = f"has scales of {operands.scales}s, and of columns backward" if operands else ""
        why = scales or "reads all bits of them"
        reason = f"needs job.precision.products = float8, for {p.products} {why}"
        raise InputError("job.precision.gather", p.gather, reason, "set both, or leave it out")
    for name, dtype, why in (
        ("accumulate", p.accumulate_dtype, "gradient sums overflow its range"),
        ("master", p.master_dtype, "small updates and Adam's eps underflow in it"),
    ):
        if dtype == "float16":
            raise InputError(f"job.precision.{name}", dtype, why, "use float32")
    if p.reduce_dtype == "float16" and p.compute != "float16":
        reason = f"needs the loss scale, which compute = {p.compute} does not have"
        remedy = "use bfloat16, or compression=fp16, which scales every block"
        raise InputError("job.precision.reduce", "float16", reason, remedy)


def require_compressible(strategy: Strategy, accumulate: DType) -> None:
    """Require that gradients summed in type `accumulate` can be compressed as the strategy says.

    Raises InputError for compressors of unsharded buckets at zero=3, which holds shards only, and for residuals in
    less than float32.
    """
    compressor = compressors.parse(strategy.compression)
    if compressor is None:
        return
    if strategy.level.parameters and not compressor.quantised and not strategy.local:
        reason = "reduces unsharded buckets, but zero=3 has no room for them"
        remedy = "use zero=2, or one of fp16, bf16, int8, int4"
        raise InputError("strategy.compression", strategy.compression, reason, remedy)
    if accumulate not in ("float32", "float64"):
        raise InputError(
            "job.precision.accumulate", accumulate, "is too coarse for compression's residuals", "use float32"
        )


def _first_twelve(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")
