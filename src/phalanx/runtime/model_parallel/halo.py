"""Convolutions over sequences of which each rank of cp holds a part: every rank gets the last tokens before each of
its pieces.

    before   forward: an all-gather of the last `early` tokens of all pieces
    after    backward: an all-gather of these tokens' gradients, each rank takes its own tokens' part

A ring's rank has two pieces, any other one. Keeps nothing.
"""

import torch
from torch import Tensor

from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.schedule.event import Phase
from phalanx.spec.strategy.spec import pieces


class Halo:
    """The exchange on one rank. `early`: tokens that a result sees in addition to its own."""

    def __init__(self, cp: ContextParallel, unit: str, early: int) -> None:
        c = cp.context
        self.cp, self.unit, self.early, self.pieces = cp, unit, early, pieces(c.ring, c.ulysses)
        starts = c.everyone[:, :: c.tokens // self.pieces].reshape(-1)  # of all ranks' pieces
        self.order = starts.argsort()
        self.own = self.order.argsort()[c.index * self.pieces :][: self.pieces].tolist()
        """Places of this rank's pieces in the sequence."""

    def _neighbours(self, tokens: Tensor, phase: Phase, step: int) -> Tensor:
        """Return the `tokens` of the pieces before (`step` -1) or after (1) each of this rank's, zeros beyond the
        sequence. `tokens`: the tokens that this rank's pieces give to others, (pieces, early, batch, channels)."""
        every = tokens.new_empty(len(self.order), *tokens.shape[1:])
        self.cp.inner.all_gather(every.view(-1), tokens.view(-1), "cp", self.unit, phase).wait()
        taken = torch.zeros_like(tokens)
        for into, place in zip(taken, self.own, strict=True):
            if 0 <= place + step < len(self.order):
                into.copy_(every[self.order[place + step]])
        return taken

    def before(self, u: Tensor) -> Tensor:
        """Return the tokens before each piece of u, (batch, tokens, channels)."""
        last = u.unflatten(1, (self.pieces, -1))[:, :, -self.early :]
        return self._neighbours(last.permute(1, 2, 0, 3).contiguous(), "F", -1)

    def after(self, d_u: Tensor, d_before: Tensor) -> None:
        """Add to the gradient of u that of the tokens which `before` gave to other ranks."""
        of_last = self._neighbours(d_before, "B", 1)
        d_u.unflatten(1, (self.pieces, -1))[:, :, -self.early :] += of_last.permute(2, 0, 1, 3)
