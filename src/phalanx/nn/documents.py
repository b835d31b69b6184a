"""Recurrences that begin anew with each document: decays within a chunk, which become zero, in place, wherever a
document begins in between.

    begins  (batch, tokens): the place of each token in its document, from 0; None: all tokens are of one

A token sees as many tokens of the chunk before it as its place in its document says, and what precedes the chunk if
that is more than there are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def between(decay: Tensor, begins: Tensor | None) -> Tensor:
    """Decay to a token from an earlier one, (batch, heads, tokens, tokens)."""
    if begins is None:
        return decay
    at = torch.arange(begins.shape[1], device=begins.device)
    return decay.mul_((at.unsqueeze(-1) - at <= begins.unsqueeze(-1)).unsqueeze(1))


def from_start(decay: Tensor, begins: Tensor | None) -> Tensor:
    """Decay from the chunk's start to a token, (batch, heads, tokens)."""
    if begins is None:
        return decay
    return decay.mul_((begins > torch.arange(begins.shape[1], device=begins.device)).unsqueeze(1))


def to_end(decay: Tensor, begins: Tensor | None) -> Tensor:
    """Decay from a token to the chunk's end, (batch, heads, tokens)."""
    if begins is None:
        return decay
    left = torch.arange(begins.shape[1] - 1, -1, -1, device=begins.device)
    return decay.mul_((left <= begins[:, -1:]).unsqueeze(1))


def across(decay: Tensor, begins: Tensor | None) -> Tensor:
    """Decay over the chunk, (batch, heads)."""
    return decay if begins is None else decay.mul_(begins[:, -1:] >= begins.shape[1])
