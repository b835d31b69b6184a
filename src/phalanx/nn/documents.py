"""Recurrences that begin anew with each document: decays within a chunk, which become zero, in place, wherever a
document begins in between.

    begins  (batch, tokens): the place of each token in its document, from 0; None: all tokens are of one
    decays  of batch x heads rows, the last two also of each channel, (.., channels)

A token sees as many tokens of the chunk before it as its place in its document says, and what precedes the chunk if
that is more than there are.
"""

import torch
from torch import Tensor


def mask_between(decay: Tensor, begins: Tensor | None) -> Tensor:
    """Mask the decay to each token from each earlier one, (batch x heads, tokens, tokens)."""
    if begins is None:
        return decay
    at = torch.arange(begins.shape[1], device=begins.device)
    return _masked(decay, at >= (at - begins).unsqueeze(-1))


def mask_from_start(decay: Tensor, begins: Tensor | None) -> Tensor:
    """Mask the decay from the chunk's start to each token, (batch x heads, tokens)."""
    if begins is None:
        return decay
    return _masked(decay, begins > torch.arange(begins.shape[1], device=begins.device))


def mask_to_end(decay: Tensor, begins: Tensor | None) -> Tensor:
    """Mask the decay from each token to the chunk's end, (batch x heads, tokens)."""
    if begins is None:
        return decay
    left = torch.arange(begins.shape[1] - 1, -1, -1, device=begins.device)
    return _masked(decay, left <= begins[:, -1:])


def mask_across(decay: Tensor, begins: Tensor | None) -> Tensor:
    """Mask the decay over the entire chunk, (batch x heads,)."""
    return decay if begins is None else _masked(decay, begins[:, -1] >= begins.shape[1])


def _masked(decay: Tensor, stays: Tensor) -> Tensor:
    """Multiply the decays of all heads of a sequence, in place, by whether its documents go on: `stays`, (batch,
    ...)."""
    of_heads = decay.view(len(stays), -1, *decay.shape[1:])
    of_heads.mul_(stays.unsqueeze(1).view(len(stays), 1, *stays.shape[1:], *[1] * (decay.dim() - stays.dim())))
    return decay
