"""Matrix products of a layer: y = x Wᵀ, and in the backward pass dx = g W and dW = gᵀ x; of numbers of the compute
type or of a narrow format (spec/number_formats.py).

Each is of the form a bᵀ, with the rows of a and b along what is summed over. Both operands are scaled and rounded
just before, from their current values, and dropped just after; autograd keeps the unrounded tensors, as without it.
Weights may have been gathered in 8 bits (`NarrowWeight`): then a forward pass reads them in place. `operands` is the
format that they are rounded to; None: products are of the compute type.

    float8        one scale a tensor; gradients g in e5m2, which has a wider range, all else in e4m3
    float8-row    one scale a row of a and of b; all in e4m3
    mxfp8, nvfp4  small scales of blocks of a row (narrow_blocks.py)

A scale is the largest power of two with which the largest number still fits: so scaling is exact, and the only loss
is the rounding to fewer bits. Sums are in fp32, results in the compute type; non-finite inputs give non-finite
results. torch._scaled_mm runs this on GPUs of a minimum compute capability (8.9 for 8 bits), and on CPUs. References:
Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; torchao's float8 recipes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.runtime.autograd.narrow_blocks import block_product, power_of_two, to_blocks
from phalanx.spec.number_formats import NumberFormat

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Rounded(NamedTuple):
    """The operand of a product, in a narrow format."""

    numbers: Tensor
    """Numbers, row-major regardless of the source's layout."""
    back: Tensor
    """Scales by which numbers are multiplied: () or (rows, 1), fp32; for blocks (rows, blocks)."""
    whole: Tensor | None = None
    """(), fp32: the additional scale of the whole tensor, for formats with blocks."""


Operand = Tensor | Rounded
Arrive = Callable[[], None]
"""Waits until a weight has been gathered."""


@dataclass(frozen=True)
class NarrowWeight:
    """A weight, (out, in), that ZeRO-3 gathers in 8 bits; or the weights of experts, (experts, out, in)."""

    numbers: Tensor
    back: Tensor
    """Scales, () or (experts,), fp32."""
    arrive: Arrive
    aligned: bool
    """Whether tensor cores can read the numbers in place: they begin at a multiple of 16 bytes."""

    def _wait(self) -> None:
        # A compiled graph takes numbers as inputs, for which ZeRO-3's hooks have waited.
        if not torch.compiler.is_compiling():
            self.arrive()

    def rows(self, expert: int | None = None) -> Rounded:
        """Return W as an operand of y = x Wᵀ."""
        self._wait()
        numbers, back = (self.numbers, self.back) if expert is None else (self.numbers[expert], self.back[expert])
        return Rounded(numbers if self.aligned else numbers.clone(), back)

    def columns(self, expert: int | None = None) -> Rounded:
        """Return Wᵀ as an operand of dx = g W."""
        self._wait()
        numbers, back = (self.numbers, self.back) if expert is None else (self.numbers[expert], self.back[expert])
        return Rounded(numbers.t().contiguous(), back)


def turned(x: Operand) -> Operand:
    """Return xᵀ; 8-bit floats, which have one scale, are made row-major again."""
    return x.t() if isinstance(x, Tensor) else Rounded(x.numbers.t().contiguous(), x.back)


def gathered(weight: Tensor) -> NarrowWeight | None:
    """Return the weight in 8 bits; None if it is not gathered in 8 bits."""
    return getattr(weight, "in_8_bits", None)


def of_inputs(weight: Tensor, narrow: NarrowWeight | None) -> Operand:
    """Return the operand W of y = x Wᵀ."""
    return weight if narrow is None else narrow.rows()


def of_gradients(weight: Tensor, narrow: NarrowWeight | None) -> Operand:
    """Return the operand Wᵀ of dx = g W."""
    return weight.t() if narrow is None else narrow.columns()


def runs_on(operands: NumberFormat, device: torch.device) -> bool:
    """Whether a device supports products of a narrow format: CPUs do, GPUs from a minimum compute capability on."""
    if device.type != "cuda":
        return True
    return operands.since is not None and torch.cuda.get_device_capability(device) >= operands.since


