"""A causal convolution of each channel over the last tokens, a slice of tokens at a time: what a recurrence reads,
before SiLU, and short convolutions. Plain functions, forward and backward, for autograd functions that keep only the
convolution's input.

    x       (batch, seq, channels)
    weight  (channels, taps); the last tap is the token itself
    bias    (channels,) or None

Slices are token first, (tokens, batch, channels), so that heads of all sequences are the batch of a matrix product
without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Filter:
    """The weights of a convolution in the type that it is computed in; here weight is (taps, channels)."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> Filter:
        """Return the filter of parameters (channels, taps) and (channels,)."""
        turned = torch.empty(weight.shape[::-1], dtype=wide, device=weight.device)
        return cls(turned.copy_(weight.t()), None if bias is None else bias.to(wide))

    @property
    def early(self) -> int:
        """Tokens that a result sees in addition to its own."""
        return len(self.weight) - 1

    def seen(self, x: Tensor, low: int, high: int) -> Tensor:
        """Return tokens low..high of x and the `early` ones before them, (early + tokens, batch, channels); before
        the first token there are zeros."""
        start = max(low - self.early, 0)
        missing = self.early - (low - start)
        seen = self.weight.new_empty(self.early + high - low, len(x), x.shape[2])
        seen[:missing].zero_()
        seen[missing:].copy_(x[:, start:high].transpose(0, 1))
        return seen

    def forward(self, seen: Tensor, begins: Tensor | None = None) -> Tensor:
        """Return the results of all but the first `early` tokens, (tokens, batch, channels). `begins` (tokens,
        batch): the place of these tokens in their documents, before whose first ones there are zeros."""
        out = seen[self.early :] * self.weight[-1]
        if self.bias is not None:
            out += self.bias
        for back in range(1, self.early + 1):
            out.addcmul_(_inside(seen[self.early - back : len(seen) - back], begins, back), self.weight[-1 - back])
        return out

    def backward(self, seen: Tensor, g: Tensor, d: FilterGradient, begins: Tensor | None = None) -> Tensor:
        """Return the gradient of `seen`, and add the filter's to `d`. g: the gradient of `forward`'s result."""
        if d.bias is not None:
            d.bias.add_(g.sum((0, 1)))
        d_seen = torch.zeros_like(seen)
        for back in range(self.early + 1):
            rows, of = slice(self.early - back, len(seen) - back), _inside(g, begins, back)
            d.weight[-1 - back] += (seen[rows] * of).sum((0, 1))
            d_seen[rows].addcmul_(of, self.weight[-1 - back])
        return d_seen

    def add_seen(self, d_x: Tensor, d_seen: Tensor, low: int, high: int) -> None:
        """Add `d_seen`, the gradient of `seen(x, low, high)`, to `d_x`, that of x."""
        start = max(low - self.early, 0)
        d_x[:, start:high] += d_seen[self.early - (low - start) :].transpose(0, 1)


@dataclass(frozen=True)
class FilterGradient:
    """Sums of a filter's gradients over slices."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def zero(cls, of: Filter) -> FilterGradient:
        """Return zeros for a filter."""
        return cls(torch.zeros_like(of.weight), None if of.bias is None else torch.zeros_like(of.bias))

    def as_given(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the parameters, (channels, taps) and (channels,)."""
        return self.weight.t().to(dtype), None if self.bias is None else self.bias.to(dtype)


def _inside(tokens: Tensor, begins: Tensor | None, back: int) -> Tensor:
    """Return tokens (tokens, batch, channels), zero where the token `back` before is of another document."""
    return tokens if begins is None or not back else tokens * (begins >= back).unsqueeze(-1)


Places = tuple[tuple[int, int] | None, ...]
"""For each parameter (first, number) of the rows that this rank uses; None: all."""


def own_rows(parameters: Sequence[Tensor | None], places: Places) -> list[Any]:
    """Return the rows of parameters that this rank uses."""
    if not places:
        return list(parameters)
    return [
        p if p is None or place is None else p.narrow(0, *place) for p, place in zip(parameters, places, strict=True)
    ]


def all_rows(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor | None], places: Places) -> list[Any]:
    """Return gradients of all rows of parameters, zero where this rank does not use them."""
    if not places:
        return list(gradients)
    whole = [None if p is None else torch.zeros_like(p) for p in parameters]
    for into, gradient in zip(own_rows(whole, places), gradients, strict=True):
        if into is not None and gradient is not None:
            into.copy_(gradient)
    return whole
