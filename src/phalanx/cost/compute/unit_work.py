"""The work of a unit's passes, and its time on a device.

Work is counted in four kinds, each with its own rate; time is their sum:

    seconds = gemm_flops / P_gemm + attention_flops / P_attention + traffic_bytes / bandwidth + kernels x launch

Products of a narrow format are a fifth kind, with a rate of their own.

Since traffic includes the operands of matrix products, 2mnk/P + (mk + kn + mn) e/bandwidth gives small products
the efficiency k / (k + k0) that they show in practice. The rates are fitted by `measure` on real layers, so they
absorb caches, causal masks and recomputation inside fused kernels.

All counts are functions of `tokens` (of one micro-batch on one rank), a number or a NumPy column.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from phalanx.cost.compute import mla, moe
from phalanx.cost.compute.work import NO_WORK as NO_WORK
from phalanx.cost.compute.work import Column as Column
from phalanx.cost.compute.work import Narrow as Narrow
from phalanx.cost.compute.work import Work as Work
from phalanx.cost.compute.work import gemm as _gemm
from phalanx.cost.compute.work import gemm_weight as _gemm_weight
from phalanx.cost.compute.work import memory as _memory
from phalanx.cost.compute.work import narrow_gemm as _narrow_gemm
from phalanx.cost.compute.work import narrow_gemm_weight as _narrow_gemm_weight
from phalanx.cost.compute.work import rms_norm as _rms_norm
from phalanx.cost.compute.work import rms_norm_grad as _rms_norm_grad
from phalanx.schedule.layers.routing import Routed, routed
from phalanx.spec.cluster.spec import KernelRates
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Recompute, Strategy


def _linears(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return (out, in) of the matrix products of a block that all tokens go through."""
    h, q, kv, f = spec.hidden, spec.q_width, spec.kv_width, mlp_width(spec)
    attention = ((q, h), (kv, h), (kv, h)) if spec.latent is None else mla.linears(spec, spec.latent)
    mlp = ((f, h), (f, h), (h, f)) if spec.gated else ((f, h), (h, f))
    return (*attention, (h, _result_width(spec)), *(mlp if f else ()))


def _result_width(spec: ModelSpec) -> int:
    """Return the width of attention's result, over all query heads."""
    return spec.heads * (spec.head_dim if spec.latent is None else spec.latent.v_dim)


def mlp_width(spec: ModelSpec) -> int:
    """Return the width of the MLP that all tokens go through, next to experts the shared one; 0 if there is none."""
    return spec.experts.shared_ffn if spec.experts is not None else spec.ffn


def _routed(spec: ModelSpec, tokens: Column, rows: Routed | None, narrow: Narrow | None = None) -> Routed:
    """Return the routed rows, by default of all experts on one rank."""
    assert spec.experts is not None
    return rows or routed(spec.experts, Strategy(), tokens, multiple=narrow.format.multiple if narrow else 1)


def forward(
    spec: ModelSpec,
    unit: str,
    tokens: Column,
    seq: int,
    e: int,
    keys: int | None = None,
    routed: Routed | None = None,
    narrow: Narrow | None = None,
) -> Work:
    """Return the work of one forward pass of a unit kind (`embed`, `blocks`, `head`) over `tokens` tokens, in
    elements of `e` bytes. `keys`: keys per query in attention; `seq` by default, fewer where ranks share a sequence.
    `routed`: the routed rows of these tokens, where the model has experts; by default one rank has all experts.
    `narrow`: parameters of a block's products of a narrow format, if it has them."""
    t, h, f = tokens, spec.hidden, mlp_width(spec)
    norm = _rms_norm(t * h, e) if spec.norm == "rms" else _memory(3 * t * h, e, 1)
    if unit == "embed":
        return _memory(2 * t * h, e, 1) + (_memory(3 * t * h, e, 1) if spec.position == "learned" else NO_WORK)
    if unit == "head":
        return norm + _gemm(t, spec.vocab, h, e) + _memory(8 * t * spec.vocab, e, 12)
    work = norm * _norms(spec) + _memory(2 * 3 * t * h, e, 2)  # two residual additions
    product = _gemm if narrow is None else partial(_narrow_gemm, narrow=narrow)
    for n, k in _linears(spec):
        work += product(t, n, k, e)
    if spec.qk_norm:
        work += _rms_norm(t * (spec.q_width + spec.kv_width), e, 2)
    if spec.latent is not None:
        work += mla.forward(spec, spec.latent, t, e)
    if spec.position == "rotary":
        work += _rotary(spec, t, e, 8)
    work += _core(spec, t, seq, e, keys)
    if spec.experts is not None:
        work += moe.forward(spec, spec.experts, _routed(spec, t, routed), e, narrow)
    return work + _activation(t * f, e, (5, 2) if spec.gated else (2, 1))


