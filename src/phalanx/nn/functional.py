"""Operations with hand-written backward passes: fewer passes over memory, and saved tensors known to the byte.

Autograd's decompositions save three to four tensors where one is enough, and others in each release. Here every
docstring says which tensors are kept for the backward pass, and cost/memory counts exactly that.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import deferred_weight_grads
from phalanx.runtime.tracing import host_values
from phalanx.schedule.layers.head import LOGITS_AT_ONCE, rows_of_slice


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of statistics and sums: fp64 in fp64 runs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.is_cuda:
            out: Tensor
            r: Tensor
            out, r = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, eps)
            ctx.save_for_backward(x, r, weight)
            ctx.owners = deferred_weight_grads.owners(weight)
            return out
        wide = accumulate_dtype(x.dtype)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # (..., 1)
        ctx.save_for_backward(x, r, weight)
        ctx.owners = deferred_weight_grads.owners(weight)
        if x.dtype == wide:
            return (x * r).mul_(weight)
        return (x.to(wide) * r).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, r, weight = ctx.saved_tensors
        if x.is_cuda:
            d_x, d_weight = torch.ops.aten._fused_rms_norm_backward(
                g.contiguous(), x, x.shape[-1:], r, weight, [True, True]
            )
            return d_x, *deferred_weight_grads.deliver(ctx.owners, d_weight), None
        h = x.shape[-1]
        unit = x.to(r.dtype) * r  # x / rms(x)
        g_unit = g.to(r.dtype) * unit
        d_weight = g_unit.reshape(-1, h).sum(0).to(weight.dtype)
        # dx = r (g w - x̂ mean(g w x̂)), x̂ = x r
        mean = torch.mv(g_unit.reshape(-1, h), weight.to(r.dtype)).div_(-h).view(r.shape)
        unit.mul_(mean)
        del g_unit
        d_x = unit.add_(g * weight).mul_(r).to(x.dtype)
        return d_x, *deferred_weight_grads.deliver(ctx.owners, d_weight), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight (Zhang & Sennrich 2019). Keeps x and one number per token. On CUDA it
    is one kernel."""
    if torch.compiler.is_compiling():
        wide = x.to(accumulate_dtype(x.dtype))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out, mean, r = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, mean, r, weight, bias)
        ctx.owners = deferred_weight_grads.owners(weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, r, weight, bias = ctx.saved_tensors
        wanted = [True, True, bias is not None]
        d_x, *d_parameters = torch.ops.aten.native_layer_norm_backward(
            g.contiguous(), x, x.shape[-1:], mean, r, weight, bias, wanted
        )
        return d_x, *deferred_weight_grads.deliver(ctx.owners, *d_parameters), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016), by torch's kernels, with
    parameter gradients that can be deferred. Keeps x and two numbers per token."""
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]


Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""A function, and that of (gradient, input) which returns the gradient of the input."""
_SILU: Activation = F.silu, torch.ops.aten.silu_backward
_GELU: Activation = (
    partial(F.gelu, approximate="tanh"),
    partial(torch.ops.aten.gelu_backward, approximate="tanh"),
)


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation[0](gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        activate, gradient = ctx.activation
        d_up = activate(gate).mul_(g)
        return None, gradient(g * up, gate), d_up


def _gated_unit(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return activation[0](gate) * up
    return _GatedUnit.apply(activation, gate, up)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer 2020). Keeps gate and up."""
    return _gated_unit(_SILU, gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, gelu by tanh (Shazeer 2020, as Gemma has it). Keeps gate and up."""
    return _gated_unit(_GELU, gate, up)


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out: Tensor = x.relu().square_()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d_x: Tensor = x.relu().mul_(g).mul_(2)
        return d_x


def relu2(x: Tensor) -> Tensor:
    """relu(x)² (So et al. 2021). Keeps x."""
    if torch.compiler.is_compiling():
        return x.relu().square()
    return _ReLU2.apply(x)  # type: ignore[no-any-return]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, start: int, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.which = start, neighbours
        return _rotate(x, cos, sin, start, neighbours)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(g, cos, -sin, *ctx.which), None, None, None, None  # the transpose of a rotation is its inverse


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, start: int, neighbours: bool) -> Tensor:
    end = start + 2 * cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = _pairs(x[..., start:end], neighbours)
    into_first, into_second = _pairs(out[..., start:end], neighbours)
    torch.mul(first, cos, out=into_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=into_second).addcmul_(first, sin)
    if start:
        out[..., :start] = x[..., :start]
    if end < x.shape[-1]:
        out[..., end:] = x[..., end:]
    return out


def _pairs(x: Tensor, neighbours: bool) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])


def rotary(x: Tensor, cos: Tensor, sin: Tensor, start: int = 0, neighbours: bool = False) -> Tensor:
    """Rotate the pairs (x_i, x_{i+d/2}), or `neighbours` (x_2i, x_{2i+1}), of d dimensions of each head, from `start`
    on, by position x θ_i (Su et al. 2021); other dimensions stay (Black et al. 2022). Keeps nothing of x.

    x: (batch, seq, heads, head_dim); cos, sin: (seq, 1, d / 2), or with a batch before.
    """
    if torch.compiler.is_compiling():
        end = start + 2 * cos.shape[-1]
        first, second = _pairs(x[..., start:end], neighbours)
        turned = first * cos - second * sin, second * cos + first * sin
        here = torch.stack(turned, -1).flatten(-2) if neighbours else torch.cat(turned, -1)
        return torch.cat([x[..., :start], here, x[..., end:]], -1)
    return _Rotary.apply(x, cos, sin, start, neighbours)  # type: ignore[no-any-return]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return weight[tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None]:
        (tokens,) = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1])
        deferred = deferred_weight_grads.deferral(deferred_weight_grads.owners(ctx.weight))
        if deferred is not None:
            deferred.rows(ctx.weight, lambda: (tokens.reshape(-1), rows))
            return None, None
        return None, row_gradient(ctx.weight, tokens.reshape(-1), rows)


