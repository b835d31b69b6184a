"""The work of a unit's passes, and its time on a device.

Work is counted in four kinds, each with its own rate; time is their sum:

    seconds = gemm_flops / P_gemm + attention_flops / P_attention + traffic_bytes / bandwidth + kernels x launch

Products of a narrow format are a fifth kind, with a rate of their own.

Since traffic includes the operands of matrix products, 2mnk/P + (mk + kn + mn) e/bandwidth gives small products
the efficiency k / (k + k0) that they show in practice. The rates are fitted by `measure` on real layers, so they
absorb caches, causal masks and recomputation inside fused kernels.

All counts are functions of `tokens` (of one micro-batch on one rank), a number or a NumPy column.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import dropwhile, takewhile

from phalanx.cost.compute import operators
from phalanx.cost.compute.operators import RankPass as RankPass
from phalanx.cost.compute.work import NO_WORK as NO_WORK
from phalanx.cost.compute.work import Column as Column
from phalanx.cost.compute.work import Narrow as Narrow
from phalanx.cost.compute.work import Work as Work
from phalanx.cost.compute.work import gemm, gemm_weight, memory
from phalanx.spec.cluster.spec import KernelRates
from phalanx.spec.errors import InputError
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.blocks.block import Block, Sublayer
from phalanx.spec.model.blocks.lowering import architecture, block_of
from phalanx.spec.model.blocks.operators import Attend, Combine, Dispatch, Linear, Operator
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Recompute


def forward(spec: ModelSpec, unit: str, p: RankPass) -> Work:
    """Return the work of one forward pass of a unit: `embed`, `blocks.i` or `head`. `spec`: the unsplit model."""
    t, e = p.tokens, p.e
    if unit == "embed":
        position = memory(3 * t * spec.hidden, e, 1) if spec.position == "learned" else NO_WORK
        return memory(2 * t * spec.hidden, e, 1) + position
    if unit == "head":
        vocab = architecture(spec).vocab.here(p.strategy)
        return _last_norm(spec, p) + gemm(t, vocab, spec.hidden, e) + memory(8 * t * vocab, e, 12)
    block, work = block_of(spec, unit), NO_WORK
    for op, s in _operators(block):
        work += operators.forward(op, s, p)
    return work + _added(spec, p) * len(block.sublayers)


def backward(spec: ModelSpec, unit: str, p: RankPass) -> Work:
    """Return the work of one backward pass of a unit: input gradients and weight gradients."""
    return input_grad(spec, unit, p) + weight_grad(spec, unit, p)


def weight_grad(spec: ModelSpec, unit: str, p: RankPass) -> Work:
    """Return the work of weight gradients, which may be deferred: products of inputs and output gradients; rows of
    the embedding."""
    t, h, e = p.tokens, spec.hidden, p.e
    vocab = architecture(spec).vocab.here(p.strategy)
    if unit == "embed":
        rows = memory((0 if spec.tied else vocab * h) + 3 * t * h, e, 4)
        return rows + (memory(3 * spec.max_seq * h + t * h, e, 4) if spec.position == "learned" else NO_WORK)
    if unit == "head":
        return gemm_weight(t, vocab, h, e)
    work = NO_WORK
    for op, _ in _operators(block_of(spec, unit)):
        work += operators.weight_grad(op, p)
    return work


def input_grad(spec: ModelSpec, unit: str, p: RankPass) -> Work:
    """Return the work of input gradients, which cannot be deferred, including gradients of norms' weights."""
    t, h, e = p.tokens, spec.hidden, p.e
    if unit == "embed":
        return NO_WORK
    if unit == "head":
        vocab = architecture(spec).vocab.here(p.strategy)
        return _last_norm(spec, p, backward=True) + gemm(t, h, vocab, e) + memory(2 * t * vocab, e, 1)
    block, work = block_of(spec, unit), NO_WORK
    for op, s in _operators(block):
        work += operators.input_grad(op, s, p)
    # The stream's gradient is added, and the gradients of products meet at one input.
    return work + _added(spec, p) * 2 * len(block.sublayers)


def head_products(spec: ModelSpec, p: RankPass) -> Work:
    """Return the work of the two products of the head's backward pass."""
    h, vocab = spec.hidden, architecture(spec).vocab.here(p.strategy)
    return gemm(p.tokens, h, vocab, p.e) + gemm_weight(p.tokens, vocab, h, p.e)


def head_norm_input_grad(spec: ModelSpec, p: RankPass) -> Work:
    """Return the work of the head's backward pass after its products: scaling their results, and the norm."""
    vocab = architecture(spec).vocab.here(p.strategy)
    return _last_norm(spec, p, backward=True) + memory(2 * (p.tokens + vocab) * spec.hidden, p.e, 2)


