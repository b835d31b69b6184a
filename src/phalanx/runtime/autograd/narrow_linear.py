"""Linear layers whose products are of a narrow format (narrow_product.py)."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from torch import Tensor, nn

from phalanx.runtime.autograd import recompute
from phalanx.spec.number_formats import NumberFormat


class NarrowLinear(nn.Linear):
    """A linear layer whose products are of the format `operands`."""

    operands: NumberFormat

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        return recompute.linear(self, x)


def narrow_products(blocks: nn.Module, operands: NumberFormat, but: Collection[str] = ()) -> None:
    """Make modules inside of `blocks` multiply in a narrow format: linear layers, except the names in `but`, and
    modules with a field `operands`. Parameters and their names stay."""
    for name, layer in blocks.named_modules():
        if type(layer) is nn.Linear and name.rpartition(".")[2] not in but:
            layer.__class__ = NarrowLinear
            cast(NarrowLinear, layer).operands = operands
        elif hasattr(layer, "operands"):
            layer.operands = operands
