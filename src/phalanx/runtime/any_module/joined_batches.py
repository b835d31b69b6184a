"""Whether a step depends on how its sequences are divided into micro-batches and replicas.

Gradients averaged over micro-batches equal the large batch's where the loss is a mean over sequences. They do not
where it has negatives from the batch, statistics of the batch, or unequal numbers of targets: then every replica and
every accumulation trains something else, and no comparison of equal micro-batches shows it. So two micro-batches are
run apart and joined, and their gradients compared up to a factor, since losses are sums or means.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]


def joined_deviation(whole: nn.Module, batches: Sequence[tuple[Any, Any]], loss: Loss) -> float | None:
    """Return how far the gradient of two micro-batches, (input, target) each, is from that of both as one batch, as a
    share of its norm; None where they cannot be joined along their first dim."""
    try:
        apart, joined = _gradient(whole, batches, loss), _gradient(whole, [_joined(batches)], loss)
    except Exception:  # a stranger's loss and module, on a batch that they were not written for
        return None
    square, norm = float(joined.dot(joined)), float(apart.norm())
    if not square or not norm:
        return None
    return float((apart - joined * (float(apart.dot(joined)) / square)).norm()) / norm


def joinable(batch: Any) -> bool:
    """Whether a batch is made of tensors with a first dim."""
    try:
        _joined([batch])
    except TypeError:
        return False
    return True


def _gradient(whole: nn.Module, batches: Sequence[tuple[Any, Any]], loss: Loss) -> Tensor:
    """Return the sum of the gradients of some batches, flat, in fp64."""
    trained = [p for p in whole.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained), dtype=torch.float64, device=trained[0].device)
    for x, target in batches:
        grads = torch.autograd.grad(loss(whole(x), target), trained, allow_unused=True)
        flat = [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(trained, grads, strict=True)]
        total += torch.cat(flat).double()
    return total


def _joined(values: Sequence[Any]) -> Any:
    """Join what modules and losses take along its first dim. Raises TypeError for what has none."""
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(values))
    if isinstance(first, tuple | list):
        return type(first)(_joined(parts) for parts in zip(*values, strict=True))
    if isinstance(first, Mapping):
        return {key: _joined([value[key] for value in values]) for key in first}
    if first is None:
        return None
    raise TypeError(f"{type(first).__name__} cannot be joined")