def _activation(elements: Column, e: int, per: tuple[int, int]) -> Work:
    """Return the work inside an MLP, if there is one. `per`: elements read or written per element, and kernels."""
    return _memory(per[0] * elements, e, per[1]) if np.any(elements) else NO_WORK


def backward(
    spec: ModelSpec,
    unit: str,
    tokens: Column,
    seq: int,
    e: int,
    keys: int | None = None,
    routed: Routed | None = None,
    narrow: Narrow | None = None,
) -> Work:
    """Return the work of one backward pass of a unit kind: input gradients and weight gradients."""
    inputs = input_grad(spec, unit, tokens, seq, e, keys, routed, narrow)
    return inputs + weight_grad(spec, unit, tokens, e, routed, narrow)


def weight_grad(
    spec: ModelSpec, unit: str, tokens: Column, e: int, routed: Routed | None = None, narrow: Narrow | None = None
) -> Work:
    """Return the work of weight gradients, which may be deferred: products of inputs and output gradients; rows of
    the embedding."""
    t, h = tokens, spec.hidden
    if unit == "embed":
        rows = _memory((0 if spec.tied else spec.vocab * h) + 3 * t * h, e, 4)
        return rows + (_memory(3 * spec.max_seq * h + t * h, e, 4) if spec.position == "learned" else NO_WORK)
    if unit == "head":
        return _gemm_weight(t, spec.vocab, h, e)
    work = NO_WORK
    product = _gemm_weight if narrow is None else partial(_narrow_gemm_weight, narrow=narrow)
    for n, k in _linears(spec):
        work += product(t, n, k, e)
    if spec.experts is not None:
        work += moe.weight_grad(spec, spec.experts, _routed(spec, t, routed, narrow), e, narrow)
    return work


def input_grad(
    spec: ModelSpec,
    unit: str,
    tokens: Column,
    seq: int,
    e: int,
    keys: int | None = None,
    routed: Routed | None = None,
    narrow: Narrow | None = None,
) -> Work:
    """Return the work of input gradients, which cannot be deferred, including gradients of norms' weights."""
    t, h, f = tokens, spec.hidden, mlp_width(spec)
    if unit == "embed":
        return NO_WORK
    norm = _rms_norm_grad(t * h, e) if spec.norm == "rms" else _memory(7 * t * h, e, 2)
    if unit == "head":
        return norm + _gemm(t, h, spec.vocab, e) + _memory(2 * t * spec.vocab, e, 1)
    work = norm * _norms(spec) + _memory(4 * 3 * t * h, e, 4)  # residuals, and q, k, v meeting at one input
    product = _gemm if narrow is None else partial(_narrow_gemm, narrow=narrow)
    for n, k in _linears(spec):
        work += product(t, k, n, e)
    if spec.qk_norm:
        work += _rms_norm_grad(t * (spec.q_width + spec.kv_width), e, 2)
    if spec.latent is not None:
        work += mla.input_grad(spec, spec.latent, t, e)
    if spec.position == "rotary":
        work += _rotary(spec, t, e, 10)
    work += _core(spec, t, seq, e, keys, 2)
    if spec.experts is not None:
        work += moe.input_grad(spec, spec.experts, _routed(spec, t, routed), e, narrow)
    return work + _activation(t * f, e, (11, 4) if spec.gated else (3, 1))


