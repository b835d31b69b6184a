"""Live bytes along the passes of a block with latent attention, in the order of nn/mla.py; everything else as in
block.py."""

from __future__ import annotations

from typing import Any

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.block import Block
from phalanx.cost.memory.live_bytes import Walk, rms_temporaries
from phalanx.cost.memory.split_backward import SplitBlock


class LatentHeads(Block):
    """Latent attention, to be mixed in before any block class. Q and K are the core's tensors, all of one width; O
    its values as the product reads them, a copy where they are narrower.

    raw (t, q_width)                  queries before they are padded to the core's width
    first                             what queries are projected from: (t, q_rank), or the queries themselves
    down (t, kv_rank + rope_dim)      the joint projection that keys and values come from
    latent (t, kv_rank)               its latent part, normed; token_sums: a number per token
    rope (t, rope_dim)                its rotary part
    up (t, heads (nope_dim + v_dim))  each head's keys and values, expanded from the latent
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec, a, t, h, e = self.spec, self.spec.latent, self.t, self.spec.hidden, self.e
        assert a is not None
        self.q_rank, self.kv_rank = a.q_rank, a.kv_rank
        first, down, up = a.q_rank or spec.q_width, a.kv_rank + a.rope_dim, spec.heads * (a.nope_dim + a.v_dim)
        self.raw, self.Q = self.Q, t * spec.heads * spec.core_dim * e
        self.K, self.O = self.Q, t * spec.heads * a.v_dim * e
        self.first, self.down, self.up = t * first * e, t * down * e, t * up * e
        self.latent, self.rope, self.token_sums = t * a.kv_rank * e, t * a.rope_dim * e, t * max(e, 4)
        self.dW_first, self.dW_down, self.dW_o = first * h * e, down * h * e, spec.heads * a.v_dim * h * e
        self.dW_q_up, self.dW_up = spec.q_width * (a.q_rank or 0) * e, up * a.kv_rank * e
        self.padded, self.narrow = spec.core_dim > spec.head_dim, a.v_dim < spec.core_dim
        self.result_copied = self.result_copied or self.narrow
        # If Ulysses leaves a rank one head, all three gradients stay in one receive buffer, unless the core is
        # recomputed: then they are copied.
        one = self.core is not None and self.ulysses and self.core.part.ulysses == spec.heads
        self.in_one = one and self.repeat != "selective"

    def _heads(self, walk: Walk) -> None:
        self._queries_keys_values(walk, keep=True)

    def _heads_without_graph(self, walk: Walk) -> None:
        self._queries_keys_values(walk, keep=False)

    def _queries_keys_values(self, walk: Walk, keep: bool) -> None:
        """Walk from the norm's result to queries, keys and values. `keep`: keep tensors for the backward pass."""
        self._columns(walk, self.first, self.down)
        if self.q_rank is not None:
            self._normed(walk, self.q_rank, keep)
            self._rounded(walk, self.first, self.raw)
            walk.alloc(self.raw)
            walk.free(0 if keep else 2 * self.first)
        walk.touch(self.raw)  # rotated, replacing the previous ones
        self._normed(walk, self.kv_rank, keep)
        walk.alloc(self.rope)
        walk.free(0 if keep else self.down)
        if self.padded:  # only after the latent's norm, whose temporaries are the peak where latents are wide
            walk.alloc(self.Q)
            walk.free(self.raw)
        self._rounded(walk, self.latent, self.up)
        walk.alloc(self.up)
        walk.alloc(2 * self.K)
        walk.free(self.up + self.rope + (0 if keep else self.latent))

    def _normed(self, walk: Walk, rank: int, keep: bool) -> None:
        """Walk the norm of a latent of width `rank`."""
        walk.alloc(self.token_sums)
        self._wide_norm(walk, self.t * rank)
        walk.alloc(self.t * rank * self.e)
        walk.free(0 if keep else self.token_sums)

    def _core(self, walk: Walk) -> None:
        super()._core(walk)
        if self.narrow:
            walk.alloc(self.O)
            if self.ulysses:
                walk.touch(self.Q + 2 * self.K)  # queries, keys and values before the exchange
                walk.free(self.Q)

    def _core_without_graph(self, walk: Walk) -> None:
        """Walk the core without an autograd graph; the log-sum-exp is freed before values are copied."""
        core_walk = Walk()
        super()._core(core_walk)
        walk.touch(core_walk.highest)
        walk.touch((self.Q + self.O) * self.narrow)

    def _core_backward(self, walk: Walk) -> None:
        kept = self.sp and self.repeat == "selective"  # the result, by the recomputation
        if self.narrow:
            walk.alloc(self.Q)  # padded with zeros
            walk.free(self.O * (not kept))
        super()._core_backward(walk)
        if self.narrow and kept:
            walk.free(self.O)

    def _heads_backward(self, walk: Walk) -> None:
        walk.alloc(self.up, self.rope)
        walk.free(2 * self.K * (not self.in_one))
        self._rounded(walk, self.up, self.latent)
        walk.alloc(self.latent)
        self._weight(walk, self.dW_up * self.copied, self.up, self.latent)
        walk.free(self.up + self.latent)
        walk.alloc(self.kv_rank * self.e)  # the gradient of the norm's weight
        self._down_backward(walk)
        walk.free(self.kv_rank * self.e)
        if self.q_rank is not None:
            self._rounded(walk, self.raw, self.first)
            walk.alloc(self.first)
            self._weight(walk, self.dW_q_up * self.copied, self.raw, self.first)
            walk.free(self.raw + self.first)
            walk.alloc(self.q_rank * self.e)
            self._norm_backward(walk, self.q_rank, self.first)
            walk.free(self.q_rank * self.e)
        biases = self.spec.qkv_bias, self.spec.qkv_bias and self.q_rank is not None
        parts = zip(self._heads_parts, biases, strict=True)
        self._heads_input(walk, *((size, weight, bias) for (size, weight), bias in parts))

    @property
    def _heads_parts(self) -> tuple[tuple[Column, int], ...]:
        return (self.down, self.dW_down), (self.first, self.dW_first)

    def _down_backward(self, walk: Walk) -> None:
        """Walk from the gradients of the normed latent and of the rotary part to the joint one; take the padding from
        the queries' before, and rotate them back after."""
        with_queries = 2 * self.K * self.in_one
        if self.padded:
            walk.alloc(self.raw)
            walk.free(self.Q + with_queries)
        walk.touch(self.rope)
        self._norm_backward(walk, self.kv_rank, self.down)
        walk.alloc(self.down)
        walk.free(self.latent + self.rope)
        self._rotated(walk, self.raw)
        walk.free(with_queries * (not self.padded))

    def _norm_backward(self, walk: Walk, rank: int, read: Column) -> None:
        """Walk a latent norm's backward pass; its input, of `read` bytes, is freed."""
        walk.touch(rms_temporaries(self.t, rank, self.e))
        walk.free(read + self.token_sums)


class LatentBlock(LatentHeads):
    """A block with latent attention and a dense MLP."""


class SplitLatentBlock(LatentHeads, SplitBlock):
    """A block with latent attention whose layers can defer weight gradients."""

    def _heads_inputs(self, walk: Walk) -> None:
        walk.alloc(self.up, self.rope)
        walk.free(2 * self.K * (not self.in_one))
        self._rounded(walk, self.up, self.latent)
        walk.alloc(self.latent)
        walk.alloc(self.kv_rank * self.e)
        self._down_backward(walk)
        if self.q_rank is not None:
            self._rounded(walk, self.raw, self.first)
            walk.alloc(self.first)
            walk.alloc(self.q_rank * self.e)
            self._norm_backward(walk, self.q_rank, self.first)

    def _heads_weights(self, walk: Walk, g: Column) -> None:
        self._result_weight(walk, g)
        self._weight(walk, self.dW_up * self.copied, self.up, self.latent)
        walk.free(self.up + self.latent + self.kv_rank * self.e)
        if self.q_rank is not None:
            self._weight(walk, self.dW_q_up * self.copied, self.raw, self.first)
            walk.free(self.raw + self.first + self.q_rank * self.e)
        self._columns_weights(walk, *self._heads_parts)