def row_gradient(weight: Tensor, index: Tensor, rows: Tensor) -> Tensor | None:
    """Return the gradient of an embedding's weight with these rows, dense; or leave the rows to the data-parallel
    engine and return None."""
    row_gradients: list[tuple[Tensor, Tensor]] | None = getattr(weight, "gradient_rows", None)
    if row_gradients is None:
        return torch.zeros_like(weight).index_add_(0, index, rows)
    row_gradients.append((index, rows))
    return None  # autograd calls the weight's hook all the same


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return weight[tokens], (*tokens.shape, hidden). Keeps the tokens. A data-parallel engine gets the weight's
    gradient as rows, in `weight.gradient_rows`, so that no dense tensor of zeros is written and added."""
    return _Embedding.apply(tokens, weight)  # type: ignore[no-any-return]


_LOGITS_AT_ONCE = {"cpu": LOGITS_AT_ONCE, "gpu": 2**24}  # in cache; and enough to fill a GPU


def rows_at_once(logits: Tensor) -> int:
    """Return the number of tokens whose logits the cross-entropy processes at a time."""
    return max(1, _LOGITS_AT_ONCE["cpu" if logits.device.type == "cpu" else "gpu"] // logits.shape[1])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, masked: bool) -> Tensor:
        wide, gradient = accumulate_dtype(x.dtype), any(ctx.needs_input_grad[:2])
        loss = torch.zeros((), dtype=wide, device=x.device)
        d_x = torch.empty_like(x) if gradient else x
        d_weight = torch.empty(weight.shape if gradient else 0, dtype=wide, device=x.device)
        limits = () if x.device.type == "cpu" else (2**10, _LOGITS_AT_ONCE["gpu"])
        rows = int(rows_of_slice(len(x), len(weight), *limits))
        for low in range(0, len(x), rows):
            here = slice(low, low + rows)
            d_logits = torch.mm(x[here], weight.t())  # (rows, vocab), of the logits first
            loss += _softmax_minus_onehot(d_logits, targets[here].unsqueeze(-1), wide, gradient, masked)
            if gradient:
                torch.mm(d_logits, weight, out=d_x[here])
                add_product(d_weight, d_logits.t(), x[here], low == 0)
            del d_logits  # before the next slice
        if gradient:
            ctx.save_for_backward(d_x, d_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_x, d_weight = ctx.saved_tensors
        return d_x.mul_(g), d_weight.mul_(g).to(d_x.dtype), None, None


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a b to `total`, or write it there as the first. cuBLAS adds 16-bit products to fp32; CPUs write the product
    first."""
    if a.dtype != total.dtype and a.is_cuda:
        if first:
            torch.mm(a, b, total.dtype, out=total)
        else:
            torch.addmm(total, a, b, total.dtype, out=total)
    elif a.dtype != total.dtype:
        product = a.mm(b)
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(a, b, out=total)
    else:
        torch.addmm(total, a, b, out=total)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, masked: bool = False) -> Tensor:
    """cross_entropy(x weightᵀ, targets), holding only a slice of the logits at a time. Keeps the gradients of x, and
    of the weight in fp32 (fp64 in fp64 runs): schedule/layers/head.py. Allows one backward pass only.

    x: (tokens, hidden); weight: (vocab, hidden); targets: (tokens,) int64.
    """
    return _LinearCrossEntropy.apply(x, weight, targets, masked)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, masked: bool) -> Tensor:
        wide = accumulate_dtype(logits.dtype)
        loss = torch.zeros((), dtype=wide, device=logits.device)
        rows = rows_at_once(logits)
        for low in host_values.rounds(range(0, len(logits), rows)):
            part, chosen = logits[low : low + rows], targets[low : low + rows].unsqueeze(-1)
            loss += _softmax_minus_onehot(part, chosen, wide, ctx.needs_input_grad[0], masked)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (d_logits,) = ctx.saved_tensors
        return d_logits.mul_(g), None, None


def _softmax_minus_onehot(logits: Tensor, index: Tensor, wide: torch.dtype, gradient: bool, masked: bool) -> Tensor:
    """Return the summed loss of logits (rows, vocab); with `gradient`, overwrite the logits with its gradient.
    `masked`: rows whose index is negative have no target."""
    without = index < 0 if masked else None
    index = index if without is None else index.clamp(min=0)
    z = logits if logits.dtype == wide else logits.to(wide)
    z.sub_(z.amax(-1, keepdim=True))
    chosen = z.gather(-1, index)
    total = z.exp_().sum(-1, keepdim=True)
    if gradient:
        if without is None:
            z.div_(total).scatter_add_(-1, index, torch.full_like(chosen, -1))
        else:
            ones = torch.full_like(chosen, -1).masked_fill_(without, 0)
            z.div_(total.masked_fill(without, torch.inf)).scatter_add_(-1, index, ones)
        if z is not logits:
            logits.copy_(z)
    losses = total.log_() - chosen
    return (losses if without is None else losses.masked_fill_(without, 0)).sum()


def cross_entropy(logits: Tensor, targets: Tensor, masked: bool = False) -> Tensor:
    """-Σ log softmax(logits)[target] over all tokens, in fp32 (fp64 in fp64 runs).

    logits: (tokens, vocab), OVERWRITTEN by softmax - onehot, the gradient, so that one buffer of that size serves
    forward and backward. Allows one backward pass only. targets: (tokens,) int64; with `masked`, tokens
    with a negative one have none.
    """
    return _CrossEntropy.apply(logits, targets, masked)  # type: ignore[no-any-return]
