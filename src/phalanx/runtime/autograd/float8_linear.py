"""Linear layers whose products are of 8-bit floats (float8.py)."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from torch import Tensor, nn

from phalanx.runtime.autograd import recompute


class Float8Linear(nn.Linear):
    """A linear layer whose products are of 8-bit floats. `rowwise`: one scale a row, not a tensor."""

    rowwise: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        return recompute.linear(self, x)


def narrow_products(blocks: nn.Module, rowwise: bool, but: Collection[str] = ()) -> None:
    """Make what multiplies inside of `blocks` multiply 8-bit floats: linear layers, `but` those of these names, and
    modules with a field `rowwise`. Parameters and their names stay."""
    for name, layer in blocks.named_modules():
        if type(layer) is nn.Linear and name.rpartition(".")[2] not in but:
            layer.__class__ = Float8Linear
            cast(Float8Linear, layer).rowwise = rowwise
        elif hasattr(layer, "rowwise"):
            layer.rowwise = rowwise
