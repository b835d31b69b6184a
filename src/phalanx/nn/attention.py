"""Attention: projections, positions, the softmax core, and the projection back into the stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.nn import functional
from phalanx.nn.gated_norm import sigmoid_gate
from phalanx.nn.norms import AllHeadsNorm, RMSNorm
from phalanx.runtime.autograd import recompute, windowed_attention
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.model_parallel import context, sequence, tensor
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.sequence import ProductTerm
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.spec.model.blocks.block import Sublayer, products_of
from phalanx.spec.model.blocks.operators import Attend, Rotary
from phalanx.spec.model.spec import ModelSpec


@dataclass(frozen=True)
class Read:
    """Slots of a step of generation that attend together, and the cached tokens that they see. `rows`: indices of
    their tokens among all tokens of the step, equally many for each of the `slots`; `index` (slots, keys): places in
    the cache; `mask`, added to the logits, (slots, 1, new, keys); None: plain causality. `decodes`: whether each slot
    has one new token."""

    rows: slice
    slots: int
    index: Tensor
    mask: Tensor | None
    decodes: bool


@dataclass(frozen=True)
class SlotGroup:
    """Slots of a step of generation whose recurrences continue together. `rows`: as in Read; `seats` (slots,): their
    places in the cache; `begins`: whether their tokens are the first of their texts."""

    rows: slice
    seats: Tensor
    begins: bool


class Cache(Protocol):
    """The cache (infer/replica.py) as attention and recurrences see it in one step over the tokens of several
    requests, (1, tokens).

    `positions` (1, tokens): positions of the tokens; `wanted`: indices of the tokens whose logits are needed, or
    None.
    """

    positions: Tensor
    wanted: Tensor | None

    def extend(self, block: int, *new: Tensor) -> None:
        """Cache the tensors (1, tokens, ...) that a block computed for the new tokens."""
        ...

    def reads(self, window: int | None) -> Sequence[Read]:
        """Return the groups of slots that attend together in a layer with this window, in order of their rows."""
        ...

    def read(self, block: int, read: Read) -> tuple[Tensor, ...]:
        """Return the cached tensors of a group, (slots, keys, ...) each, in the order of `extend`."""
        ...

    def continuations(self) -> Sequence[SlotGroup]:
        """Return the groups of slots that continue together, in order of their rows."""
        ...

    def recall(self, block: int, slots: SlotGroup) -> tuple[Tensor, Tensor | None]:
        """Return (a group's last inputs of the convolution, (slots, taps - 1, channels); its states, (slots, ...), or
        None: zeros, or the block has no recurrence)."""
        ...

    def keep(self, block: int, slots: SlotGroup, inputs: Tensor, state: Tensor | None = None) -> None:
        """Store the inputs and states that the next step recalls, shaped as `recall` returns them."""
        ...


Angles = tuple[Tensor, Tensor] | None
"""cos and sin of positions, as functional.rotary takes them."""


class CausalAttention(nn.Module):
    """Causal self-attention; subclasses define `heads`, which makes queries, keys and values. Values may have `v_dim`
    numbers in tensors of the keys' width. A window is a mask over the full square of logits, or over bands of it
    (schedule/layers/windows.py)."""

    o: nn.Linear
    v_dim: int | None = None
    scale: float | None = None
    """The scale of the logits; None: 1 / sqrt(head_dim)."""

    def __init__(self, sublayer: Sublayer, block: int, tp: TensorParallel | None, cp: ContextParallel | None) -> None:
        super().__init__()
        attend = sublayer.first(Attend)
        assert attend is not None
        self.head_dim, self.block, self.tp, self.cp = attend.key, block, tp, cp
        self.unit, self.window = f"blocks.{block}", attend.window
        self.grouped = attend.kv.count < attend.y.dim.count
        self.repeats: LayerComm | None = None  # set where the core is recomputed: how it communicates

    def heads(self, x: Tensor, angles: Angles, mask: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return queries (batch, seq, heads, width), keys and values (batch, seq, kv_heads, width), the mask, in
        which keys that an indexer did not choose are hidden too, and the gate of the result, (batch, seq, heads x
        v_dim), if there is one. x: (batch, seq, hidden), or with sequence parallelism this rank's rows, (rows,
        hidden)."""
        raise NotImplementedError

    def cached(self, x: Tensor, angles: Angles, cache: Cache) -> Tensor:
        """Cache the new tokens x, (1, tokens, hidden), and attend from them to cached and new ones. Returns (1,
        tokens, heads x v_dim)."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        angles: Angles,
        mask: Tensor | None,
        cache: Cache | None,
        needed: bool = True,
    ) -> Tensor | ProductTerm:
        """Return attention's output, to be added to the stream, (batch, new, hidden): with tp this rank's term of it,
        with sequence parallelism that term's factors. `needed`: whether the value is used (autograd/recompute.py)."""
        if cache is not None:
            return self._projected(self.cached(x, angles, cache), needed)
        q, k, v, mask, *gate = cast(tuple[Any, ...], self.heads(x, angles, mask))
        repeats = self.repeats if recompute.needs_backward(q) else None
        split = self.tp is not None and self.tp.rows is not None
        if repeats is not None:
            if split:
                return sequence.recomputed_factors(self._core, repeats, (q, k, v, mask, *gate), self.o)
            return recompute.recomputed(self._projected_core, repeats, q, k, v, mask, *gate)
        out = self._core(q, k, v, mask, *gate)
        del q, k, v, gate  # the core may keep different tensors for its backward pass
        return sequence.factors(out, self.o) if split else self._projected(out, needed)

    def _projected_core(self, needed: bool, *parts: Tensor) -> Tensor:
        return self._projected(self._core(*parts), needed)

    def _projected(self, out: Tensor, needed: bool) -> Tensor:
        if self.tp is None:
            return recompute.linear(self.o, out, needed)
        return tensor.rows(out, self.o, needed)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gate: Tensor | None = None) -> Tensor:
        """Return softmax(scale q kᵀ) v sigmoid(gate), (batch, new, heads x v_dim); arguments are as `heads`
        returns."""
        out = self._attended(q, k, v, mask)
        return out if gate is None else sigmoid_gate(out, gate)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.cp is not None:
            return self._of_values(context.core(self.cp, self.unit, q, k, v, mask, self.scale))
        if mask is not None and mask.shape[-2] < q.shape[1]:  # of a band
            assert self.window is not None
            return self._of_values(windowed_attention.window_attention(q, k, v, mask, self.window, self.scale))
        grouped = self.grouped
        flash = mask is None and q.dtype in (torch.float16, torch.bfloat16)
        if grouped and q.device.type != "cpu" and not flash:
            # Flash attention on CUDA takes 16-bit inputs without a mask; the kernel for other inputs does not support
            # groups.
            shared = q.shape[2] // k.shape[2]
            k, v, grouped = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2), False
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),  # (batch, heads, seq, head_dim)
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and q.shape[1] > 1,  # one new token sees everything in the cache
            enable_gqa=grouped,
            scale=self.scale,
        )
        return self._of_values(out.transpose(1, 2))

    def _of_values(self, out: Tensor) -> Tensor:
        """Drop padding from a result (batch, new, heads, width): returns (batch, new, heads x v_dim). Narrower values
        are copied: for a single head `flatten` would return a view, and a deferred weight gradient of `o` would keep
        the padding alive."""
        if self.v_dim not in (None, out.shape[-1]):
            out = out[..., : self.v_dim].contiguous()
        return out.flatten(2)


