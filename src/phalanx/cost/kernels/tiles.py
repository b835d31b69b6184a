"""Matrix products (m, k) x (k, n) cut into tiles: one model, used for training and for kernels measured in isolation.

Each of the chip's P processors computes one tile of a x b at a time, so that tiles are done in waves, and the library
chooses the best of some sizes (NVIDIA, "Matrix multiplication background", tile and wave quantisation):

    t = min over tiles  waves 2 a b (k + k0) P / (share rate)       waves = ceil(m/a) ceil(n/b) / P, rounded up

k0 is the cost of filling and draining a tile's pipeline, as an inner size; `share` is a tile's rate relative to the
largest tiles. There are two sets of constants because they were fitted on different data. Training constants come
from whole published steps, which reveal neither partial waves nor splits along k (cost/analytic/kernels.py). Library
constants come from kernels measured in isolation, which do: the last wave's idle processors cost a part of their
time, and if there are few tiles, each is split along k (product.py).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phalanx.cost.hardware.columns import Column


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles, (rows, columns) each."""

    sizes: tuple[tuple[int, int], ...]

    @cached_property
    def rows(self) -> frozenset[int]:
        """Distinct numbers of rows of the tiles."""
        return frozenset(a for a, _ in self.sizes)

    @cached_property
    def columns(self) -> frozenset[int]:
        """Distinct numbers of columns of the tiles."""
        return frozenset(b for _, b in self.sizes)


def whole_waves_s(
    m: Column,
    n: Column,
    k: Column,
    tiles: Tiles,
    shares: tuple[float, ...],
    processors: Column,
    rate: Column,
    fill: Column,
    batch: Column = 1.0,
) -> Column:
    """Return seconds of `batch` products that fill the chip together, at `rate` FLOP/s, in whole waves."""
    down, across = {a: batch * np.ceil(m / a) for a in tiles.rows}, {b: np.ceil(n / b) for b in tiles.columns}
    best: Column = np.inf
    for (a, b), share in zip(tiles.sizes, shares, strict=True):
        best = np.minimum(best, np.ceil(down[a] * across[b] / processors) * (a * b / share))
    return best * (2 * (k + fill)) * processors / rate


def split_waves_s(
    m: Column,
    n: Column,
    k: Column,
    tiles: Tiles,
    shares: tuple[Column, ...],
    processors: Column,
    rate: Column,
    fill: Column,
    idle: Column,
    part: Column,
) -> Column:
    """Return seconds of a product at `rate` FLOP/s: the last wave costs the share `idle` of its idle processors, and
    tiles are split into parts of k, of at least `part`, if processors would have none."""
    best: Column = np.inf
    for (a, b), share in zip(tiles.sizes, shares, strict=True):
        count = np.ceil(m / a) * np.ceil(n / b)
        parts = np.maximum(1.0, np.minimum(processors / count, k / part))
        waves = count * parts / processors
        waves = waves + idle * (np.ceil(waves) - waves)
        best = np.minimum(best, waves * a * b / share * (k / parts + fill))
    return 2 * best * processors / rate
