"""Context parallelism: attention over sequences of which each rank holds a part (schedule/layers/context.py).

Ulysses   an all-to-all gives each rank all tokens of its group and a part of the heads; another returns the
          result (Jacobs et al. 2023). Backward alike
ring      keys and values travel around the ring, the next block while this one computes; partial results are
          merged by their log-sum-exp (Liu et al. 2023). Backward they travel again, followed by their gradients,
          which start as zeros after the rank's own block; the last hop brings them home

q, out    (batch, tokens, heads, head_dim) in the layers; (batch, heads, tokens, head_dim) inside the core
lowest    (batch or 1, tokens of the group): the first position that each query sees, where a window or a document
          boundary hides earlier ones; None where nothing does
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import attention_core
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.transport import Handle
from phalanx.schedule.event import Phase
from phalanx.schedule.layers.context import Context

Lowest = Tensor | None


class ContextParallel:
    """A rank's place among the ranks that share its sequences; one object for all layers. `packed`: positions do not
    depend on the batch; `own`: (tokens,), the positions of this rank's tokens."""

    def __init__(self, inner: LayerComm, context: Context, packed: bool) -> None:
        self.inner, self.context, self.packed = inner, context, packed
        device = inner.comm.world.device
        self.own = torch.tensor(context.own, device=device)  # (tokens,)
        everyone = [context.of_ring(rank) for rank in range(context.ring)]
        self.of_ring = [torch.tensor(part, device=device) for part in everyone]
        self._kept: dict[int | None, Tensor] = {}

    def places(self, positions: Tensor | None) -> Tensor:
        """Return the positions of this rank's tokens: (tokens,) in the sequence; or (batch, tokens) in their
        documents, from positions as Context.cut gives them, (ranks, batch, tokens)."""
        return self.own if positions is None else self._of_group(positions)[self.context.index % self.context.ulysses]

    def _of_group(self, positions: Tensor) -> Tensor:
        """Return the positions of the Ulysses group's tokens, (ulysses, batch, tokens)."""
        first = self.context.ring_index * self.context.ulysses if self.context.scans else 0
        return positions[first : first + self.context.ulysses]

    def whole(self, positions: Tensor) -> Tensor:
        """Return the positions in their documents of entire sequences' tokens, (batch, seq)."""
        order = torch.from_numpy(self.context.everyone).to(positions.device)
        return positions.transpose(0, 1).flatten(1)[:, order.flatten().argsort()]

    def lowest(self, windows: Collection[int | None], positions: Tensor | None) -> dict[int | None, Lowest]:
        """Return `lowest`, as in the module's docstring, for each window. Without `positions` it depends on windows
        alone, and is computed once."""
        short = {w: w if w is not None and w < self.context.seq else None for w in windows}
        if positions is None and not any(short.values()):
            return dict.fromkeys(short)
        if positions is None:  # if any block has a window, all use masks, so that blocks are alike
            for w in short.values():
                if w not in self._kept:
                    self._kept[w] = (self._here + (1 - (w or self.context.seq))).unsqueeze(0)
            return {w: self._kept[cut] for w, cut in short.items()}
        begins = self._here - self._of_group(positions).transpose(0, 1).flatten(1)  # (batch, tokens of the group)
        lowest = {w: begins if w is None else begins.maximum(self._here + (1 - w)) for w in set(short.values())}
        return {w: lowest[cut] for w, cut in short.items()}

    @property
    def _here(self) -> Tensor:
        return self.of_ring[self.context.ring_index]

    def mask(self, lowest: Lowest, source: int, rows: slice, keys: slice, dtype: torch.dtype) -> Tensor | None:
        """Return the mask to add to the logits of some queries of the group and keys of the ring's rank `source`,
        (batch or 1, 1, queries, keys); None if `lowest` is."""
        if lowest is None:
            return None
        query, key = self._here[rows].unsqueeze(-1), self.of_ring[source][keys]
        hidden = (key < lowest[:, rows].unsqueeze(-1)).logical_or_(key > query).unsqueeze(1)
        # Finite, since a query may see no key of a rectangle: -inf would give NaN, this gives weight 0 in the merge.
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, max(-1e30, torch.finfo(dtype).min / 2)
        )

    def pass_on(self, tensor: Tensor, unit: str, phase: Phase) -> tuple[Tensor, Handle]:
        """Start to send a tensor to the next rank of the ring. Returns (tensor arriving from the previous rank,
        handle)."""
        arriving = torch.empty_like(tensor)
        return arriving, self.inner.exchange(arriving, tensor, "ring", unit, phase)


