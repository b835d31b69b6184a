"""Which tokens of a micro-batch a rank routes to experts, and how ranks share results about full sequences.

Each rank of cp has a part of every sequence. The ranks of tp divide the tokens of that part: by their rows of the
stream (sequence parallelism), or, if each has all rows, into equal consecutive parts.
"""

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
"""(sequences, tokens of each) of the part that the ranks of tp divide."""


class SequenceTokens:
    """Token ownership of a rank, one object for all layers of a model. Without `inner` this process has all
    tokens."""

    def __init__(
        self, inner: LayerComm | None = None, tp: TensorParallel | None = None, context: Context | None = None
    ) -> None:
        self.inner, self.tp, self.context = inner, tp, context or Context(1)
        self.ranks = 1 if inner is None else self.context.ring * self.context.ulysses * (tp.split.tp if tp else 1)
        self._known: dict[tuple[Shape, bool], tuple[Tensor, Tensor]] = {}

    @property
    def seed(self) -> float:
        """Initial gradient of one token's loss."""
        return 1.0 if self.inner is None else self.inner.seed

    def prepare(self, shape: Shape, device: torch.device) -> None:
        """Make the index tables for passes over `shape` tokens now, so that every step has the same memory."""
        if self.tp is not None:
            self.tp.begin(*shape)
        self._ids(shape, device)

    def _sharded(self) -> bool:
        return self.tp is not None and self.tp.rows is not None

    def _ids(self, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (indices of this rank's tokens in full sequences; position of every token in the gathered
        tensor)."""
        key = shape, self._sharded()
        if key not in self._known:
            batch, here = shape
            cp = self.context.ring * self.context.ulysses
            seq = here * cp
            parts = []  # by place in cp, then in tp
            for place in range(cp):
                own = Context(seq, self.context.ring, self.context.ulysses, place).own
                parts.append(self._parts(torch.from_numpy((np.arange(batch)[:, None] * seq + own).reshape(-1))))
            each, index = self._by_rank(parts)
            longest = max(map(len, each))
            where = torch.empty(batch * seq, dtype=torch.int64)
            for rank, ids in enumerate(each):
                where[ids] = rank * longest + torch.arange(len(ids))
            self._known[key] = each[index].clone().to(device), where.to(device)
        return self._known[key]

    def _by_rank(self, parts: list[list[Tensor]]) -> tuple[list[Tensor], int]:
        """Return the parts in the order of the ranks that share the sequences, and this rank's index among them."""
        if self.inner is None:
            return parts[0], 0
        comm = self.inner.comm
        cp, tp = comm.mesh.along("cp"), comm.mesh.along("tp")
        ranks = comm.ranks("tokens")
        return [parts[cp[rank]][tp[rank] if self.tp else 0] for rank in ranks], ranks.index(comm.world.rank)

    def _parts(self, tokens: Tensor) -> list[Tensor]:
        """Divide (tokens,) over the ranks of tp."""
        if self.tp is None:
            return [tokens]
        ranks, rows = self.tp.split.tp, self.tp.rows
        if rows is None:
            return list(tokens.tensor_split(ranks))
        return list(tokens.view(rows.chunks, ranks, -1).transpose(0, 1).flatten(1))

    def sequence(self, shape: Shape, device: torch.device) -> Tensor:
        """Return the index of the sequence of each of this rank's tokens, (tokens,)."""
        return self._ids(shape, device)[0].div(self.seq(shape), rounding_mode="floor")

    def seq(self, shape: Shape) -> int:
        """Return the number of tokens of a full sequence."""
        return shape[1] * self.context.ring * self.context.ulysses

    def gather(self, local: Tensor, shape: Shape, unit: str) -> Tensor:
        """Gather each rank's values for its tokens, (tokens, n), to full sequences, (batch, seq, n), in one
        all-gather."""
        batch, n = shape[0], local.shape[-1]
        if self.ranks == 1:
            return local.view(batch, -1, n)
        where = self._ids(shape, local.device)[1]
        longest = -(-shape[0] * shape[1] // (self.tp.split.tp if self.tp else 1))
        sent = local.new_zeros(longest, n)
        sent[: len(local)] = local
        everyone = local.new_empty(self.ranks * longest, n)
        assert self.inner is not None
        self.inner.all_gather(everyone.view(-1), sent.view(-1), "tokens", unit, "F").wait()
        return everyone[where].view(batch, -1, n)

    def own(self, sequences: Tensor, shape: Shape) -> Tensor:
        """Return the rows of this rank's tokens, (tokens, n), from full sequences, (batch, seq, n)."""
        flat = sequences.flatten(0, 1)
        return flat if self.ranks == 1 else flat[self._ids(shape, sequences.device)[0]]

    def part(self, x: Tensor, tp: TensorParallel) -> Tensor:
        """Return this rank's equal part of a tensor that all tp ranks have, (tokens, hidden)."""
        return x.tensor_split(tp.split.tp)[tp.split.index]

    def placed(self, part: Tensor, shape: Shape, tp: TensorParallel, needed: bool) -> Tensor:
        """Place a part, as from `part`, among all tokens, (batch, seq, hidden), with zeros elsewhere. `needed`:
        whether the value is used (autograd/recompute.py)."""
        each, over = divmod(shape[0] * shape[1], tp.split.tp)
        return _Placed.apply(part, tp.split.index * each + min(tp.split.index, over), shape, needed)  # type: ignore[no-any-return]

    def of(self, shape: Shape, rank: int) -> int:
        """Return how many of the tokens of `shape` a rank routes."""
        if self.tp is None or self.inner is None:
            return shape[0] * shape[1]
        own: int = own_tokens(shape[0] * shape[1], self.tp.split.tp, int(self.inner.comm.mesh.along("tp")[rank]))
        return own


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, begins: int, shape: Shape, needed: bool) -> Tensor:
        ctx.here = slice(begins, begins + len(part))
        if not needed:
            return recompute.placeholder(part, (*shape, part.shape[-1]))
        out = part.new_zeros(*shape, part.shape[-1])
        out.flatten(0, 1)[ctx.here] = part
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return g.flatten(0, 1)[ctx.here], None, None, None
