"""The MLP: gated or not, over the ranks of tp."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.nn import functional
from phalanx.runtime.autograd import recompute
from phalanx.runtime.model_parallel import sequence, tensor
from phalanx.runtime.model_parallel.sequence import ProductTerm
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.spec.model.spec import ModelSpec


class MLP(nn.Module):
    """A gated (SwiGLU) or plain (GELU) MLP. `width`: this rank's part of the hidden width."""

    def __init__(self, spec: ModelSpec, width: int, block: int, tp: TensorParallel | None) -> None:
        super().__init__()
        self.gated, self.unit, self.tp = spec.gated, f"blocks.{block}", tp
        self.approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
        if self.gated:
            self.gate = nn.Linear(spec.hidden, width, bias=spec.mlp_bias)
        self.up = nn.Linear(spec.hidden, width, bias=spec.mlp_bias)
        self.down = nn.Linear(width, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x: Tensor, needed: bool = True) -> Tensor | ProductTerm:
        """Return what the MLP adds to the stream: with tp this rank's term, with sequence parallelism the factors of
        it. `needed`: whether the value is used (runtime/autograd/recompute.py)."""
        x = self._activated(x, self.tp)
        if self.tp is None:
            return recompute.linear(self.down, x, needed)
        if self.tp.rows is not None:
            return sequence.factors(x, self.down)
        return tensor.rows(x, self.down, needed)

    def term(self, x: Tensor, needed: bool = True) -> Tensor:
        """Return this rank's term, without sequence parallelism, for an x whose gradient the caller sums over tp."""
        x = self._activated(x, None)
        return recompute.linear(self.down, x, needed) if self.tp is None else tensor.rows(x, self.down, needed)

    def _activated(self, x: Tensor, tp: TensorParallel | None) -> Tensor:
        layers = (self.gate, self.up) if self.gated else (self.up,)
        into = tensor.columns(tp, self.unit, x, layers)
        return functional.swiglu(*into) if self.gated else F.gelu(into[0], approximate=self.approximate)
