"""Counts of work, and the seconds that they take at given rates (see unit_work.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from phalanx.spec.cluster.spec import Rates
from phalanx.spec.number_formats import NumberFormat

Column = Any
"""A number, or a NumPy column of numbers: one per strategy."""


@dataclass(frozen=True)
class Work:
    """Counts of work. FLOPs: 2 per multiply-add; attention over the full square (no causal halving),
    backward twice forward, as model FLOPs are counted (Narayanan et al. 2021, appendix)."""

    gemm_flops: Column = 0
    attention_flops: Column = 0
    traffic_bytes: Column = 0
    kernels: Column = 0
    narrow_flops: Column = 0
    """FLOPs of products of a narrow format, not included in `gemm_flops`."""
    fused_bytes: Column = 0
    """Part of `traffic_bytes` not moved by a device whose norms are one kernel."""
    fused_kernels: Column = 0
    """Part of `kernels` not launched by a device whose norms are one kernel."""
    narrow_format: str = ""
    """The narrow format; "": no such products."""

    def __add__(self, other: Work) -> Work:
        """Return the sum; both may not have products of different narrow formats."""
        return Work(
            self.gemm_flops + other.gemm_flops,
            self.attention_flops + other.attention_flops,
            self.traffic_bytes + other.traffic_bytes,
            self.kernels + other.kernels,
            self.narrow_flops + other.narrow_flops,
            self.fused_bytes + other.fused_bytes,
            self.fused_kernels + other.fused_kernels,
            self.narrow_format or other.narrow_format,
        )

    def __mul__(self, n: Column) -> Work:
        return Work(
            self.gemm_flops * n,
            self.attention_flops * n,
            self.traffic_bytes * n,
            self.kernels * n,
            self.narrow_flops * n,
            self.fused_bytes * n,
            self.fused_kernels * n,
            self.narrow_format,
        )

    @property
    def flops(self) -> Column:
        """FLOPs of products and attention."""
        return self.gemm_flops + self.narrow_flops + self.attention_flops

    def seconds(self, r: Rates) -> Column:
        """Return the seconds of this work at a device's rates."""
        traffic, kernels = self.moved(r.fused_norms)
        return (
            self.gemm_flops * r.per_gemm_flop
            + self.attention_flops * r.per_attention_flop
            + traffic * r.per_byte
            + kernels * r.per_kernel
            + self.narrow_flops * r.per_narrow_flop.get(self.narrow_format, 0)
        )

    def moved(self, fused_norms: bool) -> tuple[Column, Column]:
        """Return (bytes moved, kernels launched) on a device with or without norms as one kernel."""
        if fused_norms:
            return self.traffic_bytes - self.fused_bytes, self.kernels - self.fused_kernels
        return self.traffic_bytes, self.kernels


NO_WORK = Work()


def gemm(m: Column, n: int, k: int, e: int) -> Work:
    """Return the work of a product (m, k) x (k, n) in elements of e bytes."""
    return Work(2 * m * n * k, 0, e * (m * k + k * n + m * n), 1)


Weights = Literal["rounded", "gathered", "transposed"]
"""Source of a weight in a product of a narrow format: rounded just before; read as gathered; gathered and
transposed."""


class Narrow(NamedTuple):
    """Parameters of products of a narrow format."""

    format: NumberFormat
    weights: Weights = "rounded"


def narrow_gemm(m: Column, n: int, k: int, e: int, narrow: Narrow, times: int = 1) -> Work:
    """Return the work of a product (m, k) x (k, n) in a narrow format, from and to elements of e bytes: each operand
    that is rounded is read for its scales, and then read and written (runtime/autograd/narrow_product.py). `times`:
    number of matrices among which the rows are divided."""
    each = narrow.format.bytes_per_value
    rounded = 2 * e + 2 * each
    weight = {"rounded": rounded, "gathered": each, "transposed": 3 * each}[narrow.weights]
    kernels = {"rounded": 15, "gathered": 8, "transposed": 9}[narrow.weights]
    traffic = m * k * rounded + times * k * n * weight + m * n * e
    return Work(0, 0, traffic, kernels * times, 2 * m * n * k, narrow_format=narrow.format.name)


def narrow_gemm_weight(m: Column, n: int, k: int, e: int, narrow: Narrow) -> Work:
    """Return the work of `gemm_weight` in a narrow format."""
    return narrow_gemm(n, k, m, e, Narrow(narrow.format)) + Work(traffic_bytes=2 * n * k * e, kernels=1)


def gemm_weight(m: Column, n: int, k: int, e: int) -> Work:
    """Return the work of a weight's gradient (n, k), and of copying it into the reduction buffer."""
    return gemm(n, k, m, e) + Work(traffic_bytes=2 * n * k * e, kernels=1)


def rms_norm(elements: Column, e: int, norms: int = 1) -> Work:
    """Return the work of the forward pass of RMS norms over `elements` elements: several passes in fp32, or one that
    reads and writes them once if the norm is a single kernel."""
    return Work(0, 0, 5 * elements * e, 7 * norms, 0, 3 * elements * e, 6 * norms)


def rms_norm_grad(elements: Column, e: int, norms: int = 1) -> Work:
    """Return the work of the backward pass of RMS norms. With one kernel for the input and two for the weight, x and
    its gradient are read twice, and the input's gradient is written."""
    return Work(0, 0, 16 * elements * e, 12 * norms, 0, 11 * elements * e, 9 * norms)


def memory(elements: Column, e: int, kernels: int) -> Work:
    """Return the work of memory-bound kernels that read or write `elements` elements of e bytes in total."""
    return Work(traffic_bytes=elements * e, kernels=kernels)