def _rectangle(cp: ContextParallel, source: int, tokens: int) -> tuple[slice, slice]:
    """Return (queries, keys): slices of the queries that see keys of the ring's rank `source`, and of these keys."""
    own, half = cp.context.ring_index, tokens // 2
    if source == own:
        return slice(0, tokens), slice(0, tokens)
    return (slice(0, tokens), slice(0, half)) if source < own else (slice(half, tokens), slice(0, tokens))


def _ring_forward(
    cp: ContextParallel, unit: str, q: Tensor, k: Tensor, v: Tensor, *, lowest: Lowest, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention over the keys of all ranks of the ring: (out, log-sum-exp)."""
    ring, ring_index, tokens = cp.context.ring, cp.context.ring_index, q.shape[2]
    block = torch.stack([k, v]) if ring > 1 else None
    rows, keys = _rectangle(cp, ring_index, tokens)
    out = lse = q  # overwritten in the first round
    for step in range(ring):
        # Send the current block on while attention over it is computed.
        if step + 1 < ring:
            assert block is not None
            arriving, underway = cp.pass_on(block, unit, "F")
        source = (ring_index - step) % ring
        if step == 0:
            mask = cp.mask(lowest, ring_index, rows, keys, q.dtype)
            out, lse = attention_core.forward(q, k, v, mask, lowest is None, scale)
            del mask
            if ring > 1:
                out = out.to(lse.dtype)  # partial results are added up unrounded
        else:
            assert block is not None
            rows, keys = _rectangle(cp, source, tokens)
            mask = cp.mask(lowest, source, rows, keys, q.dtype)
            merge(
                out[:, :, rows],
                lse[:, :, rows],
                *attention_core.forward(q[:, :, rows], block[0][:, :, keys], block[1][:, :, keys], mask, scale=scale),
            )
            del mask
        if step + 1 < ring:
            underway.wait()
            block = arriving
            del arriving, underway
    return out.to(q.dtype), lse


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge a second partial attention result into the first in place, weighted by softmax mass.

    out, other: (batch, heads, queries, head_dim); lse, other_lse: (batch, heads, queries), their log-sum-exp.
    """
    share = torch.sigmoid(other_lse - lse)
    out.lerp_(other.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)


def _ring_backward(
    cp: ContextParallel,
    unit: str,
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lowest: Lowest,
    *,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, while keys, values and their gradients travel around the ring."""
    ring, ring_index, tokens = cp.context.ring, cp.context.ring_index, q.shape[2]
    if ring > 1:
        block = torch.stack([k, v])
        arriving, underway = cp.pass_on(block, unit, "B")
    # The rank's own block, while the first one travels.
    rows, keys = _rectangle(cp, ring_index, tokens)
    mask = cp.mask(lowest, ring_index, rows, keys, q.dtype)
    d_q, d_k, d_v = attention_core.backward(g, q, k, v, out, lse, mask, lowest is None, scale)
    del mask
    if ring == 1:
        return d_q, d_k, d_v
    # The others' blocks: each travels on while its gradients are computed, and these follow one hop behind.
    coming, in_flight = torch.zeros_like(block), None  # gradients of the current block
    for step in range(1, ring):
        underway.wait()
        block = arriving
        if step + 1 < ring:
            arriving, underway = cp.pass_on(block, unit, "B")
        source = (ring_index - step) % ring
        rows, keys = _rectangle(cp, source, tokens)
        mask = cp.mask(lowest, source, rows, keys, q.dtype)
        d_query, *d_block = attention_core.backward(
            g[:, :, rows],
            q[:, :, rows],
            block[0][:, :, keys],
            block[1][:, :, keys],
            out[:, :, rows],
            lse[:, :, rows],
            mask,
            scale=scale,
        )
        d_q[:, :, rows] += d_query
        del mask, d_query
        if in_flight is not None:
            in_flight.wait()
            leaving = None
        for gradient, own_part in zip(coming, d_block, strict=True):
            gradient[:, :, keys] += own_part
        del gradient, own_part, d_block
        leaving = coming  # alive until it is sent
        coming, in_flight = cp.pass_on(leaving, unit, "B")
    # The last hop brings this rank's gradients home.
    assert in_flight is not None
    in_flight.wait()
    del leaving
    return d_q, d_k.add_(coming[0]), d_v.add_(coming[1])


def _exchanged(cp: ContextParallel, unit: str, phase: Phase, sent: Tensor) -> Tensor:
    """All-to-all over the Ulysses group, (ulysses, ...): part j goes to rank j, and part j of the result is from
    it."""
    received = torch.empty_like(sent)
    cp.inner.all_to_all(received.view(-1), sent.view(-1), "ulysses", unit, phase).wait()
    return received


def _split_heads(cp: ContextParallel, unit: str, phase: Phase, *tensors: Tensor) -> list[Tensor]:
    """Turn tensors (batch, tokens, heads, head_dim) of all heads into (batch, heads / ulysses, ulysses x tokens,
    head_dim) in one all-to-all: heads are split, tokens gathered. If a tensor has fewer heads than ranks, each rank
    gets the one head that it needs."""
    u = cp.context.ulysses
    if u == 1:
        return [x.transpose(1, 2) for x in tensors]
    b, n, _, d = tensors[0].shape
    heads = [max(1, x.shape[2] // u) for x in tensors]
    sent = tensors[0].new_empty(u, b, n, sum(heads), d)
    for place, x in zip(sent.split(heads, 3), tensors, strict=True):
        alike = max(1, u // x.shape[2])  # ranks that need the same head
        into = place.view(u // alike, alike, b, n, -1, d)
        into.copy_(x.view(b, n, u // alike, 1, -1, d).permute(2, 3, 0, 1, 4, 5).expand(into.shape))
    received = _exchanged(cp, unit, phase, sent)
    del sent, into, place
    return [
        part.permute(1, 3, 0, 2, 4).contiguous().view(b, h, u * n, d)
        for part, h in zip(received.split(heads, 3), heads, strict=True)
    ]


def _gather_heads(cp: ContextParallel, unit: str, phase: Phase, tensors: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Undo `_split_heads` for pairs of (tensor, number of heads over all ranks). A head that several ranks had
    becomes the sum over them."""
    u = cp.context.ulysses
    if u == 1:
        return [x.transpose(1, 2) for x, _ in tensors]
    b, _, tokens, d = tensors[0][0].shape
    heads = [x.shape[1] for x, _ in tensors]
    sent = tensors[0][0].new_empty(u, b, tokens // u, sum(heads), d)
    for place, (x, _) in zip(sent.split(heads, 3), tensors, strict=True):
        place.copy_(x.unflatten(2, (u, -1)).permute(2, 0, 3, 1, 4))
    received = _exchanged(cp, unit, phase, sent)
    del sent, place
    results = []
    for part, (_, total) in zip(received.split(heads, 3), tensors, strict=True):
        if part.shape[3] * u > total:
            part = part.unflatten(0, (total, -1)).sum(1)
        results.append(part.permute(1, 2, 0, 3, 4).reshape(b, -1, total, d))
    return results


class _Core(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cp: ContextParallel, unit: str, q: Tensor, k: Tensor, v: Tensor, lowest: Lowest, scale: float | None
    ) -> Tensor:
        qkv = _split_heads(cp, unit, "F", q, k, v)
        out, lse = _ring_forward(cp, unit, *qkv, lowest=lowest, scale=scale)
        (result,) = _gather_heads(cp, unit, "F", [(out, q.shape[2])])
        ctx.cp, ctx.unit, ctx.heads, ctx.kv_heads = cp, unit, q.shape[2], k.shape[2]
        ctx.scale = scale
        ctx.save_for_backward(*qkv, out, lse, lowest)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        cp, unit, heads, kv_heads = ctx.cp, ctx.unit, ctx.heads, ctx.kv_heads
        (g,) = _split_heads(cp, unit, "B", g)
        d_q, d_k, d_v = _ring_backward(cp, unit, g, *ctx.saved_tensors, scale=ctx.scale)
        del g
        d_q, d_k, d_v = _gather_heads(cp, unit, "B", [(d_q, heads), (d_k, kv_heads), (d_v, kv_heads)])
        return None, None, d_q, d_k, d_v, None, None


def core(
    cp: ContextParallel,
    unit: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lowest: Lowest,
    scale: float | None = None,
) -> Tensor:
    """Compute causal attention of this rank's tokens to the tokens of all ranks; q, k, v have one head_dim. Autograd
    keeps q, k, v, the result and its log-sum-exp."""
    return _Core.apply(cp, unit, q, k, v, lowest, scale)  # type: ignore[no-any-return]
