"""Products of several experts' rows on a GPU, in kernels that find their rows by themselves.

cuBLAS selects a kernel whenever a product has a new shape, which takes the host 0.5 ms on an H200, and experts get
different numbers of rows in every pass: with 12 layers of 8 experts the GPU waited for more than half of a step.
torch's grouped product (CUTLASS) takes any number of rows as it comes, at the same FLOP/s.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.runtime.tracing import host_values

_HOPPER = 9
"""Compute capability for which torch has the kernel and on which it was tested. On Blackwell, torch 2.10's kernel
fails; on all other GPUs torch reads the numbers of rows on the host."""
_ALIGNED = 8  # numbers of two bytes: matrices and their rows begin at multiples of 16 bytes
_MOST_EXPERTS = 1023  # experts in one kernel


class RowEnds(NamedTuple):
    """Row offsets of each expert, on the device."""

    ends: Tensor
    """(experts,) int32: the row after each expert's last."""
    counts: Tensor
    """(experts,) int32."""


def fits(*operands: Tensor) -> bool:
    """Whether the kernel supports these matrices: in bf16, aligned, and of aligned widths."""
    return all(
        t.dtype == torch.bfloat16 and not t.shape[-1] % _ALIGNED and not t.storage_offset() % _ALIGNED
        for t in operands
    )


def row_ends(counts: Sequence[int], *operands: Tensor) -> RowEnds | None:
    """Return the row offsets of experts with `counts` rows on the operands' device; None if there is no kernel for
    these operands, or nothing to compute."""
    device = operands[0].device
    if device.type == "cpu" or not any(counts) or len(counts) > _MOST_EXPERTS or not fits(*operands):
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return None
    return send_counts(counts, device)


def send_counts(counts: Sequence[int], device: torch.device) -> RowEnds:
    """Return the row offsets of experts with `counts` rows on a device."""
    ends, of = host_values.to_device([*accumulate(counts), *counts], device).int().chunk(2)
    return RowEnds(ends, of)


def multiply_all(x: Tensor, weights: Tensor, where: RowEnds) -> Tensor:
    """Compute x_e W_e for the rows of every expert e, (rows, n), from x (rows, m) and W (experts, m, n)."""
    return torch._grouped_mm(x, weights, where.ends)


def weight_gradients(g: Tensor, x: Tensor, where: RowEnds) -> Tensor:
    """Compute the gradients of every expert's weights, g_eᵀ x_e, (experts, m, n), from g (rows, m) and x (rows, n).
    Every expert has rows."""
    return torch._grouped_mm(g.t(), x, where.ends)


def multiply_expert(x: Tensor, weights: Tensor, expert: int, where: RowEnds) -> Tensor:
    """Compute x_e W_e of one expert, (rows, n), from its rows x_e (rows, m) and W_e (m, n)."""
    return torch._grouped_mm(x, weights[None], where.counts[expert : expert + 1])


def expert_weight_gradient(g: Tensor, x: Tensor, expert: int, where: RowEnds) -> Tensor:
    """Compute the gradient of one expert's weights, g_eᵀ x_e, (m, n), from g_e (rows, m) and x_e (rows, n)."""
    return torch._grouped_mm(g.t(), x, where.counts[expert : expert + 1])[0]
