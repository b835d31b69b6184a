"""Matrix products of a layer: y = x Wᵀ, and in the backward pass dx = g W and dW = gᵀ x; of numbers of the compute
type or of a narrow format (spec/number_formats.py).

Each is of the form a bᵀ, with the rows of a and b along what is summed over. Both operands are scaled and rounded
just before, from their current values, and dropped just after; autograd keeps the unrounded tensors, as without it.
Weights may have been gathered in 8 bits (`NarrowWeight`): then a forward pass reads them in place. `operands` is the
format that they are rounded to; None: products are of the compute type.

    float8        one scale a tensor; gradients g in e5m2, which has a wider range, all else in e4m3
    float8-row    one scale a row of a and of b; all in e4m3
    mxfp8, nvfp4  small scales of blocks of a row (below)

A scale is the largest power of two with which the largest number still fits: so scaling is exact, and the only loss
is the rounding to fewer bits. Sums are in fp32, results in the compute type; non-finite inputs give non-finite
results. torch._scaled_mm runs this on GPUs of a minimum compute capability (8.9 for 8 bits), and on CPUs. References:
Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; torchao's float8 recipes.

Operands with a scale per block of a row, and their products (spec/number_formats.py: mxfp8, nvfp4).

    mxfp8   32 numbers in e4m3 share a power of two, the largest with which they still fit
    nvfp4   16 numbers in e2m1 share a scale in e4m3, and all numbers of a tensor a power of two

Both steps are custom torch operations, so that their temporaries count as a kernel's and not as tensors of the step.
On CPUs a product multiplies the exact values of the rounded numbers, with sums in fp32, as Blackwell's tensor cores
do: the oracle for them. Non-finite inputs give non-finite results. References: OCP Microscaling Formats 1.0; NVIDIA
2025, "Pretraining Large Language Models with NVFP4", whose random transforms and stochastic rounding of gradients are
left out; cuBLAS's layout of scales (docs.nvidia.com/cuda/cublas, "1D Block Scaling Factors Layout").
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from phalanx.spec.number_formats import NUMBER_FORMATS, NumberFormat

_EXPONENT = 0x7F800000  # the bits of a float32's exponent
SMALLEST = 1e-12  # stands in for zero, which has no scale
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of e2m1."""
_BOUNDS = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)
"""Upper bounds of the numbers that round to each level but the last; ties go to the even code."""
_LEAST_SCALE = 2.0**-9
"""The smallest positive number in e4m3."""


def power_of_two(most: float, largest: Tensor) -> Tensor:
    """Return the largest power of two p with p x `largest` <= `most`, fp32; `largest` is raised to at least
    SMALLEST."""
    return (most / largest.clamp_(min=SMALLEST)).view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32)


