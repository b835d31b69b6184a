"""Sizes of adapted weights and the traffic of their adapters; for trained magnitudes (DoRA, Liu et al. 2024), traffic
and memory of norms and scales.

An adapted weight W of m outputs and n inputs computes, with its adapters B A of rank r and its magnitudes v of m,

    y = W x + (v / |W + s B A| - 1) W x + v / |W + s B A| s B A x

where the norms, of the rows, are made in every forward pass and are constants of the backward pass. B A is a product
with the identity of n (huggingface/peft 5d602fd, src/peft/tuners/lora/dora.py:66, 131; pytorch/torchtune bd2a0fc,
torchtune/modules/peft/dora.py). peft keeps adapters in fp32, so that what they touch becomes fp32 (`wide`).
"""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column


@dataclass(frozen=True)
class AdaptedWeights:
    """Weights of a block that have adapters (Hu et al. 2021), on average; all 0 without any."""

    number: Column = 0.0
    inputs: Column = 0.0
    """Inputs of all of them."""
    shared: Column = 0.0
    """The part of `inputs` that another adapted weight reads too: of k and v with q, of a gated MLP's second
    matrix."""
    results: Column = 0.0
    """The part of `inputs` that is attention's result, which its backward pass needs too."""
    outputs: Column = 0.0

    def traffic(self, wide: Column) -> tuple[Column, Column]:
        """Return bytes that the adapters' own kernels move per token, forward and backward, for y = W x + s B (A x)
        without dropout. A reads x; B A x is written, scaled, and added to W x. In the backward pass B's two products
        read the scaled gradient, and A's read x and write its gradient, which is added to that of W. For peft's
        adapters in fp32 (`wide`), x is cast to fp32, which autocast casts back, in both directions (huggingface/peft
        0033694, src/peft/tuners/lora/layer.py, Linear.forward); Megatron's are in 16 bits, of joined weights
        (NVIDIA-NeMo/Megatron-Bridge 067f987, src/megatron/bridge/peft/lora_layers.py)."""
        read = self.inputs - (1 - wide) * self.shared
        return (2 + 12 * wide) * read + 12 * self.outputs, (10 + 12 * wide) * read + 8 * self.outputs


@dataclass(frozen=True)
class Magnitudes:
    """Sizes of a block's adapted weights with magnitudes, on average over blocks; all 0 without magnitudes."""

    outputs: Column = 0.0
    """Outputs of all adapted weights, each with a magnitude."""
    weights: Column = 0.0
    """Elements of all adapted weights."""
    squares: Column = 0.0
    """Elements of all identity matrices: the square of each weight's inputs."""
    rank: Column = 0.0
    most_weights: Column = 0.0
    """Elements of the largest adapted weight."""
    most_square: Column = 0.0
    """Elements of the largest identity matrix."""
    again: Column = 0.0
    """1: with dropout before the adapters, their input is multiplied by the frozen weight too."""

    def norm_flops(self) -> Column:
        """Return the FLOPs of B A in a forward pass; there are none in the backward pass."""
        return 2 * self.rank * (self.squares + self.weights)

    def norm_traffic(self, wide: Column) -> Column:
        """Return bytes moved for the norms of a block: the identity is written, cast and read; B A is written, cast,
        scaled, added to the cast weight, and the sum is read."""
        return (4 + 8 * wide) * self.squares + (14 + 24 * wide) * self.weights

    def norm_bytes(self, wide: Column) -> Column:
        """Return the peak bytes of the norms of the largest weight: of the identity with its cast, or of B A, the
        weight, and the scaled sum."""
        return np.maximum((2 + 4 * wide) * self.most_square, (6 + 10 * wide) * self.most_weights)

    def scale_traffic(self, wide: Column) -> tuple[Column, Column]:
        """Return bytes moved per token to scale and add the results, forward and backward, in addition to an
        adapter's own scale and sum: two products with the scales and their sum; gradients of both, and of the
        scales."""
        return (14 + 24 * wide) * self.outputs, (30 + 48 * wide) * self.outputs


NO_ADAPTERS, NO_MAGNITUDES = AdaptedWeights(), Magnitudes()
KEPT_RESULTS = 2
"""Number of results that the gradient of the scales needs: of the weight and of the adapters, both in 16 bits."""
