"""Live bytes along the passes of a block: what each operation takes and gives back, in the order of nn/decoder.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.core import Core
from phalanx.cost.kernel import Column
from phalanx.spec.model import ModelSpec


@dataclass
class Walk:
    """Live bytes above those at the start, and the most there were."""

    live: Column = 0
    highest: Column = 0

    def take(self, *sizes: Column) -> None:
        """Tensors are allocated."""
        self.live = self.live + sum(sizes)
        self.highest = np.maximum(self.highest, self.live)

    def give(self, *sizes: Column) -> None:
        """Tensors are freed."""
        self.live = self.live - sum(sizes)

    def touch(self, *sizes: Column) -> None:
        """Tensors are there for a moment."""
        self.take(*sizes)
        self.give(*sizes)


class Block:
    """The tensors of a block on one of `tp` ranks, in bytes, for `t` tokens and `e` bytes per element. `spec` is what
    the rank holds, `core` attention's over several ranks.

    S (t, hidden)    of the residual stream: its norms, their gradients
    A (t, ffn)       of the MLP
    Q (t, q_width)   queries; attention's result      q_sums, k_sums: a number per head, the log-sum-exp or a norm's
    K (t, kv_width)  keys; values
    """

    def __init__(self, spec: ModelSpec, t: Column, e: int, tp: int = 1, core: Core | None = None) -> None:
        self.spec, self.t, self.e, self.tp, self.core = spec, t, e, tp, core
        h, wide = spec.hidden, max(e, 4)
        self.S, self.A, self.Q, self.K = (t * n * e for n in (h, spec.ffn, spec.q_width, spec.kv_width))
        self.q_sums, self.k_sums = t * spec.heads * wide, t * spec.kv_heads * wide
        self.statistics = statistics(spec, t, e)
        self.dW_mlp, self.dW_q, self.dW_k = (n * h * e for n in (spec.ffn, spec.q_width, spec.kv_width))
        self.serial, self.one_norm = spec.residual == "serial", spec.residual == "parallel_one_norm"
        self.products = 2 if spec.gated else 1  # of the MLP's input

    def forward(self, walk: Walk) -> None:
        """What is live in the end is kept for the backward pass; the output is of it, the input is not."""
        self._norm(walk)
        self._attention(walk)
        walk.take(self.S)  # + the input
        walk.give(self.S)
        if not self.one_norm:
            self._norm(walk)
        walk.take(self.products * self.A)
        walk.take(self.A)  # activated
        walk.take(self.S)
        walk.take(self.S)  # + what was before
        walk.give(self.S if self.serial else 2 * self.S)

    def _norm(self, walk: Walk) -> None:
        walk.take(self.statistics)
        if self.spec.norm == "rms":
            self._wide_norm(walk, self.t * self.spec.hidden)
        walk.take(self.S)

    def _wide_norm(self, walk: Walk, elements: Column) -> None:
        if self.e < 4:
            walk.touch(2 * elements * 4)

    def _attention(self, walk: Walk) -> None:
        Q, K, spec = self.Q, self.K, self.spec
        walk.take(Q, K, K)
        if spec.qk_norm:
            for size, sums, width in ((Q, self.q_sums, spec.q_width), (K, self.k_sums, spec.kv_width)):
                walk.take(sums)
                self._wide_norm(walk, self.t * width)
                walk.take(size)
        if spec.position == "rotary":
            walk.touch(Q, K)  # turned, in place of those before
        if self.core is not None:
            self.core.forward(walk)
        else:
            walk.take(Q, self.q_sums)
        walk.take(self.S)

    def backward(self, walk: Walk) -> None:
        """The gradient of the output is there, and gives way to that of the input; so does what was kept, but for the
        output, to which the input corresponds."""
        self._mlp_backward(walk)
        S = self.S
        if not self.one_norm:
            walk.touch(normed(self.spec, self.t, self.e))
            walk.give(self.statistics)
        if self.serial:
            walk.give(2 * S)  # between attention and MLP; one gradient of two
        self._attention_backward(walk)
        walk.touch(normed(self.spec, self.t, self.e))
        walk.give(self.statistics)
        walk.give(2 * S)  # the input; one gradient of two

    def _mlp_backward(self, walk: Walk) -> None:
        S, A = self.S, self.A
        walk.take(A)
        walk.touch(self.dW_mlp)
        walk.give(A)  # what the second product read
        if self.spec.gated:
            walk.take(3 * A)
            walk.give(4 * A)
        else:
            walk.take(A)
            walk.give(2 * A)
        if self.tp > 1:  # gradients of all weights that read one input are made beside its own, which travels
            walk.take(S)
            walk.touch(self.products * self.dW_mlp)
            walk.give(self.products * A)
            self._read(walk)
            return
        walk.take(S)
        walk.touch(self.dW_mlp)
        walk.give(A)
        if self.spec.gated:
            walk.take(S)
            walk.touch(self.dW_mlp)
            walk.give(A)
        self._read(walk)
        if self.spec.gated:
            self._add(walk, self.dW_mlp, self.spec.mlp_bias)

    def _read(self, walk: Walk) -> None:
        """All gradients of products that read a norm's result are made: it goes, where nobody else has read it."""
        if not self.one_norm:
            walk.give(self.S)

    def _add(self, walk: Walk, weight: Column, bias: bool) -> None:
        """Two gradients of one tensor become one, when the gradient of the weight is not yet gone: a bias has torch
        flatten the input, and then it is."""
        walk.take(self.S)
        walk.touch(0 if bias else weight)
        walk.give(2 * self.S)

    def _attention_backward(self, walk: Walk) -> None:
        S, Q, K, spec = self.S, self.Q, self.K, self.spec
        walk.take(Q)
        walk.touch(self.dW_q)
        if self.core is not None and self.core.part.ulysses > 1:
            walk.give(Q)  # the result as Ulysses gave it back
        if not self.serial and not self.one_norm:
            walk.give(S)  # the gradient of the output, which that of the MLP's norm was added to
        if self.core is not None:
            self.core.backward(walk)
        else:
            walk.take(Q, K, K)
            walk.give(Q)
            walk.give(2 * Q + 2 * K + self.q_sums)
        if spec.position == "rotary":
            walk.touch(Q)
        if spec.qk_norm:
            for size, sums, heads in ((K, self.k_sums, spec.kv_heads), (Q, self.q_sums, spec.heads)):
                walk.touch(rms_temporaries(self.t * heads, spec.head_dim, self.e))
                walk.give(size, sums)
        if self.tp > 1:
            walk.take(S)
            walk.touch(self.dW_q + 2 * self.dW_k)
            walk.give(Q + 2 * K)
            walk.give(S)
            if self.one_norm:
                self._add(walk, 0, bias=True)
            return
        walk.take(S)
        walk.touch(self.dW_k)
        walk.give(K)
        if self.one_norm:
            self._add(walk, self.dW_k, spec.qkv_bias)
        for size, weight in ((K, self.dW_k), (Q, self.dW_q)):
            walk.take(S)
            walk.touch(weight)
            walk.give(size)
            if size is Q:
                walk.give(S)  # the norm's result: nobody else has read it, or all have
            self._add(walk, weight, spec.qkv_bias)


def statistics(spec: ModelSpec, t: Column, e: int) -> Column:
    """What a norm keeps beside its input and output."""
    return t * (max(e, 4) if spec.norm == "rms" else 2 * e)


def normed(spec: ModelSpec, t: Column, e: int) -> Column:
    """What a norm of the stream holds in its backward pass, its result included, when the normed input has given way
    to its gradient."""
    return rms_temporaries(t, spec.hidden, e) if spec.norm == "rms" else t * spec.hidden * e


def rms_temporaries(rows: Column, width: int, e: int) -> Column:
    """What an RMSNorm's backward pass holds, its result included (nn/functions.py)."""
    wide = max(e, 4)
    return (3 if e < 4 else 2) * rows * width * wide + rows * wide