def head_products(spec: ModelSpec, tokens: Column, e: int) -> Work:
    """Return the work of the two products of the head's backward pass, and of scaling the logits' gradient."""
    t, h, v = tokens, spec.hidden, spec.vocab
    return _gemm(t, h, v, e) + _gemm_weight(t, v, h, e)


def normed_input_grad(spec: ModelSpec, tokens: Column, e: int) -> Work:
    """Return the work of a head's backward pass whose products are done: scaling them, and the norm."""
    t, h = tokens, spec.hidden
    norm = _rms_norm_grad(t * h, e) if spec.norm == "rms" else _memory(7 * t * h, e, 2)
    return norm + _memory(2 * (t + spec.vocab) * h, e, 2)


def recomputed(
    spec: ModelSpec,
    repeat: Recompute,
    tokens: Column,
    seq: int,
    e: int,
    keys: int | None = None,
    routed: Routed | None = None,
    narrow: Narrow | None = None,
) -> Work:
    """Return the forward work that a block's backward pass recomputes (runtime/autograd/recompute.py): with `full`,
    all but the products whose results are not needed; with `selective`, attention's core."""
    t = tokens
    if repeat == "none":
        return NO_WORK
    if repeat == "selective":
        return _core(spec, t, seq, e, keys)
    unneeded = _memory(3 * t * spec.hidden, e, 1)
    product = _gemm if narrow is None else partial(_narrow_gemm, narrow=narrow)
    if mlp_width(spec):
        unneeded += product(t, spec.hidden, mlp_width(spec), e)
    if spec.experts is not None:
        unneeded += moe.combined(spec, spec.experts, _routed(spec, t, routed), e)
    if spec.residual != "serial":
        unneeded += product(t, spec.hidden, _result_width(spec), e) + _memory(3 * t * spec.hidden, e, 1)
    return forward(spec, "blocks", t, seq, e, keys, routed, narrow) + unneeded * -1


def _core(spec: ModelSpec, t: Column, seq: int, e: int, keys: int | None, passes: int = 1) -> Work:
    """Return the work of attention's core: 1 pass forward, 2 backward."""
    q, kv = spec.heads * spec.core_dim, spec.kv_heads * spec.core_dim
    traffic = 2 * passes * t * (q + kv) + _mask(spec, t, seq, keys)
    return Work(0, 4 * passes * t * (keys or seq) * q, traffic * e, 1)


def _norms(spec: ModelSpec) -> int:
    """Return the number of norms in a block."""
    return 1 if spec.residual == "parallel_one_norm" else 2


def _rotary(spec: ModelSpec, t: Column, e: int, kernels: int) -> Work:
    """Return the work of rotary positions on queries and keys; the part of a head that is not rotated is copied."""
    rotated = spec.rotary_width
    copied = spec.head_dim - rotated
    if spec.latent is not None:  # one rotary key for all heads; nothing is copied
        return _memory(((5 * rotated + 2 * copied) * spec.heads + 5 * rotated) * t, e, kernels + 1)
    return _memory((5 * rotated + 2 * copied) * t * (spec.heads + spec.kv_heads), e, kernels + 2 * (copied > 0))


def _mask(spec: ModelSpec, t: Column, seq: int, keys: int | None = None) -> Column:
    """Return the mask elements that attention reads in blocks whose window needs a mask, for each sequence again;
    averaged over all blocks."""
    return t * (keys or seq) * _windowed(spec, seq)


def _windowed(spec: ModelSpec, seq: int) -> float:
    """Return the share of blocks with a window shorter than a sequence."""
    return sum(spec.window_of(i) is not None for i in range(spec.layers)) / spec.layers if spec.masked(seq) else 0


def mask(spec: ModelSpec, unit: str, tokens: Column, seq: int, e: int, keys: int | None = None) -> Work:
    """Return the work of reading a mask between documents, in blocks whose window has no mask already. Rates are
    fitted without masks, so they do not reflect that attention then cannot skip hidden keys."""
    return _memory(tokens * (keys or seq) * (1 - _windowed(spec, seq)), e, 0) if unit == "blocks" else NO_WORK


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
