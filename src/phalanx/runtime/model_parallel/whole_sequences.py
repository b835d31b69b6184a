"""Recurrences over sequences of which each rank of cp holds a part: an all-to-all over all of these ranks gives each
the entire sequences of a part of the heads, and another returns the result (as Megatron-LM does it, d98e8a6,
core/ssm/mamba_context_parallel.py:159-211). Backward alike, in reverse.

    there    every projected part, (batch, tokens, heads x width) -> (batch, seq, heads / cp x width), in one message
    back     the result, (batch, seq, heads / cp x width) -> (batch, tokens, heads x width)

Where a part has fewer heads (groups of keys) than there are ranks, neighbours get copies of one, whose gradients add
up. Tokens are put in the sequence's order, which a ring's are not. Keeps nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.schedule.event import Phase
from phalanx.schedule.layers.context import Context


class WholeSequences:
    """A recurrence's exchange on one rank. `heads`: of each projected part, on this rank of tp."""

    def __init__(self, cp: ContextParallel, unit: str, heads: Sequence[int]) -> None:
        self.cp, self.unit, self.heads = cp, unit, tuple(heads)
        c = cp.context
        self.ranks, self.index = c.ring * c.ulysses, c.index
        parts = [Context(c.seq, c.ring, c.ulysses, rank).own for rank in range(self.ranks)]
        self.runs = [list(_runs(part.tolist())) for part in parts]  # by rank

    def place(self, heads: int, width: int) -> tuple[int, int]:
        """Return (first, number) of this rank's channels, out of `heads` heads of `width`."""
        here = max(1, heads // self.ranks)
        return self.index // max(1, self.ranks // heads) * here * width, here * width

    def scatter(self, phase: Phase, parts: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
        """Exchange tokens for heads."""
        b, n = parts[0].shape[:2]
        here = [self.place(h, part.shape[2] // h)[1] for h, part in zip(heads, parts, strict=True)]
        sent = parts[0].new_empty(self.ranks, b, n, sum(here))
        for place, part, h, width in zip(sent.split(here, 3), parts, heads, here, strict=True):
            alike = max(1, self.ranks // h)
            into = place.unflatten(0, (-1, alike))
            into.copy_(part.reshape(b, n, -1, 1, width).permute(2, 3, 0, 1, 4).expand(into.shape))
        received = self._exchanged(sent, phase).split(here, 3)
        whole = [sent.new_empty(b, self.ranks * n, width) for width in here]
        for place, into in zip(received, whole, strict=True):
            for runs, of_rank in zip(self.runs, place, strict=True):
                for whole_rows, rows in runs:
                    into[:, whole_rows] = of_rank[:, rows]
        return whole

    def gather(self, phase: Phase, parts: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
        """Undo `scatter`; a head that several ranks had becomes the sum over them."""
        b, seq = parts[0].shape[:2]
        here = [part.shape[2] for part in parts]
        sent = parts[0].new_empty(self.ranks, b, seq // self.ranks, sum(here))
        for place, part in zip(sent.split(here, 3), parts, strict=True):
            for runs, of_rank in zip(self.runs, place, strict=True):
                for whole_rows, rows in runs:
                    of_rank[:, rows] = part[:, whole_rows]
        received = self._exchanged(sent, phase).split(here, 3)
        whole = []
        for place, h, width in zip(received, heads, here, strict=True):
            groups = min(h, self.ranks)
            part = sent.new_empty(b, seq // self.ranks, groups, width)
            torch.sum(place.unflatten(0, (groups, -1)), 1, out=part.permute(2, 0, 1, 3))
            whole.append(part.flatten(2))
        return whole

    def _exchanged(self, sent: Tensor, phase: Phase) -> Tensor:
        received = torch.empty_like(sent)
        self.cp.inner.all_to_all(received.view(-1), sent.view(-1), "cp", self.unit, phase).wait()
        return received


def _runs(positions: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield (their place in the sequence, their place here) of neighbours among a rank's positions."""
    begin = 0
    for i in range(1, len(positions) + 1):
        if i == len(positions) or positions[i] != positions[i - 1] + 1:
            yield slice(positions[begin], positions[i - 1] + 1), slice(begin, i)
            begin = i


class _ToWholeSequences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: WholeSequences, *parts: Tensor) -> Any:
        ctx.whole = whole
        return tuple(whole.scatter("F", parts, whole.heads))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_parts: Tensor) -> Any:
        return None, *ctx.whole.gather("B", d_parts, ctx.whole.heads)


class _ToOwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: WholeSequences, y: Tensor, heads: int) -> Tensor:
        ctx.rest = whole, heads
        return whole.gather("F", [y], [heads])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        whole, heads = ctx.rest
        return None, whole.scatter("B", [g], [heads])[0], None


def to_whole_sequences(whole: WholeSequences, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return this rank's heads of entire sequences, of every part."""
    return _ToWholeSequences.apply(whole, *parts)  # type: ignore[no-any-return]


def to_own_tokens(whole: WholeSequences, y: Tensor, heads: int) -> Tensor:
    """Return this rank's tokens of a result of `heads` heads over all ranks of cp."""
    return _ToOwnTokens.apply(whole, y, heads)  # type: ignore[no-any-return]
