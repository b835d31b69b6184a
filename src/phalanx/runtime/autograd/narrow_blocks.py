"""Operands with a scale per block of a row, and their products (spec/number_formats.py: mxfp8, nvfp4).

    mxfp8   32 numbers in e4m3 share a power of two, the largest with which they still fit
    nvfp4   16 numbers in e2m1 share a scale in e4m3, and all numbers of a tensor a power of two

Both steps are custom torch operations, so that their temporaries count as a kernel's and not as tensors of the step.
On CPUs a product multiplies the exact values of the rounded numbers, with sums in fp32, as Blackwell's tensor cores
do: the oracle for them. Non-finite inputs give non-finite results. References: OCP Microscaling Formats 1.0; NVIDIA
2025, "Pretraining Large Language Models with NVFP4", whose random transforms and stochastic rounding of gradients are
left out; cuBLAS's layout of scales (docs.nvidia.com/cuda/cublas, "1D Block Scaling Factors Layout").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from phalanx.spec.number_formats import NUMBER_FORMATS

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
    """Round x (rows, n), in any layout, to the format `name`. Returns (numbers, rows padded with zeros to a multiple;
    a scale per block; one scale of all, fp32). Values are numbers times both scales."""
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
        torch._scaled_mm(a, b.t(), laid_out(a_scales), laid_out(b_scales), out_dtype=out.dtype, out=out)
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


def laid_out(scales: Tensor) -> Tensor:
    """Return the scales of (rows, blocks) in the order in which tensor cores read them: tiles of 128 rows and 4
    blocks, in each the rows 0, 32, 64 and 96 next to each other; zeros fill up the last tiles."""
    rows, blocks = scales.shape
    bytes_ = nn.functional.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = bytes_.view(len(bytes_) // 128, 4, 32, bytes_.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten().view(scales.dtype)
