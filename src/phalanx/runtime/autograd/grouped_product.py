"""Products of several experts' rows on a GPU, in kernels that find their rows by themselves.

cuBLAS looks for a kernel whenever a product has a shape that it has not seen, which takes the host 0.5 ms on an H200,
and experts get other numbers of rows in every pass: with 12 layers of 8 experts it waited most of a step. torch's
grouped product (CUTLASS) takes any number of rows as it comes, at the same FLOP/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.runtime.observe import host_values

_HOPPER = 9
"""The compute capability that torch has the kernel for and on which it has run. On older and newer GPUs but Blackwell
it reads the numbers of rows on the host; on Blackwell, torch 2.10's has been seen to fail."""
_ALIGNED = 8  # numbers of two bytes: rows begin at multiples of 16 bytes


class Rows(NamedTuple):
    """Where the rows of each expert are, on the device."""

    ends: Tensor
    """(experts,) int32: the row after each expert's last."""
    counts: Tensor
    """(experts,) int32."""


def runs(device: torch.device, *operands: Tensor) -> bool:
    """Whether products of these operands run here: in bf16, on a GPU that has the kernel."""
    if device.type == "cpu" or any(t.dtype != torch.bfloat16 or t.shape[-1] % _ALIGNED for t in operands):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == _HOPPER


def rows(counts: Sequence[int], device: torch.device) -> Rows:
    """Send the numbers of rows of each expert to the device."""
    ends, of = host_values.sent([*accumulate(counts), *counts], device).int().chunk(2)
    return Rows(ends, of)


def all_at_once(x: Tensor, weights: Tensor, where: Rows) -> Tensor:
    """Compute x_e W_e for the rows of every expert e, (rows, n), from x (rows, m) and W (experts, m, n)."""
    return torch._grouped_mm(x, weights, where.ends)


def of_one(a: Tensor, b: Tensor, expert: int, where: Rows) -> Tensor:
    """Compute a b of one expert: its rows, a (rows, m), by its weights, b (m, n); or what its gradients are summed
    over, a (m, rows) by b (rows, n)."""
    count = where.counts[expert : expert + 1]
    if a.stride(-1) == 1:
        return torch._grouped_mm(a, b[None], count)
    return torch._grouped_mm(a, b, count)[0]
