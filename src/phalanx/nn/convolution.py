"""A causal convolution of each channel over the last tokens, a slice of tokens at a time: what a recurrence reads,
after SiLU. Plain functions, forward and backward, for autograd functions that keep only the convolution's input.

    x       (batch, seq, channels)
    weight  (channels, taps); the last tap is the token itself
    bias    (channels,) or None
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
        return cls(weight.t().to(wide).contiguous(), None if bias is None else bias.to(wide))

    @property
    def taps(self) -> int:
        """Tokens that one result sees."""
        return len(self.weight)

    def of_slice(self, x: Tensor, low: int, high: int, begins: Tensor | None = None) -> Tensor:
        """Return the results of tokens low..high before SiLU, (batch, high - low, channels). Before the first token
        there are zeros, and before the first of each document where `begins` (batch, high - low) is the place of
        these tokens in theirs."""
        seen = x[:, max(low - self.taps + 1, 0) : high].to(self.weight.dtype)
        out = seen[:, seen.shape[1] - (high - low) :] * self.weight[-1]
        if self.bias is not None:
            out += self.bias
        for back in range(1, min(self.taps, seen.shape[1])):
            part, into = _shifted(seen, out, back)
            into.addcmul_(_inside(part, begins, back), self.weight[-1 - back])
        return out

    def backward(
        self,
        x: Tensor,
        low: int,
        high: int,
        g: Tensor,
        d_x: Tensor,
        d: FilterGradient,
        begins: Tensor | None = None,
    ) -> None:
        """Add the gradients of x and of the filter to `d_x`, like x, and `d`. g: of what `of_slice` returned."""
        start = max(low - self.taps + 1, 0)
        seen, into = x[:, start:high].to(self.weight.dtype), d_x[:, start:high]
        if d.bias is not None:
            d.bias.add_(g.sum((0, 1)))
        for back in range(min(self.taps, seen.shape[1])):
            part, of = _shifted(seen, g, back)
            of = _inside(of, begins, back)
            d.weight[-1 - back] += (part * of).sum((0, 1))
            place, _ = _shifted(into, g, back)
            place += of * self.weight[-1 - back]


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


def _inside(part: Tensor, begins: Tensor | None, back: int) -> Tensor:
    """Return a part (batch, tokens, channels) of the last tokens of a slice, zero where the token `back` before is of
    another document."""
    if begins is None or not back:
        return part
    return part * (begins[:, begins.shape[1] - part.shape[1] :] >= back).unsqueeze(-1)


def _shifted(seen: Tensor, out: Tensor, back: int) -> tuple[Tensor, Tensor]:
    """Return (the tokens `back` before each token of `out`, where they exist; the part of `out` that sees them)."""
    n = min(out.shape[1], seen.shape[1] - back)
    return seen[:, seen.shape[1] - back - n : seen.shape[1] - back], out[:, out.shape[1] - n :]


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


def slices(seq: int, tokens: int) -> list[tuple[int, int]]:
    """Return (low, high) of slices of `tokens` tokens; the last one has the rest."""
    return [(low, min(low + tokens, seq)) for low in range(0, seq, tokens)]
