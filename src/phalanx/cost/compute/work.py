"""Counts of work, and the seconds that they take at given rates (see unit_work.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from phalanx.spec.cluster.spec import Rates

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
    float8_flops: Column = 0
    """Of products of 8-bit floats, which are not among `gemm_flops`."""
    fused_bytes: Column = 0
    """Of `traffic_bytes`, what a device whose norms are one kernel does not move."""
    fused_kernels: Column = 0
    """Of `kernels`, what such a device does not launch."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.gemm_flops + other.gemm_flops,
            self.attention_flops + other.attention_flops,
            self.traffic_bytes + other.traffic_bytes,
            self.kernels + other.kernels,
            self.float8_flops + other.float8_flops,
            self.fused_bytes + other.fused_bytes,
            self.fused_kernels + other.fused_kernels,
        )

    def __mul__(self, n: Column) -> Work:
        return Work(
            self.gemm_flops * n,
            self.attention_flops * n,
            self.traffic_bytes * n,
            self.kernels * n,
            self.float8_flops * n,
            self.fused_bytes * n,
            self.fused_kernels * n,
        )

    @property
    def flops(self) -> Column:
        """FLOPs of products and attention."""
        return self.gemm_flops + self.float8_flops + self.attention_flops

    def seconds(self, r: Rates) -> Column:
        """Return the seconds of this work at a device's rates."""
        traffic, kernels = self.moved(r.fused_norms)
        return (
            self.gemm_flops * r.per_gemm_flop
            + self.attention_flops * r.per_attention_flop
            + traffic * r.per_byte
            + kernels * r.per_kernel
            + self.float8_flops * (r.per_float8_flop or 0)
        )

    def moved(self, fused_norms: bool) -> tuple[Column, Column]:
        """Return (bytes moved, kernels launched) on a device that has, or has not, norms of one kernel."""
        if fused_norms:
            return self.traffic_bytes - self.fused_bytes, self.kernels - self.fused_kernels
        return self.traffic_bytes, self.kernels


NO_WORK = Work()


def gemm(m: Column, n: int, k: int, e: int) -> Work:
    """Return the work of a product (m, k) x (k, n) in elements of e bytes."""
    return Work(2 * m * n * k, 0, e * (m * k + k * n + m * n), 1)


Weights = Literal["rounded", "gathered", "transposed"]
"""How a product of 8-bit floats gets a weight: rounds it just before; reads it as it came; transposes that."""


def float8_gemm(m: Column, n: int, k: int, e: int, weights: Weights = "rounded", times: int = 1) -> Work:
    """Return the work of a product (m, k) x (k, n) in 8-bit floats, from and to elements of e bytes: each operand is
    read for its scale, and read and written again where it is rounded (runtime/autograd/float8.py). `times`: the rows
    are divided among so many matrices."""
    rounded = 2 * e + 2
    weight = {"rounded": rounded, "gathered": 1, "transposed": 3}[weights]
    kernels = {"rounded": 15, "gathered": 8, "transposed": 9}[weights]
    traffic = m * k * rounded + times * k * n * weight + m * n * e
    return Work(0, 0, traffic, kernels * times, 2 * m * n * k)


def float8_gemm_weight(m: Column, n: int, k: int, e: int) -> Work:
    """Return the work of `gemm_weight` in 8-bit floats."""
    return float8_gemm(n, k, m, e) + Work(traffic_bytes=2 * n * k * e, kernels=1)


def gemm_weight(m: Column, n: int, k: int, e: int) -> Work:
    """Return the work of a weight's gradient (n, k), and of copying it to where it is reduced."""
    return gemm(n, k, m, e) + Work(traffic_bytes=2 * n * k * e, kernels=1)


def rms_norm(elements: Column, e: int, norms: int = 1) -> Work:
    """Return the work of the forward pass of RMS norms over `elements` elements: several passes in fp32, or, where it
    is one kernel, reading and writing them once."""
    return Work(0, 0, 5 * elements * e, 7 * norms, 0, 3 * elements * e, 6 * norms)


def rms_norm_grad(elements: Column, e: int, norms: int = 1) -> Work:
    """Return the work of their backward passes. With one kernel for the input and two for the weight, x and its
    gradient are read twice, and the input's gradient is written."""
    return Work(0, 0, 16 * elements * e, 12 * norms, 0, 11 * elements * e, 9 * norms)


def memory(elements: Column, e: int, kernels: int) -> Work:
    """Return the work of memory-bound kernels that read or write `elements` elements of e bytes in total."""
    return Work(traffic_bytes=elements * e, kernels=kernels)
