"""Matrix products by shape, for library kernels measured in isolation (tiles.py has the model):

compute = tiles in waves, partly whole, split along k where there are few
read    = bytes / (share bytes/s), faster where all operands fit in a share of the level-2 cache
t       = start + (compute^p + read^p)^(1/p) + quantising the input

Routed experts are grouped products, with routing, permuting and summing of tokens, on the busiest rank. Of a layer's
E experts a rank has E / ep, each cut by tp. If n tokens choose k experts each, n k / ep rows reach the mean rank, and
`hot` times as many the busiest if routing is skewed. They reach h of its experts, each with r rows, padded to tiles:

    t = start + h expert + passes over tokens + (compute^p + read^p)^(1/p)
    compute = 2 h (r + padding) 3 hidden f / (share FLOP/s)      f: the expert's width on a rank, at f / (f + inner)
    read    = h 3 hidden f bytes / (share bytes/s)
"""

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
    """Share of the peak FLOP/s that the largest tiles reach in 16 bits; `rate8`, `rate4`: in 8 and 4."""
    rate8: Column = 0.7
    rate4: Column = 0.55
    fill: Column = 200.0
    """k0: cost of filling and draining a tile's pipeline, as an inner size."""
    sharpness: Column = 2.5
    """Exponent p of the sum of computing and reading: if large, the longer of the two hides the other."""
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
    """Seconds that the host takes to launch it without CUDA graphs: it is never faster."""


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
    """Return seconds of a product with weights of `e` bytes per element, at a datasheet's `peak` FLOP/s. Without a
    library: 16 bits, nothing quantised."""
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


@dataclass(frozen=True)
class ExpertLayer:
    """A layer's routed experts and their placement on ranks."""

    hidden: Column
    ffn: Column
    """Width of one expert."""
    top_k: Column
    count: Column
    moe_tp: Column
    moe_ep: Column
    matrices: Column = 3.0
    """Matrices of an expert: 3 with a gate, 2 without."""


@dataclass(frozen=True)
class ExpertConstants:
    """Rates of grouped products on a generation of chips."""

    rate16: Column = 0.5
    """Share of the peak FLOP/s reached in 16 bits; `rate8`, `rate4`: in 8 and 4."""
    rate8: Column = 0.5
    rate4: Column = 0.4
    memory: Column = 0.9
    """Share of memory bandwidth."""
    sharpness: Column = 2.0
    cache_share: Column = 0.5
    cache_gain: Column = 2.0
    """These three: as in ProductConstants."""
    rows: Column = 30.0
    """Most rows by which an expert's tokens are padded, before the library's factor `padding`."""
    inner: Column = 100.0
    """Width of an expert on a rank at which products reach half of their rate."""
    hot1: Column = 2.0
    """Load of the busiest of many ranks over the mean, if experts are chosen by a power law of exponent 1.01."""
    hot12: Column = 2.2
    """The same load for an exponent of 1.2."""
    expert_s: Column = 1e-7
    """Seconds per expert that is reached."""


@dataclass(frozen=True)
class ExpertLibrary:
    """Deviation of one library's kernels."""

    start_s: Column = 3e-5
    """Seconds of routing, and of launches."""
    quantised: Column = 1.2
    """Factor of `start_s` with weights of 8 or 4 bits."""
    memory: Column = 0.8
    """Factor of the chip's `memory`."""
    passes: Column = 4.0
    """Passes over the tokens that a rank computes."""
    all_passes: Column = 5.0
    """Passes over all tokens, if experts are spread over ranks."""
    padding: Column = 1.0
    """Factor of `rows`."""


@dataclass(frozen=True)
class ExpertRate:
    """Rate of a library with one type of weights."""

    rate: Column = 1.0
    """Factor of the chip's share."""


def experts_s(
    tokens: Any,
    x: ExpertLayer,
    chip: KernelChip,
    c: ExpertConstants,
    lib: ExpertLibrary,
    of_type: ExpertRate,
    e: Any,
    peak: Any,
    skew: Any = 0.0,
) -> Any:
    """Return seconds of one layer's routed experts. `e`: bytes per element of weights; `peak`: the datasheet's FLOP/s
    of their products; `skew`: exponent of the power law by which tokens choose experts (0, 1.01, 1.2)."""
    local, routed = x.count / x.moe_ep, tokens * x.top_k / x.moe_ep
    over = np.where(skew > 1.1, c.hot12, np.where(skew > 0, c.hot1, 1.0))
    hot = np.minimum(1 + (over - 1) * (1 - 1 / x.moe_ep), x.moe_ep)
    chosen = local * (1 - (1 - np.minimum(x.top_k / x.count, 1.0)) ** tokens)
    reached = np.maximum(np.where(skew > 0, chosen, np.minimum(local, routed)), 1.0)
    rows = routed * hot / reached
    f = x.ffn / x.moe_tp
    share = np.where(peak < 1.5 * chip.half, c.rate16, np.where(peak < 3 * chip.half, c.rate8, c.rate4))
    rate = peak * share * of_type.rate * f / (f + c.inner)
    padded = rows + 0.5 * c.rows * lib.padding * (1 - np.exp(-rows / c.rows))
    weights = reached * x.matrices * x.hidden * f
    compute = 2 * padded * weights / rate
    held = 1 / (1 + (weights * e / (c.cache_share * chip.cache_bytes)) ** 3)
    memory = chip.memory_bytes_per_s * c.memory
    read = weights * e / (memory * lib.memory) * (1 - held + held / c.cache_gain)
    moved = 2.0 * lib.all_passes * tokens * x.hidden * (1 - 1 / x.moe_ep)
    moved = moved + 4.0 * lib.passes * routed * hot * (x.hidden + f)
    start = lib.start_s * np.where(e < 2, lib.quantised, 1.0) + c.expert_s * reached
    return start + moved / memory + (compute**c.sharpness + read**c.sharpness) ** (1 / c.sharpness)
