"""The work of experts in place of an MLP, except the MLP that all tokens share (nn/moe.py). It is counted in rows,
assuming balanced routing (schedule/layers/routing.py)."""

from __future__ import annotations

from phalanx.cost.compute.work import Column, Narrow, Work, gemm, gemm_weight, memory, narrow_gemm
from phalanx.schedule.layers.routing import Routed
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec


def forward(spec: ModelSpec, x: Experts, r: Routed, e: int, narrow: Narrow | None = None) -> Work:
    """Return the forward work: the router, laying out rows for dispatch and combine, and the experts' MLPs."""
    h, f = spec.hidden, x.ffn
    work = gemm(r.tokens, x.count, h, e) + _choice(x, r)
    work += memory(2 * _moved(x, r) * h, e, 4)
    for n, k in ((f, h), (f, h), (h, f)):
        work += _grouped(r.received, n, k, x.here, e, narrow)
    return work + memory(5 * r.received * f, e, 2) + combined(spec, x, r, e)


def shared(spec: ModelSpec, x: Experts, tokens: Column, e: int, backward: bool) -> Work:
    """Return the work of the MLP that all tokens share, forward or `backward`, which overlaps the dispatch of
    rows."""
    h, f = spec.hidden, x.shared_ffn
    one = gemm(tokens, f, h, e) * 2 + gemm(tokens, h, f, e) + memory(5 * tokens * f, e, 2)
    return one * (1 + backward)


def combined(spec: ModelSpec, x: Experts, r: Routed, e: int) -> Work:
    """Return the work of summing each token's rows by their routing weights."""
    return memory((3 * r.rows * r.copies + r.tokens) * spec.hidden, e, 2 * x.top_k * r.copies + 1)


def input_grad(spec: ModelSpec, x: Experts, r: Routed, e: int, narrow: Narrow | None = None) -> Work:
    """Return the work of input gradients: gradients of the routing weights need the rows; the rest mirrors the
    forward pass."""
    h, f = spec.hidden, x.ffn
    work = gemm(r.tokens, h, x.count, e) + memory(10 * r.tokens * x.count, 4, 8)
    work += memory((2 * _moved(x, r) + 5 * r.rows * r.copies) * h, e, 8)
    for n, k in ((f, h), (f, h), (h, f)):
        work += _grouped(r.received, k, n, x.here, e, narrow)
    return work + memory(14 * r.received * f, e, 5) + combined(spec, x, r, e)


def weight_grad(spec: ModelSpec, x: Experts, r: Routed, e: int, narrow: Narrow | None = None) -> Work:
    """Return the work of weight gradients of the router and the local experts."""
    h, f, copied = spec.hidden, x.ffn, 2 * 3 * x.here * x.ffn * spec.hidden
    work = gemm_weight(r.tokens, x.count, h, e) + memory(copied, e, 3)
    for n, k in ((f, h), (f, h), (h, f)):
        if narrow is not None:
            traffic = r.padded * (n + k) * (2 * e + 2 * narrow.format.bytes_per_value) + x.here * n * k * e
            flops, name = 2 * r.padded * n * k, narrow.format.name
            work += Work(0, 0, traffic, 15 * x.here, flops, narrow_format=name)
        else:
            work += _grouped(r.received, n, k, x.here, e)
    return work


def _choice(x: Experts, r: Routed) -> Work:
    """Return the work of routing: scores, top-k, and the order of rows."""
    return memory(6 * r.tokens * x.count, 4, 6) + memory(12 * r.rows, 8, 16)


def _moved(x: Experts, r: Routed) -> Column:
    """Return the rows that are copied: laid out to leave, and on arrival sorted by expert and back."""
    return r.rows * r.copies + (2 * r.received * (x.here > 1) if x.here < x.count or r.copies > 1 else 0)


def _grouped(rows: Column, n: int, k: int, experts: int, e: int, narrow: Narrow | None = None) -> Work:
    """Return the work of multiplying rows by their expert's (n, k) matrix, one expert after the other. `narrow`:
    parameters of products of a narrow format."""
    if narrow is not None:
        return narrow_gemm(rows, n, k, e, narrow, experts)
    return Work(2 * rows * n * k, 0, e * (rows * k + experts * k * n + rows * n), experts)