def recomputed_work(spec: ModelSpec, unit: str, repeat: Recompute, p: RankPass) -> Work:
    """Return the forward work that a block's backward pass recomputes (runtime/autograd/recompute.py): with `full`,
    all but the products whose results are not needed; with `selective`, cores of attention and recurrences."""
    if repeat == "none":
        return NO_WORK
    block, again, unneeded = block_of(spec, unit), NO_WORK, NO_WORK
    if repeat == "selective":
        for s in block.sublayers:
            for op in s.core():
                again += operators.core(op, p) if isinstance(op, Attend) else operators.forward(op, s, p)
        return again
    for s in block.sublayers[-1:] if block.residual == "serial" else block.sublayers:
        unneeded += _added(spec, p)
        for op in _last(s):
            unneeded += operators.forward(op, s, p)
    return forward(spec, unit, p) + unneeded * -1


def shared_expert(spec: ModelSpec, unit: str, p: RankPass, backward: bool) -> Work:
    """Return the work of the shared expert, forward or `backward`, which overlaps the dispatch of rows: of the
    operators between the dispatch and the experts."""
    wide, work = replace(p, narrow=None), NO_WORK
    for s in block_of(spec, unit).sublayers:
        after = dropwhile(lambda op: not isinstance(op, Dispatch), s.operators)
        for op in takewhile(lambda op: not (isinstance(op, Linear) and op.experts), after):
            work += NO_WORK if isinstance(op, Dispatch) else operators.forward(op, s, wide)
    return work * (1 + backward)


def mask(spec: ModelSpec, unit: str, p: RankPass) -> Work:
    """Return the work of reading a mask between documents, in attention that has no mask for a window already. Rates
    are fitted without masks, so they do not reflect that attention with a mask cannot skip hidden keys."""
    if not unit.startswith("blocks"):
        return NO_WORK
    reads = sum(not operators.masked(op, p.seq) for op in block_of(spec, unit).all(Attend))
    return memory(p.tokens * p.keys * reads, p.e, 0)


def _operators(block: Block) -> Iterator[tuple[Operator, Sublayer]]:
    """Yield a block's operators in order, norms of the stream included, with the sublayer of each."""
    for s in block.sublayers:
        for op in (s.norm, *s.operators, s.after):
            if op is not None:
                yield op, s


def _added(spec: ModelSpec, p: RankPass) -> Work:
    """Return the work of adding to the residual stream."""
    if spec.streams > 1:
        raise InputError(
            "model.streams", spec.streams, "are hyper-connections, whose step is not priced yet", "use 1"
        )
    return memory(3 * p.tokens * spec.hidden, p.e, 1)


def _last_norm(spec: ModelSpec, p: RankPass, backward: bool = False) -> Work:
    return operators.norm(architecture(spec).last_norm, p, backward)


def _last(s: Sublayer) -> Iterator[Operator]:
    """Yield the operators of a sublayer whose results only the residual stream reads."""
    if s.after is None:
        products = (op for op in s.operators if isinstance(op, Linear) and op.y[0].name == "y" and not op.experts)
        yield from (op for op in products if not (s.scaled and op.y[0].rows == "own"))
        if isinstance(s.operators[-1], Combine):
            yield s.operators[-1]


def optimizer(n: int, job: Job, matrices: int = 0, product_flops: int = 0) -> Work:
    """Return the work of the optimizer over n parameters of one rank: norm, clipping, update, cast to the compute
    dtype. `matrices`: the number of them in matrices of hidden layers; `product_flops`: FLOPs of products with
    these."""
    master = DTYPE_BYTES[job.precision.master_dtype]
    accumulate = DTYPE_BYTES[job.precision.accumulate_dtype]
    # read and write of weights and moments; gradients: read for the norm, scaled, read for the update
    row, momentum = job.optimizer.row, job.optimizer.first_decay
    passes = (n - matrices) * row.others.passes(momentum) + matrices * row.matrices.passes(momentum)
    cast = DTYPE_BYTES[job.precision.compute] + master if job.precision.compute != job.precision.master_dtype else 0
    return Work(product_flops, traffic_bytes=passes * master + n * (4 * accumulate + cast), kernels=1)


def around_collective_seconds(work: Work, coding: Work, code: str, rates: KernelRates) -> Column:
    """Return seconds of the compute around a collective: copies, and coding at the compressor's measured rate, if
    any."""
    copies = work.seconds(rates.backward) * rates.pass_slowdown
    if code in rates.compression_per_byte:
        return copies + coding.traffic_bytes * rates.compression_per_byte[code]
    return copies + coding.seconds(rates.backward) * rates.pass_slowdown


def optimizer_seconds(work: Work, rates: KernelRates) -> float:
    """Return seconds of the optimizer's work at the measured rate of updates, and of products."""
    return float(work.traffic_bytes * rates.optimizer_per_byte + work.gemm_flops * rates.forward.per_gemm_flop)