class Attention(CausalAttention):
    """Multi-head attention: grouped where kv_heads < heads (Ainslie et al. 2023). Its operators say whether queries
    and keys are normed, over each head (Dehghani et al. 2023) or over all, whether positions turn them, and whether a
    sigmoid gates the result."""

    def __init__(
        self,
        spec: ModelSpec,
        sublayer: Sublayer,
        block: int,
        tp: TensorParallel | None,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__(sublayer, block, tp, cp)
        into, *_, last = products_of(sublayer)
        widths = {out.name: out.dim.size for out in into.y}
        biased, out_biased = (any(w.name.endswith(".bias") for w in product.weights) for product in (into, last))
        for name, width in widths.items():
            setattr(self, name, nn.Linear(spec.hidden, width, bias=biased))
        self.parts = tuple(widths)
        self.o = nn.Linear(last.into.size, spec.hidden, bias=out_biased)
        self.rotates, self.neighbours = sublayer.first(Rotary) is not None, spec.rope_neighbours
        normed = spec.qk_norm and "q" in widths  # queries from a latent have a norm of their own
        self.norm_over = spec.qk_norm_over if normed else ""
        if self.norm_over == "head":
            self.q_norm: RMSNorm = RMSNorm(self.head_dim, spec.norm_eps)
            self.k_norm: RMSNorm = RMSNorm(self.head_dim, spec.norm_eps)
        elif self.norm_over == "all":
            copies = 1 if tp is None else tp.copies_of(f"{self.unit}.attention.k.weight")
            self.q_norm = AllHeadsNorm(widths["q"], spec.norm_eps, tp, self.unit)
            self.k_norm = AllHeadsNorm(widths["k"], spec.norm_eps, tp, self.unit, copies)

    def heads(self, x: Tensor, angles: Angles, mask: Tensor | None = None) -> tuple[Tensor | None, ...]:
        layers = [getattr(self, part) for part in self.parts]
        q, k, v, *gate = tensor.columns(self.tp, self.unit, x, layers)
        if self.norm_over == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        shape = (*q.shape[:2], -1, self.head_dim)
        q, k, v = q.view(shape), k.view(shape), v.view(shape)
        if self.norm_over == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None and self.rotates:
            q, k = (functional.rotary(part, *angles, neighbours=self.neighbours) for part in (q, k))
        return q, k, v, mask, *gate

    def cached(self, x: Tensor, angles: Angles, cache: Cache) -> Tensor:
        q, k, v, _, *gate = cast(tuple[Any, ...], self.heads(x, angles))
        cache.extend(self.block, k, v)
        parts = []
        for read in cache.reads(self.window):
            own = q[:, read.rows].view(read.slots, -1, *q.shape[2:])
            k, v = cache.read(self.block, read)
            parts.append(self._core(own, k, v, read.mask).reshape(1, -1, self.o.in_features))
        out = torch.cat(parts, 1)
        return sigmoid_gate(out, *gate) if gate else out
