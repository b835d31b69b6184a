"""Norms of the residual stream and of heads."""

import torch
from torch import Tensor, nn

from phalanx.nn import functional
from phalanx.nn.gated_norm import rms_norm_over_ranks
from phalanx.runtime.autograd import deferred_weight_grads
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.schedule.event import Phase
from phalanx.spec.model.spec import ModelSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight, self.eps)


class AllHeadsNorm(RMSNorm):
    """An RMSNorm over the heads of all tp ranks, of which this rank has `size` elements. Ranks add up one number a
    token, forward and backward; with `copies`, neighbouring ranks hold the same heads."""

    def __init__(self, size: int, eps: float, tp: TensorParallel | None, unit: str, copies: int = 1) -> None:
        super().__init__(size, eps)
        self.tp, self.unit, self.copies = tp, unit, copies

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is None or self.copies == self.tp.split.tp:  # every rank has all heads
            return super().forward(x)
        ranks = self.tp.split.tp // self.copies
        return rms_norm_over_ranks(x, self.weight, self.eps, ranks, self._total)

    def _total(self, numbers: Tensor, phase: Phase) -> Tensor:
        assert self.tp is not None
        self.tp.all_reduce(numbers, self.unit, phase).wait()
        return numbers.div_(self.copies)


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
