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

    def __add__(self, other: Work) -> Work:
        return Work(
            self.gemm_flops + other.gemm_flops,
            self.attention_flops + other.attention_flops,
            self.traffic_bytes + other.traffic_bytes,
            self.kernels + other.kernels,
            self.float8_flops + other.float8_flops,
        )

    def __mul__(self, n: Column) -> Work:
        each = (self.gemm_flops, self.attention_flops, self.traffic_bytes, self.kernels, self.float8_flops)
        return Work(*(count * n for count in each))

    @property
    def flops(self) -> Column:
        """FLOPs of products and attention."""
        return self.gemm_flops + self.float8_flops + self.attention_flops

    def seconds(self, r: Rates) -> Column:
        """Return the seconds of this work at a device's rates."""
        return (
            self.gemm_flops * r.per_gemm_flop
            + self.attention_flops * r.per_attention_flop
            + self.traffic_bytes * r.per_byte
            + self.kernels * r.per_kernel
            + self.float8_flops * (r.per_float8_flop or 0)
        )


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


def memory(elements: Column, e: int, kernels: int) -> Work:
    """Return the work of memory-bound kernels that read or write `elements` elements of e bytes in total."""
    return Work(traffic_bytes=elements * e, kernels=kernels)
