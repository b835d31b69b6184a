"""Whose tokens: which of a micro-batch's a rank routes to experts, and what several ranks tell each other of one
sequence's.

The ranks of cp have parts of every sequence. Of what one of them has, those of tp have a part each: their rows of the
stream (sequence parallelism), or, where all of them have all, equal parts one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import recompute
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.routing import own_tokens

Shape = tuple[int, int]
"""(Sequences, tokens of each) that the ranks of tp share."""


class SequenceTokens:
    """One for all layers of a model. Without `inner` a process has all."""

    def __init__(
        self, inner: LayerComm | None = None, tp: TensorParallel | None = None, context: Context | None = None
    ) -> None:
        self.inner, self.tp, self.context = inner, tp, context or Context(1)
        self.ranks = 1 if inner is None else self.context.ring * self.context.ulysses * (tp.split.tp if tp else 1)
        self._known: dict[tuple[Shape, bool], tuple[Tensor, Tensor]] = {}

    @property
    def seed(self) -> float:
        """The gradient of the loss of one token."""
        return 1.0 if self.inner is None else self.inner.seed

    def prepare(self, shape: Shape, device: torch.device) -> None:
        """Passes will be over so many tokens: memory is the same in every step."""
        if self.tp is not None:
            self.tp.begin(*shape)
        self._ids(shape, device)

    def _apart(self) -> bool:
        return self.tp is not None and self.tp.rows is not None

    def _ids(self, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
        """(Own tokens, by their number in whole sequences; where each of those is among what all ranks send)."""
        key = shape, self._apart()
        if key not in self._known:
            batch, here = shape
            cp = self.context.ring * self.context.ulysses
            seq = here * cp
            each = []
            for place in range(cp):
                own = Context(seq, self.context.ring, self.context.ulysses, place).own
                whole = torch.from_numpy((np.arange(batch)[:, None] * seq + own).reshape(-1))
                each += self._parts(whole)
            longest = max(map(len, each))
            where = torch.empty(batch * seq, dtype=torch.int64)
            for rank, ids in enumerate(each):
                where[ids] = rank * longest + torch.arange(len(ids))
            index = 0 if self.inner is None else self.inner.comm.ranks("tokens").index(self.inner.comm.world.rank)
            self._known[key] = each[index].clone().to(device), where.to(device)
        return self._known[key]

    def _parts(self, tokens: Tensor) -> list[Tensor]:
        """Of what the ranks of tp share, (tokens,), each one's."""
        if self.tp is None:
            return [tokens]
        ranks, rows = self.tp.split.tp, self.tp.rows
        if rows is None:
            return list(tokens.tensor_split(ranks))
        return list(tokens.view(rows.chunks, ranks, -1).transpose(0, 1).flatten(1))

    def sequence(self, shape: Shape, device: torch.device) -> Tensor:
        """Which sequence each own token is of, (tokens,)."""
        return self._ids(shape, device)[0].div(self.seq(shape), rounding_mode="floor")

    def seq(self, shape: Shape) -> int:
        """Tokens of a whole sequence."""
        return shape[1] * self.context.ring * self.context.ulysses

    def whole(self, own: Tensor, shape: Shape, unit: str) -> Tensor:
        """(batch, seq, n) of whole sequences, of what each rank has of its own tokens, (tokens, n): an all-gather."""
        batch, n = shape[0], own.shape[-1]
        if self.ranks == 1:
            return own.view(batch, -1, n)
        where = self._ids(shape, own.device)[1]
        longest = -(-shape[0] * shape[1] // (self.tp.split.tp if self.tp else 1))
        sent = own.new_zeros(longest, n)
        sent[: len(own)] = own
        everyone = own.new_empty(self.ranks * longest, n)
        assert self.inner is not None
        self.inner.all_gather(everyone.view(-1), sent.view(-1), "tokens", unit, "F").wait()
        return everyone[where].view(batch, -1, n)

    def own(self, whole: Tensor, shape: Shape) -> Tensor:
        """Own tokens', (tokens, n), of whole sequences' (batch, seq, n)."""
        flat = whole.flatten(0, 1)
        return flat if self.ranks == 1 else flat[self._ids(shape, whole.device)[0]]

    def part(self, x: Tensor, tp: TensorParallel) -> Tensor:
        """An equal part of what all tp ranks have, (tokens, hidden)."""
        return x.tensor_split(tp.split.tp)[tp.split.index]

    def placed(self, part: Tensor, shape: Shape, tp: TensorParallel, made: bool) -> Tensor:
        """The same part among all, (batch, seq, hidden), of which the others are zeros."""
        each, over = divmod(shape[0] * shape[1], tp.split.tp)
        return _Placed.apply(part, tp.split.index * each + min(tp.split.index, over), shape, made)  # type: ignore[no-any-return]

    def of(self, shape: Shape, rank: int) -> int:
        """How many tokens a rank routes, this one or another."""
        if self.tp is None or self.inner is None:
            return shape[0] * shape[1]
        return own_tokens(shape[0] * shape[1], self.tp.split.tp, int(self.inner.comm.mesh.along("tp")[rank]))


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, begins: int, shape: Shape, made: bool) -> Tensor:
        ctx.here = slice(begins, begins + len(part))
        if not made:
            return recompute.nothing(part, (*shape, part.shape[-1]))
        out = part.new_zeros(*shape, part.shape[-1])
        out.flatten(0, 1)[ctx.here] = part
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return g.flatten(0, 1)[ctx.here], None, None, None