def dtype_of(operands: NumberFormat, gradient: bool = False) -> torch.dtype:
    """Return the number type of an operand; `gradient`: the operand is the gradient of a result."""
    dtype: torch.dtype = getattr(torch, (operands.gradient_dtype if gradient else operands.dtype) or "")
    return dtype


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale for numbers with this largest magnitude, fp32."""
    return power_of_two(torch.finfo(dtype).max, largest)


def rounded(x: Tensor, operands: NumberFormat, gradient: bool = False) -> Rounded:
    """Round x (rows, n), in any layout, to a narrow format. Rows are padded with zeros to the multiple that products
    need. `gradient`: x is the gradient of a result."""
    if operands.scales == "block":
        return Rounded(*to_blocks(x, operands.name))
    by_row, dtype = operands.scales == "row", dtype_of(operands, gradient)
    largest = torch.linalg.vector_norm(x, math.inf, -1 if by_row else None, by_row, dtype=torch.float32)
    scale = scale_of(largest, dtype)
    rows, n = x.shape
    more = -n % operands.multiple
    if torch.compiler.is_compiling():  # in a graph, what is written to takes the layout of x: rows are asked for
        wide = nn.functional.pad(x * scale.to(x.dtype), (0, more))
        return Rounded(wide.to(dtype).contiguous(), scale.reciprocal())
    narrow = (torch.zeros if more else torch.empty)(rows, n + more, dtype=dtype, device=x.device)
    torch.mul(x, scale.to(x.dtype), out=narrow[:, :n])  # one pass: scaled, rounded, and in rows
    return Rounded(narrow, scale.reciprocal())


def operand(x: Operand, operands: NumberFormat | None, gradient: bool = False) -> Operand:
    """Return x (rows, n) as an operand, rounded once for several products. `gradient`: x is the gradient of a
    result."""
    return x if operands is None or not isinstance(x, Tensor) else rounded(x, operands, gradient)


def product(
    a: Operand,
    b: Operand,
    operands: NumberFormat | None,
    gradient: bool = False,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Compute a bᵀ, (m, n), of a (m, k) and b (n, k). `gradient`: a is the gradient of a result. Written to `out` if
    given, or with `add` added to it."""
    if operands is None:
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        if add and out is not None:
            return torch.addmm(out, a, b.t(), out=out)
        return a.mm(b.t()) if out is None else torch.mm(a, b.t(), out=out)
    dtype = a.dtype if isinstance(a, Tensor) else torch.bfloat16  # the one compute type that they are legal in
    left = rounded(a, operands, gradient) if isinstance(a, Tensor) else a
    right = rounded(b, operands) if isinstance(b, Tensor) else b
    if operands.scales == "block":
        if out is not None and not add:
            result = out
        else:
            result = left.numbers.new_empty(len(left.numbers), len(right.numbers), dtype=dtype)
        block_product(*left, *right, result)
        return out.add_(result) if out is not None and add else result
    narrow_a, of_a, _ = left
    narrow_b, of_b, _ = right
    # The tensor cores' faster, less precise accumulation is good enough for results.
    multiply = partial(torch._scaled_mm, out_dtype=dtype, use_fast_accum=not gradient)
    if out is None or add:
        result = multiply(narrow_a, narrow_b.t(), of_a, of_b.t())
        return result if out is None else out.add_(result)
    return multiply(narrow_a, narrow_b.t(), of_a, of_b.t(), out=out)


def results(x: Tensor, weight: Operand, bias: Tensor | None, operands: NumberFormat | None) -> Tensor:
    """Return x Wᵀ + b, (..., out), of x (..., in)."""
    if operands is None:
        assert isinstance(weight, Tensor)
        return nn.functional.linear(x, weight, bias)
    y = product(x.reshape(-1, x.shape[-1]), weight, operands)
    if bias is not None:
        y.add_(bias)
    # Reshaped as in F.linear: a view made inside could not be changed in place by the sum of tp's terms.
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))  # type: ignore[no-any-return]
