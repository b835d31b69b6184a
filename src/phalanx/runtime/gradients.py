"""Gradients: how they get to where they are reduced, and the norm of many."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.runtime.weight_gradients import Grouped, Product

_AT_ONCE = 2**20  # elements


def put(place: Tensor, grad: Tensor | Product | Grouped | None, rows: list[tuple[Tensor, Tensor]], add: bool) -> None:
    """A gradient to where it is reduced: the dense part, if there is one, and rows of it."""
    if isinstance(grad, Product | Grouped):
        grad.put(place, add)
        grad = None
    elif grad is None or grad.is_sparse:
        if not add:
            place.zero_()
    else:
        place.add_(grad) if add else place.copy_(grad)
    if grad is not None and grad.is_sparse:  # of a module that is not ours
        rows = [*rows, (grad._indices()[0], grad._values())]
    for index, values in rows:
        place.index_add_(0, index, values.to(place.dtype))


def square(flat: Tensor) -> Tensor:
    """The square of the 2-norm, (), fp64. In pieces: over millions of elements torch's own norm on the CPU, which
    adds one after the other in fp32, is off by 1e-4 to 1e-3 of itself."""
    if flat.dtype in (torch.float32, torch.float64):
        return torch.stack([torch.dot(piece, piece) for piece in flat.split(_AT_ONCE)]).double().sum()
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in flat.split(_AT_ONCE // 16)]
    return torch.stack(norms).double().square_().sum()
