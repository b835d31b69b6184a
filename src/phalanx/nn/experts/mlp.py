"""The MLP: gated or not, over the ranks of tp."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.nn import functional
from phalanx.runtime.autograd import recompute
from phalanx.runtime.model_parallel import sequence, tensor
from phalanx.runtime.model_parallel.sequence import ProductTerm
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.spec.model.spec import ModelSpec

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": functional.swiglu,
    "geglu": functional.geglu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": functional.relu2,
}
"""Activations that run, of one tensor or of a gate and another, by their names in a ModelSpec."""


class MLP(nn.Module):
    """A gated (SwiGLU, GEGLU) or plain (GELU, squared ReLU) MLP. `width`: this rank's part of the hidden width."""

    def __init__(self, spec: ModelSpec, width: int, block: int, tp: TensorParallel | None) -> None:
        super().__init__()
        self.gated, self.unit, self.tp = spec.gated, f"blocks.{block}", tp
        self.activate = ACTIVATIONS[spec.activation]
        if self.gated:
            self.gate = nn.Linear(spec.hidden, width, bias=spec.mlp_bias)
        self.up = nn.Linear(spec.hidden, width, bias=spec.mlp_bias)
        self.down = nn.Linear(width, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x: Tensor, needed: bool = True) -> Tensor | ProductTerm:
        """Return the MLP's output, to be added to the stream: with tp this rank's term of it, with sequence
        parallelism that term's factors. `needed`: whether the value is used (runtime/autograd/recompute.py)."""
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
        return self.activate(*into)
