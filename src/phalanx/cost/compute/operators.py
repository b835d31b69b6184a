"""The work of every operator of a block (spec/model/blocks/operators.py) in each part of a pass: forward, gradients
of inputs, gradients of weights. One `match` for each part; an operator that it does not name has no work there. Rows
of experts assume balanced routing (schedule/layers/routing.py)."""

from dataclasses import dataclass, field

from phalanx.cost.compute import scan
from phalanx.cost.compute.work import (
    NO_WORK,
    Column,
    Narrow,
    Work,
    gemm,
    gemm_weight,
    memory,
    narrow_gemm,
    narrow_gemm_weight,
    rms_norm,
    rms_norm_grad,
)
from phalanx.schedule.layers import windows
from phalanx.schedule.layers.context import keys_per_query
from phalanx.schedule.layers.routing import ExpertTraffic
from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.operators import (
    Activate,
    Attend,
    Combine,
    Conv,
    Dim,
    Dispatch,
    Expand,
    Index,
    Linear,
    Norm,
    Operator,
    Output,
    Resize,
    Rotary,
    Router,
    Scan,
    Views,
)
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class RankPass:
    """The sizes of a pass on one rank."""

    tokens: Column
    """Tokens of a micro-batch on the rank."""
    seq: int
    """Tokens of an entire sequence; 0 in generation, where attention between tokens is counted elsewhere."""
    e: int
    """Bytes of an element."""
    strategy: Strategy = field(default_factory=Strategy)
    """The strategy whose degrees divide the operators."""
    rows: ExpertTraffic | None = None
    """Rows of experts, if the block has experts."""
    narrow: Narrow | None = None
    """Parameters of a block's products of a narrow format, if it has such products."""
    packed: bool = False
    """Whether a rank has entire sequences without document boundaries, so that attention with a window can work on
    bands of long ones."""

    @property
    def keys(self) -> int:
        """Keys per query: all of the sequence, or on a ring the mean over its rectangles."""
        return keys_per_query(self.seq, self.strategy.ring)

    @property
    def routed(self) -> ExpertTraffic:
        """Rows of the block's experts."""
        assert self.rows is not None
        return self.rows


def forward(op: Operator, s: Sublayer, p: RankPass) -> Work:
    """Return an operator's forward work in its sublayer."""
    t, e, d = p.tokens, p.e, p.strategy
    match op:
        case Norm():
            return norm(op, p, backward=False)
        case Linear():
            return _products(op, p, turned=False)
        case Rotary():
            return _rotary(op, p, 8)
        case Resize():
            return memory(t * (_dim(s, op.x).here(d) + op.y.dim.here(d)), e, 1)
        case Expand():
            return memory(t * (_laid_out(op, p) + _dim(s, op.rope).here(d)), e, 3)
        case Attend():
            return core(op, p) + (memory(t * op.y.dim.groups(d) * 2 * op.value, e, 1) if _pads(op) else NO_WORK)
        case Index():
            return _index(op, p)
        case Conv():
            return scan.convolution(op, s, t, p.seq, e, d, backward=False)
        case Scan():
            return scan.recurrence(op, t, p.seq, e, d, backward=False)
        case Activate():
            return memory(_activated(op, p) * (5 if len(op.x) == 2 else 2), e, len(op.x))
        case Router():
            return memory(6 * p.routed.tokens * op.count, 4, 6) + memory(12 * p.routed.rows, 8, 16)
        case Dispatch():
            return memory(2 * _moved(s, p) * op.width, e, 4)
        case Combine():
            return _combined(op, p)
    return NO_WORK


