"""Sizes of adapted weights, and what their adapters move; of trained magnitudes (DoRA, Liu et al. 2024), what their
norms and scales move and keep.

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
    """Of these, inputs that another one reads too: of k and v with q, of the second matrix of a gated MLP."""
    outputs: Column = 0.0

    def traffic(self, wide: Column) -> tuple[Column, Column]:
        """Return bytes that the adapters' own kernels move per token, forward and backward, run one by one: y = W x +
        s B (A x). A reads x; B A x is written, scaled, and added to W x. Back, B's two products read the scaled
        gradient and A's read x and write its gradient, which is added to that of W. peft's adapters in fp32 (`wide`)
        have x cast to fp32, which autocast casts back, in both directions (huggingface/peft 0033694,
        src/peft/tuners/lora/layer.py, Linear.forward); Megatron's are in 16 bits, of weights that are joined
        (NVIDIA-NeMo/Megatron-Bridge 067f987, src/megatron/bridge/peft/lora_layers.py). Without dropout."""
        read = self.inputs - (1 - wide) * self.shared
        return (2 + 12 * wide) * read + 12 * self.outputs, (10 + 12 * wide) * read + 8 * self.outputs


@dataclass(frozen=True)
class Magnitudes:
    """Adapted weights of a block on average; all 0 without magnitudes."""

    outputs: Column = 0.0
    """Magnitudes: outputs of all adapted weights."""
    weights: Column = 0.0
    """Elements of all of them."""
    squares: Column = 0.0
    """Elements of an identity for each, of its inputs squared."""
    rank: Column = 0.0
    most_weights: Column = 0.0
    """Elements of the largest of them."""
    most_square: Column = 0.0
    again: Column = 0.0
    """1: dropout is between their input and the adapters, whose input multiplies the frozen weight again."""

    def norm_flops(self) -> Column:
        """Return the FLOPs of B A, forward alone."""
        return 2 * self.rank * (self.squares + self.weights)

    def norm_traffic(self, wide: Column) -> Column:
        """Return bytes moved for the norms of a block: the identity is written, cast and read; B A is written, cast,
        scaled, added to the cast weight, and the sum is read."""
        return (4 + 8 * wide) * self.squares + (14 + 24 * wide) * self.weights

    def norm_bytes(self, wide: Column) -> Column:
        """Return the bytes that the norms of the largest weight need at once: the identity with its cast; B A, the
        weight, and B A scaled and added."""
        return np.maximum((2 + 4 * wide) * self.most_square, (6 + 10 * wide) * self.most_weights)

    def scale_traffic(self, wide: Column) -> tuple[Column, Column]:
        """Return bytes moved per token by what scales and adds the results, forward and backward, beyond an adapter's
        own scale and sum: two products with the scales and their sum; gradients of both, and of the scales."""
        return (14 + 24 * wide) * self.outputs, (30 + 48 * wide) * self.outputs


NO_ADAPTERS, NO_MAGNITUDES = AdaptedWeights(), Magnitudes()
KEPT_RESULTS = 2
"""Results that the gradient of the scales needs, of the weight and of the adapters, both 16 bits wide."""
