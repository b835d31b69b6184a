"""What a unit computes, and how long a device takes for it.

Work is counted in four kinds, each with its own rate; time is their sum:

    seconds = gemm_flops / P_gemm + attention_flops / P_attention + traffic_bytes / bandwidth + kernels x launch

Since traffic includes the operands of matrix products, 2mnk/P + (mk + kn + mn) e/bandwidth gives small products
the efficiency k / (k + k0) that they show in practice. The rates are fitted by `measure` on real layers, so they
absorb caches, causal masks and recomputation inside fused kernels.

All counts are functions of `tokens` (of one micro-batch on one rank), a number or a NumPy column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.spec.cluster import KernelRates, Rates
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model import ModelSpec
from phalanx.spec.strategy import Recompute

Column = Any
"""A number, or a NumPy column of numbers: one per strategy."""


@dataclass(frozen=True)
class Work:
    """Counts of one unit's work. FLOPs: 2 per multiply-add; attention over the full square (no causal halving),
    backward twice forward, as model FLOPs are counted (Narayanan et al. 2021, appendix)."""

    gemm_flops: Column = 0
    attention_flops: Column = 0
    traffic_bytes: Column = 0
    kernels: Column = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.gemm_flops + other.gemm_flops,
            self.attention_flops + other.attention_flops,
            self.traffic_bytes + other.traffic_bytes,
            self.kernels + other.kernels,
        )

    def __mul__(self, n: Column) -> Work:
        return Work(self.gemm_flops * n, self.attention_flops * n, self.traffic_bytes * n, self.kernels * n)

    @property
    def flops(self) -> Column:
        return self.gemm_flops + self.attention_flops

    def seconds(self, r: Rates) -> Column:
        return (
            self.gemm_flops * r.per_gemm_flop
            + self.attention_flops * r.per_attention_flop
            + self.traffic_bytes * r.per_byte
            + self.kernels * r.per_kernel
        )


NO_WORK = Work()


def _gemm(m: Column, n: int, k: int, e: int) -> Work:
    return Work(2 * m * n * k, 0, e * (m * k + k * n + m * n), 1)


def _gemm_weight(m: Column, n: int, k: int, e: int) -> Work:
    """The gradient of a weight, and it copied to where it is reduced."""
    return _gemm(n, k, m, e) + Work(traffic_bytes=2 * n * k * e, kernels=1)


def _memory(elements: Column, e: int, kernels: int) -> Work:
    """A memory-bound operation that reads or writes so many elements."""
    return Work(traffic_bytes=elements * e, kernels=kernels)


def _linears(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(out, in) of the matrix products of a block."""
    h, q, kv, f = spec.hidden, spec.q_width, spec.kv_width, spec.ffn
    mlp = ((f, h), (f, h), (h, f)) if spec.gated else ((f, h), (h, f))
    return ((q, h), (kv, h), (kv, h), (h, q), *mlp)


def forward(spec: ModelSpec, unit: str, tokens: Column, seq: int, e: int, keys: int | None = None) -> Work:
    """Work of one forward pass of a unit class (`embed`, `blocks`, `head`) over `tokens` tokens, of which attention
    shows each so many `keys`: those of its sequence, or over several ranks those of its rectangles."""
    t, h, q, kv, f = tokens, spec.hidden, spec.q_width, spec.kv_width, spec.ffn
    norm = _memory(5 * t * h, e, 7) if spec.norm == "rms" else _memory(3 * t * h, e, 1)
    if unit == "embed":
        return _memory(2 * t * h, e, 1) + (_memory(3 * t * h, e, 1) if spec.position == "learned" else NO_WORK)
    if unit == "head":
        return norm + _gemm(t, spec.vocab, h, e) + _memory(8 * t * spec.vocab, e, 12)
    work = norm * _norms(spec) + _memory(2 * 3 * t * h, e, 2)  # two residual additions
    for n, k in _linears(spec):
        work += _gemm(t, n, k, e)
    if spec.qk_norm:
        work += _memory(5 * t * (q + kv), e, 14)
    if spec.position == "rotary":
        work += _rotary(spec, t, e, 8)
    work += Work(0, 4 * t * (keys or seq) * q, (2 * t * (q + kv) + _mask(spec, t, seq, keys)) * e, 1)
    return work + (_memory(5 * t * f, e, 2) if spec.gated else _memory(2 * t * f, e, 1))


def backward(spec: ModelSpec, unit: str, tokens: Column, seq: int, e: int, keys: int | None = None) -> Work:
    """Work of one backward pass of a unit class: gradients of its input and of its weights."""
    return input_grad(spec, unit, tokens, seq, e, keys) + weight_grad(spec, unit, tokens, e)