def input_grad(op: Operator, s: Sublayer, p: RankPass) -> Work:
    """Return the work of the gradients of an operator's inputs, and of norms' weights."""
    t, e, d = p.tokens, p.e, p.strategy
    match op:
        case Norm():
            return norm(op, p, backward=True)
        case Linear():
            return _products(op, p, turned=True)
        case Rotary():
            return _rotary(op, p, 10)
        case Resize():
            return memory(2 * t * _dim(s, op.x).here(d), e, 1)
        case Views():  # the gradients of the parts are joined
            return memory(2 * t * sum(part.dim.here(d) for part in op.parts), e, 1)
        case Expand():
            return memory(t * (_laid_out(op, p) + _dim(s, op.rope).here(d)), e, 2)
        case Attend():
            wider = memory(t * op.y.dim.groups(d) * (op.value + op.core), e, 1) if _pads(op) else NO_WORK
            return core(op, p, 2) + wider
        case Index():  # gradients of zero through the products of keys and weights, in input and weights
            return _index_products(op, p, slice(1, 3)) * 2
        case Conv():
            return scan.convolution(op, s, t, p.seq, e, d, backward=True)
        case Scan():
            return scan.recurrence(op, t, p.seq, e, d, backward=True)
        case Activate():
            passes = (14, 5) if op.y.rows == "received" else (11, 4)  # grouped experts compute theirs again
            elements, kernels = passes if len(op.x) == 2 else (3, 1)
            return memory(elements * _activated(op, p), e, kernels)
        case Router():
            return memory(10 * p.routed.tokens * op.count, 4, 8)
        case Dispatch():  # gradients of the routing weights need the rows
            return memory((2 * _moved(s, p) + 5 * p.routed.rows * p.routed.copies) * op.width, e, 8)
        case Combine():
            return _combined(op, p)
    return NO_WORK


def weight_grad(op: Operator, p: RankPass) -> Work:
    """Return the work of the gradients of weights that may be deferred: products of inputs and output gradients."""
    if not isinstance(op, Linear):
        return NO_WORK
    work, e, narrow, k = NO_WORK, p.e, _format(op, p), op.into.here(p.strategy)
    for y in op.y:
        n, rows = y.dim.here(p.strategy), _rows_of(op, y, p)
        if op.experts is None:
            work += gemm_weight(rows, n, k, e) if narrow is None else narrow_gemm_weight(rows, n, k, e, narrow)
            continue
        here = op.experts.here(p.strategy)
        work += memory(2 * here * n * k, e, 1)
        if narrow is None:
            work += _grouped(rows, n, k, here, e)
        else:
            traffic = p.routed.padded * (n + k) * (2 * e + 2 * narrow.format.bytes_per_value) + here * n * k * e
            flops, name = 2 * p.routed.padded * n * k, narrow.format.name
            work += Work(0, 0, traffic, 15 * here, flops, narrow_format=name)
    return work


def core(op: Attend, p: RankPass, passes: int = 1) -> Work:
    """Return the work of attention's core: 1 pass forward, 2 backward."""
    if op.compressed:
        raise InputError("model.mixers", "compressed", "attends to compressed keys, whose step is not priced yet")
    q, kv = op.y.dim.groups(p.strategy) * op.core, op.kv.groups(p.strategy) * op.core
    pairs = p.tokens * p.keys
    if p.packed and op.window is not None and windows.banded(p.seq, op.window):
        pairs = p.tokens // p.seq * windows.pairs(p.seq, op.window)
    traffic = 2 * passes * p.tokens * (q + kv) + (pairs if masked(op, p.seq) else 0)
    return Work(0, 4 * passes * pairs * q, traffic * p.e, 1)


def masked(op: Attend, seq: int) -> bool:
    """Whether attention reads a mask: its window is shorter than a sequence."""
    return op.window is not None and op.window < seq


def norm(op: Norm, p: RankPass, backward: bool) -> Work:
    """Return the work of a norm's forward or backward pass, gate included."""
    elements = p.tokens * op.y.dim.here(p.strategy)
    gate = memory((11 if backward else 5) * elements, p.e, 4 if backward else 2) if op.gate else NO_WORK
    if op.kind == "rms":
        return (rms_norm_grad if backward else rms_norm)(elements, p.e) + gate
    if op.kind == "layer":
        return memory((7 if backward else 3) * elements, p.e, 2 if backward else 1) + gate
    return NO_WORK  # of a recurrence, whose work includes it


def _format(op: Linear, p: RankPass) -> Narrow | None:
    """Return the narrow format of a product, which routers never have."""
    return None if op.weights[0].role == "router" else p.narrow


def _rows(rows: str, p: RankPass) -> Column:
    """Return the number of rows of a tensor on a rank; `rows`: the kind of its rows (Output.rows)."""
    if rows == "own" and p.strategy.sp:
        return p.tokens // p.strategy.tp
    if rows == "routed":
        return p.routed.tokens
    return p.routed.received if rows == "received" else p.tokens


