"""Attention: projections, positions, the softmax core, and the projection back into the stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.nn import functional
from phalanx.nn.norms import RMSNorm
from phalanx.runtime.autograd import recompute
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.model_parallel import context, sequence, tensor
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.sequence import Factors
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.spec.model.spec import ModelSpec


@dataclass
class Cache:
    """The key-value cache, by block: keys and values of the tokens so far, (batch, tokens, kv_heads, head_dim); or
    what latent attention computes them from (mla.py)."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """The number of cached tokens."""
        return next(iter(self.keys.values())).shape[1] if self.keys else 0

    def extend(self, block: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; return all of a block."""
        if block in self.keys:
            k, v = torch.cat([self.keys[block], k], 1), torch.cat([self.values[block], v], 1)
        self.keys[block], self.values[block] = k, v
        return k, v


Angles = tuple[Tensor, Tensor] | None
"""cos and sin of positions, as functional.rotary takes them."""


class Core(nn.Module):
    """Causal self-attention; subclasses define `heads`, which makes queries, keys and values. Values may have `v_dim`
    numbers in tensors of the keys' width. A window is a mask over the full square of logits."""

    o: nn.Linear
    v_dim: int | None = None
    scale: float | None = None
    """The scale of the logits; None: 1 / sqrt(head_dim)."""

    def __init__(self, spec: ModelSpec, block: int, tp: TensorParallel | None, cp: ContextParallel | None) -> None:
        super().__init__()
        self.head_dim, self.block, self.tp, self.cp = spec.head_dim, block, tp, cp
        self.unit = f"blocks.{block}"
        self.grouped = spec.kv_heads < spec.heads
        self.repeats: LayerComm | None = None  # set where the core is recomputed: how it communicates

    def heads(self, x: Tensor, angles: Angles, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (batch, new, heads, width); keys and values, with those of the cache, (batch, tokens,
        kv_heads, width). x: (batch, new, hidden), or with sequence parallelism own rows, (own, hidden)."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        angles: Angles,
        mask: Tensor | None,
        cache: Cache | None,
        needed: bool = True,
    ) -> Tensor | Factors:
        """Return what attention adds to the stream, (batch, new, hidden): with tp this rank's term, with sequence
        parallelism the factors of it. `needed`: whether the value is used (runtime/autograd/recompute.py)."""
        q, k, v = self.heads(x, angles, cache)
        repeats = self.repeats if cache is None and recompute.pays(q) else None
        split = self.tp is not None and self.tp.rows is not None
        if repeats is not None:
            if split:
                return sequence.repeated(self._core, repeats, (q, k, v, mask), self.o)
            return recompute.repeated(self._projected_core, repeats, q, k, v, mask)
        out = self._core(q, k, v, mask)
        del q, k, v  # the core may keep other tensors than these
        return sequence.factors(out, self.o) if split else self._projected(out, needed)

    def _projected_core(self, needed: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self._projected(self._core(q, k, v, mask), needed)

    def _projected(self, out: Tensor, needed: bool) -> Tensor:
        if self.tp is None:
            return recompute.linear(self.o, out, needed)
        return tensor.rows(out, self.o, needed)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute softmax(scale q kᵀ) v, (batch, new, heads x v_dim), of what `heads` returns."""
        if self.cp is not None:
            return self._of_values(context.core(self.cp, self.unit, q, k, v, mask, self.scale))
        grouped = self.grouped
        flash = mask is None and q.dtype in (torch.float16, torch.bfloat16)
        if grouped and q.device.type == "cuda" and not flash:
            # Flash attention on CUDA takes 16-bit inputs without a mask; the kernel for the rest knows no groups.
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
        """Return the numbers of values, (batch, new, heads x v_dim), of a result (batch, new, heads, width). Narrower
        ones are copied: of a single head `flatten` would return a view, and a deferred weight gradient of `o` would
        keep the padding too."""
        if self.v_dim not in (None, out.shape[-1]):
            out = out[..., : self.v_dim].contiguous()
        return out.flatten(2)


class Attention(Core):
    """Multi-head attention: grouped where kv_heads < heads (Ainslie et al. 2023); with query and key norms where the
    spec has them (Dehghani et al. 2023)."""

    def __init__(
        self, spec: ModelSpec, block: int, tp: TensorParallel | None, cp: ContextParallel | None = None
    ) -> None:
        super().__init__(spec, block, tp, cp)
        self.q = nn.Linear(spec.hidden, spec.q_width, bias=spec.qkv_bias)
        self.k = nn.Linear(spec.hidden, spec.kv_width, bias=spec.qkv_bias)
        self.v = nn.Linear(spec.hidden, spec.kv_width, bias=spec.qkv_bias)
        self.o = nn.Linear(spec.q_width, spec.hidden, bias=spec.out_bias)
        self.normed = spec.qk_norm
        if self.normed:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)

    def heads(self, x: Tensor, angles: Angles, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = tensor.columns(self.tp, self.unit, x, (self.q, self.k, self.v))
        shape = (*q.shape[:2], -1, self.head_dim)
        q, k, v = q.view(shape), k.view(shape), v.view(shape)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = functional.rotary(q, *angles), functional.rotary(k, *angles)
        if cache is not None:
            k, v = cache.extend(self.block, k, v)
        return q, k, v
