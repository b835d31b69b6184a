"""A block whose code takes sizes from the width of its input, of which a rank has everything, for split tensors.

    b, t, width = x.shape
    q = q.view(b, t, self.heads, width // self.heads)
    y = y.transpose(1, 2).reshape(b, t, width)

So attention is written in nanoGPT and timm. With its number of heads divided a rank asks for tp times the elements
that it has; such a view gets a tp-th of the last of its sizes that the width gives. Every other call is left alone.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}


def follow_local_width(block: nn.Module, tp: int) -> None:
    """Make the forward pass of a block, whose numbers are divided already, view tensors in a tp-th of the width."""
    inner, numbers = block.forward, [n for n in vars(block).values() if type(n) is int and n > 0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() > 1]
        widths = {t.shape[-1] for t in given} | {t.shape[1] for t in given if t.dim() > 3}
        with _LocalWidth(tp, widths | {width // n for width in widths for n in numbers}):
            return inner(*args, **kwargs)

    block.forward = forward


class _LocalWidth(TorchFunctionMode):
    """Divides one of `sizes` by tp where a view asks for tp times the elements of a tensor."""

    def __init__(self, tp: int, sizes: set[int]) -> None:
        super().__init__()
        self._tp, self._sizes = tp, sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VIEWS and not kwargs:
            x, *size = args
            args = x, *self._local(x, size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size, size)
        return func(*args, **(kwargs or {}))

    def _local(self, x: Tensor, size: Sequence[Any], said: Sequence[Any]) -> Sequence[Any]:
        if not all(isinstance(n, int) and n > 0 for n in size) or math.prod(size) != x.numel() * self._tp:
            return said
        places = [i for i, n in enumerate(size) if n in self._sizes and n % self._tp == 0]
        return [[n // self._tp if i == places[-1] else n for i, n in enumerate(size)]] if places else said
