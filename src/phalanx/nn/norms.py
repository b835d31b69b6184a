"""Norms of the residual stream and of heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.nn import functional
from phalanx.runtime.autograd import deferred_weight_grads
from phalanx.spec.model.spec import ModelSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, whose parameter gradients can be deferred."""

    def forward(self, x: Tensor) -> Tensor:
        if not deferred_weight_grads.owners(self.weight):
            return super().forward(x)
        return functional.layer_norm(x, self.weight, self.bias, self.eps)


def make_norm(spec: ModelSpec) -> nn.Module:
    """Make the norm of a model's residual stream."""
    if spec.norm == "rms":
        return RMSNorm(spec.hidden, spec.norm_eps)
    return LayerNorm(spec.hidden, spec.norm_eps, bias=spec.norm_bias)