def weight_grad(spec: ModelSpec, unit: str, tokens: Column, e: int) -> Work:
    """Of it, what may be put off: products of inputs and gradients of outputs; the embedding's rows."""
    t, h = tokens, spec.hidden
    if unit == "embed":
        rows = _memory((0 if spec.tied else spec.vocab * h) + 3 * t * h, e, 4)
        return rows + (_memory(3 * spec.max_seq * h + t * h, e, 4) if spec.position == "learned" else NO_WORK)
    if unit == "head":
        return _gemm_weight(t, spec.vocab, h, e)
    work = NO_WORK
    for n, k in _linears(spec):
        work += _gemm_weight(t, n, k, e)
    return work


def input_grad(spec: ModelSpec, unit: str, tokens: Column, seq: int, e: int, keys: int | None = None) -> Work:
    """And what may not."""
    t, h, q, kv, f = tokens, spec.hidden, spec.q_width, spec.kv_width, spec.ffn
    if unit == "embed":
        return NO_WORK
    norm = _memory(16 * t * h, e, 12) if spec.norm == "rms" else _memory(7 * t * h, e, 2)
    if unit == "head":
        return norm + _gemm(t, h, spec.vocab, e) + _memory(2 * t * spec.vocab, e, 1)
    work = norm * _norms(spec) + _memory(4 * 3 * t * h, e, 4)  # residuals, and q, k, v meeting at one input
    for n, k in _linears(spec):
        work += _gemm(t, k, n, e)
    if spec.qk_norm:
        work += _memory(16 * t * (q + kv), e, 24)
    if spec.position == "rotary":
        work += _rotary(spec, t, e, 10)
    work += Work(0, 8 * t * (keys or seq) * q, (4 * t * (q + kv) + _mask(spec, t, seq, keys)) * e, 1)
    return work + (_memory(11 * t * f, e, 4) if spec.gated else _memory(3 * t * f, e, 1))


def repeated(spec: ModelSpec, repeat: Recompute, tokens: Column, seq: int, e: int, keys: int | None = None) -> Work:
    """What of a block's forward pass its backward pass does again (runtime/recompute.py): all but the products whose
    results nobody needs; or attention's core."""
    t, q = tokens, spec.q_width
    if repeat == "none":
        return NO_WORK
    if repeat == "selective":
        return Work(0, 4 * t * (keys or seq) * q, (2 * t * (q + spec.kv_width) + _mask(spec, t, seq, keys)) * e, 1)
    unneeded = _gemm(t, spec.hidden, spec.ffn, e) + _memory(3 * t * spec.hidden, e, 1)
    if spec.residual != "serial":
        unneeded += _gemm(t, spec.hidden, q, e) + _memory(3 * t * spec.hidden, e, 1)
    return forward(spec, "blocks", t, seq, e, keys) + unneeded * -1


def _norms(spec: ModelSpec) -> int:
    """Norms of a block's input."""
    return 1 if spec.residual == "parallel_one_norm" else 2


def _rotary(spec: ModelSpec, t: Column, e: int, kernels: int) -> Work:
    """Queries and keys turned by their position; what of a head does not turn is copied."""
    turned = spec.rotary_width
    copied = spec.head_dim - turned
    return _memory((5 * turned + 2 * copied) * t * (spec.heads + spec.kv_heads), e, kernels + 2 * (copied > 0))


def _mask(spec: ModelSpec, t: Column, seq: int, keys: int | None = None) -> Column:
    """Elements of the mask that attention reads where a window needs one, for each sequence anew: of all blocks
    together, a block's share."""
    return t * (keys or seq) * _windowed(spec, seq)


def _windowed(spec: ModelSpec, seq: int) -> float:
    """The share of blocks with a window that is too short for a sequence."""
    return sum(spec.window_of(i) is not None for i in range(spec.layers)) / spec.layers if spec.masked(seq) else 0


def mask(spec: ModelSpec, unit: str, tokens: Column, seq: int, e: int, keys: int | None = None) -> Work:
    """What a pass of a block reads of a mask between documents, where no window has one anyhow. Rates are fitted
    without one: that attention then does not skip what is hidden is not in them."""
    return _memory(tokens * (keys or seq) * (1 - _windowed(spec, seq)), e, 0) if unit == "blocks" else NO_WORK


def optimizer(n: int, job: Job) -> Work:
    """The whole optimizer step over so many parameters of one rank: norm, clip, update, and the cast down."""
    master = DTYPE_BYTES[job.precision.master_dtype]
    accumulate = DTYPE_BYTES[job.precision.accumulate_dtype]
    # read and write of weights and moments; gradients: read for the norm, scaled, read for the update
    update = {"adamw": 6, "sgd": 4 if job.optimizer.betas[0] else 2}[job.optimizer.name] * master
    cast = DTYPE_BYTES[job.precision.compute] + master if job.precision.compute != job.precision.master_dtype else 0
    return Work(traffic_bytes=n * (update + 4 * accumulate + cast), kernels=1)


def optimizer_seconds(work: Work, rates: KernelRates) -> float:
    return float(work.traffic_bytes * rates.optimizer_per_byte)
