"""Matrix products by shape, for library kernels measured in isolation (tiles.py has the model):

compute = tiles in waves, partly whole, split along k where there are few
read    = bytes / (share bytes/s), faster where all operands fit in a share of the level-2 cache
t       = start + (compute^p + read^p)^(1/p) + quantising the input
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.kernels.chip import KernelChip
from phalanx.cost.kernels.tiles import Tiles, split_waves_s


@dataclass(frozen=True)
class ProductConstants:
    """Rates of products relative to a generation's datasheets."""

    start_s: Column = 2e-6
    """Seconds from launch to the first tile, and from the last to the end."""
    memory: Column = 0.85
    """Share of memory bandwidth."""
    cache_share: Column = 0.4
    """Share of the level-2 cache up to which operands are still found there."""
    cache_gain: Column = 2.0
    """Rate of reads from the level-2 cache over the rate from memory."""
    rate16: Column = 0.8
    """Share of FLOP/s that the largest tiles reach, of 16 bits; then of 8 and of 4."""
    rate8: Column = 0.7
    rate4: Column = 0.55
    fill: Column = 200.0
    """k0: cost of filling and draining a tile's pipeline, as an inner size."""
    sharpness: Column = 2.5
    """Exponent by which computing and reading add: large, the longer hides the other."""
    small_tile: Column = 0.65
    """Share of the largest tiles' rate that tiles of 64 x 64 reach."""
    medium_tile: Column = 0.9
    """Share of the largest tiles' rate that tiles of 128 x 128 reach."""
    idle: Column = 0.5
    """Share of the last wave's idle processors that stay idle."""
    part: Column = 1024.0
    """Smallest part of k that a tile is cut into."""


@dataclass(frozen=True)
class ProductLibrary:
    """Overheads of an engine's kernel for a number type."""

    quantise_s: Column = 2e-6
    """Seconds of the kernels that turn inputs into 8 or 4 bits."""
    passes: Column = 4.0
    """Bytes moved by quantising, per element of the input."""
    rate: Column = 1.0
    """Share of the type's rate that this library reaches."""
    launch_s: Column = 1e-6
    """Seconds that the host takes to launch it without CUDA graphs: never faster."""


_TILES = Tiles(((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)))


def product_s(
    m: Any,
    n: Any,
    k: Any,
    chip: KernelChip,
    c: ProductConstants,
    e: Any,
    peak: Any,
    lib: ProductLibrary | None = None,
) -> Any:
    """Return seconds of a product with weights of `e` bytes per element, at a datasheet's `peak` FLOP/s.

    Without a library: 16 bits, nothing quantised.
    """
    share = np.where(peak < 1.5 * chip.half, c.rate16, np.where(peak < 3 * chip.half, c.rate8, c.rate4))
    share = share if lib is None else share * lib.rate
    middle = np.sqrt(c.small_tile)
    shares = (1.0, 1.0, c.medium_tile, middle, middle, c.small_tile)
    compute = split_waves_s(m, n, k, _TILES, shares, chip.processors, peak * share, c.fill, c.idle, c.part)
    size = e * (m * k + k * n) + 2.0 * m * n
    held = 1 / (1 + (size / (c.cache_share * chip.cache_bytes)) ** 3)
    rate = chip.memory_bytes_per_s * c.memory
    read = size / rate * (1 - held + held / c.cache_gain)
    seconds = c.start_s + (compute**c.sharpness + read**c.sharpness) ** (1 / c.sharpness)
    if lib is None:
        return seconds
    seconds = seconds + np.where(e < 2, lib.quantise_s + lib.passes * m * k / rate, 0.0)
    return (seconds**4 + lib.launch_s**4) ** 0.25