def _rows_of(op: Linear, y: Output, p: RankPass) -> Column:
    """Return the number of rows of a product that a rank computes: all tokens if ranks' results are then summed."""
    return p.tokens if op.into.axis == "tp" else _rows(y.rows, p)


def _products(op: Linear, p: RankPass, turned: bool) -> Work:
    """Return the work of y = x Wᵀ, or `turned` of dx = dy W."""
    work, e, narrow = NO_WORK, p.e, _format(op, p)
    for y in op.y:
        n, k, rows = y.dim.here(p.strategy), op.into.here(p.strategy), _rows_of(op, y, p)
        if op.grouped:
            k = op.into.each
        if turned:
            n, k = k, n
        here = 1 if op.experts is None else op.experts.here(p.strategy)
        if narrow is not None:
            work += narrow_gemm(rows, n, k, e, narrow, here)
        else:
            work += gemm(rows, n, k, e) if op.experts is None else _grouped(rows, n, k, here, e)
    return work


def _grouped(rows: Column, n: int, k: int, experts: int, e: int) -> Work:
    """Return the work of multiplying rows by their expert's (n, k) matrix, one expert after the other."""
    return Work(2 * rows * n * k, 0, e * (rows * k + experts * k * n + rows * n), experts)


def _rotary(op: Rotary, p: RankPass, kernels: int) -> Work:
    """Return the work of rotary positions; the part of a head that is not rotated is copied."""
    turned = sum(op.turned * dim.groups(p.strategy) for dim in op.heads)
    copied = sum((dim.each - op.turned) * dim.groups(p.strategy) for dim in op.heads)
    launched = 1 if op.apart else kernels + 2 * (copied > 0 and len(op.x) > 1)
    return memory((5 * turned + 2 * copied) * p.tokens, p.e, launched)


def _dim(s: Sublayer, name: str) -> Dim:
    """Return the dimension of a tensor of a sublayer, as it is first written."""
    for op in s.operators:
        for out in op.y if isinstance(op, Linear) else op.parts if isinstance(op, Views) else ():
            if out.name == name:
                return out.dim
    raise KeyError(name)


def _pads(op: Attend) -> bool:
    """Whether the core is wider than values, so that its result is narrowed."""
    return op.value < op.core


def _laid_out(op: Expand, p: RankPass) -> int:
    """Return the elements per token that are read and written when latent attention lays out keys and values."""
    laid_out: int = sum(out.dim.here(p.strategy) for out in op.y)
    return laid_out + int(op.y[0].dim.groups(p.strategy)) * (op.nope + op.value)


def _index(op: Index, p: RankPass) -> Work:
    """Return the forward work of an index, whole on every tp rank: its products; and if there are more keys than it
    selects, the products of the heads' scores and their weighted sum for each key. It is not trained, so no gradient
    passes through its scores (nn/mla.py)."""
    work = _index_products(op, p)
    if p.keys <= op.top:
        return work
    pairs = p.tokens * p.keys // op.ratio
    return work + Work(2 * op.heads * op.each * pairs, 0, 4 * op.heads * pairs * max(p.e, 4), 3 * op.heads)


def _index_products(op: Index, p: RankPass, which: slice = slice(3)) -> Work:
    """Return the work of an index's products: of queries, keys and weights."""
    sizes = list(zip((op.heads * op.each, op.each, op.heads), op.into, strict=True))[which]
    return sum((gemm(p.tokens, n, k, p.e) for n, k in sizes if k), NO_WORK)


def _activated(op: Activate, p: RankPass) -> Column:
    return _rows(op.y.rows, p) * op.y.dim.here(p.strategy)


def _moved(s: Sublayer, p: RankPass) -> Column:
    """Return the number of rows that dispatch copies: to be sent, and on arrival sorted by expert and back."""
    r, experts = p.routed, next(op.experts for op in s.operators if isinstance(op, Linear) and op.experts)
    here = experts.here(p.strategy)
    return r.rows * r.copies + (2 * r.received * (here > 1) if here < experts.count or r.copies > 1 else 0)


def _combined(op: Combine, p: RankPass) -> Work:
    """Return the work of summing each token's rows by their routing weights."""
    r = p.routed
    return memory((3 * r.rows * r.copies + r.tokens) * op.width, p.e, 2 * op.top_k * r.copies + 1)