@torch.library.custom_op("phalanx::to_blocks", mutates_args=())
def to_blocks(x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Round x (rows, n), in any layout, to the format `name`. Returns (numbers, each row padded with zeros to the
    format's multiple; a scale per block; one scale of all, fp32). Values are numbers times both scales."""
    operands = NUMBER_FORMATS[name]
    wide = nn.functional.pad(x.float(), (0, -x.shape[1] % operands.multiple))
    blocks = wide.view(len(x), -1, operands.values_per_scale)
    largest = blocks.abs().amax(-1, keepdim=True)
    if operands.bits == 8:
        scale = power_of_two(torch.finfo(torch.float8_e4m3fn).max, largest)
        numbers = (blocks * scale).view(len(x), -1).to(torch.float8_e4m3fn)
        return numbers, scale.reciprocal().squeeze(-1).to(torch.float8_e8m0fnu), torch.ones((), device=x.device)
    whole = power_of_two(_LEVELS[-1] * torch.finfo(torch.float8_e4m3fn).max, largest.amax())
    scale = (largest * (whole / _LEVELS[-1])).clamp_(min=_LEAST_SCALE).to(torch.float8_e4m3fn)
    bounds = torch.tensor(_BOUNDS, device=x.device)
    steps = blocks * whole / scale.float()
    codes = torch.bucketize(steps.abs().contiguous(), bounds).to(torch.uint8) | (steps.signbit().to(torch.uint8) << 3)
    codes = codes.view(len(x), -1)
    return (
        (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.float4_e2m1fn_x2),
        scale.squeeze(-1),
        whole.reciprocal(),
    )


@to_blocks.register_fake
def _(x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    operands = NUMBER_FORMATS[name]
    n = x.shape[1] + -x.shape[1] % operands.multiple
    return (
        x.new_empty(len(x), n * operands.bits // 8, dtype=_dtype(operands.dtype)),
        x.new_empty(len(x), n // operands.values_per_scale, dtype=_dtype(operands.scale_dtype)),
        x.new_empty((), dtype=torch.float32),
    )


def _dtype(name: str | None) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name or "")
    return dtype


def values(numbers: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
    """Return the exact values of an operand, (rows, n), fp32."""
    if numbers.dtype == torch.float4_e2m1fn_x2:
        codes = numbers.view(torch.uint8)
        levels = torch.tensor((*_LEVELS, *(-x for x in _LEVELS)), device=numbers.device)
        wide = levels[torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()]
    else:
        wide = numbers.float()
    blocks = wide.view(*scales.shape, -1) * scales.float().unsqueeze(-1)
    return blocks.flatten(1) * whole


@torch.library.custom_op("phalanx::block_product", mutates_args=("out",))
def block_product(
    a: Tensor, a_scales: Tensor, a_whole: Tensor, b: Tensor, b_scales: Tensor, b_whole: Tensor, out: Tensor
) -> None:
    """Write a bᵀ to `out`, (m, n), of a (m, k) and b (n, k)."""
    if a.device.type == "cuda":
        torch._scaled_mm(a, b.t(), tile_scales(a_scales), tile_scales(b_scales), out_dtype=out.dtype, out=out)
        out.mul_(a_whole * b_whole)
        return
    out.copy_(values(a, a_scales, a_whole) @ values(b, b_scales, b_whole).t())


@block_product.register_fake
def _(
    a: Tensor, a_scales: Tensor, a_whole: Tensor, b: Tensor, b_scales: Tensor, b_whole: Tensor, out: Tensor
) -> None:
    # The kernel needs row-major operands.
    if a.shape[1] != b.shape[1] or out.shape != (len(a), len(b)):
        raise ValueError(f"a product of {tuple(a.shape)} and {tuple(b.shape)} does not fit in {tuple(out.shape)}")
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError("operands of block products lie in rows, each contiguous")


@register_flop_formula(torch.ops.phalanx.block_product, get_raw=True)
def _flops(a: Tensor, *others: Any, **_: Any) -> int:
    out: Tensor = others[-1]
    return 2 * out.numel() * a.shape[1] * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1)


def tile_scales(scales: Tensor) -> Tensor:
    """Return the scales of (rows, blocks) in the order in which tensor cores read them: tiles of 128 rows and 4
    blocks, in each the rows 0, 32, 64 and 96 next to each other; zeros fill up the last tiles."""
    rows, blocks = scales.shape
    bytes_ = nn.functional.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = bytes_.view(len(bytes_) // 128, 4, 32, bytes_.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten().view(scales.dtype)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class RoundedOperand(NamedTuple):
    """An operand of a product, rounded to a narrow format."""

    numbers: Tensor
    """The rounded numbers, row-major regardless of the source's layout."""
    back: Tensor
    """Scales by which numbers are multiplied: () or (rows, 1), fp32; for blocks (rows, blocks)."""
    whole: Tensor | None = None
    """(), fp32: the additional scale of the whole tensor, for formats with blocks."""


Operand = Tensor | RoundedOperand
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

    def rows(self, expert: int | None = None) -> RoundedOperand:
        """Return W as an operand of y = x Wᵀ."""
        self._wait()
        numbers, back = (self.numbers, self.back) if expert is None else (self.numbers[expert], self.back[expert])
        return RoundedOperand(numbers if self.aligned else numbers.clone(), back)

    def columns(self, expert: int | None = None) -> RoundedOperand:
        """Return Wᵀ as an operand of dx = g W."""
        self._wait()
        numbers, back = (self.numbers, self.back) if expert is None else (self.numbers[expert], self.back[expert])
        return RoundedOperand(numbers.t().contiguous(), back)


def transposed(x: Operand) -> Operand:
    """Return xᵀ; 8-bit floats, which have one scale, are made row-major again."""
    return x.t() if isinstance(x, Tensor) else RoundedOperand(x.numbers.t().contiguous(), x.back)


def narrow_weight(weight: Tensor) -> NarrowWeight | None:
    """Return the 8-bit form of a weight, or None if it is not gathered in 8 bits."""
    return getattr(weight, "in_8_bits", None)


def forward_operand(weight: Tensor, narrow: NarrowWeight | None) -> Operand:
    """Return the operand W of y = x Wᵀ."""
    return weight if narrow is None else narrow.rows()


def backward_operand(weight: Tensor, narrow: NarrowWeight | None) -> Operand:
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


def round_operand(x: Tensor, operands: NumberFormat, gradient: bool = False) -> RoundedOperand:
    """Round x (rows, n), in any layout, to a narrow format. Rows are padded with zeros to the multiple that products
    need. `gradient`: x is the gradient of a result."""
    if operands.scales == "block":
        return RoundedOperand(*to_blocks(x, operands.name))
    by_row, dtype = operands.scales == "row", dtype_of(operands, gradient)
    largest = torch.linalg.vector_norm(x, math.inf, -1 if by_row else None, by_row, dtype=torch.float32)
    scale = scale_of(largest, dtype)
    rows, n = x.shape
    more = -n % operands.multiple
    if torch.compiler.is_compiling():  # in a graph, what is written to takes the layout of x: rows are asked for
        wide = nn.functional.pad(x * scale.to(x.dtype), (0, more))
        return RoundedOperand(wide.to(dtype).contiguous(), scale.reciprocal())
    narrow = (torch.zeros if more else torch.empty)(rows, n + more, dtype=dtype, device=x.device)
    torch.mul(x, scale.to(x.dtype), out=narrow[:, :n])  # one pass: scaled, rounded, and in rows
    return RoundedOperand(narrow, scale.reciprocal())


def operand(x: Operand, operands: NumberFormat | None, gradient: bool = False) -> Operand:
    """Return x (rows, n) as an operand, rounded once for several products. `gradient`: x is the gradient of a
    result."""
    return x if operands is None or not isinstance(x, Tensor) else round_operand(x, operands, gradient)


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
    left = round_operand(a, operands, gradient) if isinstance(a, Tensor) else a
    right = round_operand(b, operands) if isinstance(b, Tensor) else b
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
