"""Live bytes along the passes of a block: what each operation takes and gives back, in the order of nn/decoder.py."""

from __future__ import annotations

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.attention_core import Core
from phalanx.cost.memory.live_bytes import Walk, normed, rms_temporaries, statistics
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Recompute


class Block:
    """The tensors of a block on one of `tp` ranks, in bytes, for `t` tokens and `e` bytes per element. `spec` is what
    the rank holds, `core` attention's over several ranks; `repeat`: what of the forward pass is repeated in the
    backward pass (runtime/recompute.py).

    S (t, hidden)    of the residual stream: its norms, their gradients; with `sp` of own tokens, and
    W (t, hidden)    the same of all, while they are together
    A (t, ffn)       of the MLP
    Q (t, q_width)   queries; attention's result      q_sums, k_sums: a number per head, the log-sum-exp or a norm's
    K (t, kv_width)  keys; values
    O (t, q_width)   attention's result as the product reads it
    """

    def __init__(
        self,
        spec: ModelSpec,
        t: Column,
        e: int,
        tp: int = 1,
        sp: bool = False,
        repeat: Recompute = "none",
        core: Core | None = None,
    ) -> None:
        self.spec, self.t, self.e, self.tp, self.sp, self.repeat, self.core = spec, t, e, tp, sp, repeat, core
        h, wide = spec.hidden, max(e, 4)
        self.own = t // tp if sp else t
        self.S, self.W = self.own * h * e, t * h * e
        self.A, self.Q, self.K = (t * n * e for n in (spec.ffn, spec.q_width, spec.kv_width))
        self.q_sums, self.k_sums = t * spec.heads * wide, t * spec.kv_heads * wide
        self.statistics = statistics(spec, self.own, e)
        self.dW_mlp, self.dW_q, self.dW_k = (n * h * e for n in (spec.ffn, spec.q_width, spec.kv_width))
        self.O, self.dW_o = self.Q, self.dW_q
        self.serial, self.one_norm = spec.residual == "serial", spec.residual == "parallel_one_norm"
        self.products = 2 if spec.gated else 1  # of the MLP's input
        self.joint = tp > 1  # products of one input have their backward pass together
        self.made = 1  # 0 where the gradient of a product's weight is made right where it is put, without a copy
        self.moved = core is not None and core.part.ulysses > 1  # heads go apart, and tokens come together
        self.apart = self.moved  # the core's result is there as Ulysses gave it back too

    def passes(self) -> tuple[Walk, Walk]:
        """Forward and backward."""
        there, back = Walk(), Walk()
        if self.repeat == "full":
            self.forward_alone(there)
            self.forward(back, made=False)
        else:
            self.forward(there)
        self.backward(back)
        if self.repeat == "full":  # what the pass began with is kept until it is over
            back.masked = back.highest
        return there, back

    def forward(self, walk: Walk, made: bool = True) -> None:
        """What is live in the end is kept for the backward pass; the output is of it, the input is not. `made`: with
        the output, and what only that needs."""
        self._norm(walk)
        self._attention(walk)
        if (made or self.serial) and (self.serial or not self.sp):
            self._product(walk, core=True)
            walk.touch(self.S)  # + the input
        if not self.one_norm:
            self._norm(walk)
        self._mlp(walk, made)

    def _mlp(self, walk: Walk, made: bool) -> None:
        self._columns(walk, self.products * self.A)
        walk.alloc(self.A)  # activated
        if made:
            self._product(walk, core=not self.serial)
            walk.alloc(self.S)  # + what was before
            walk.free(self.S if self.serial or self.sp else 2 * self.S)

    def forward_alone(self, walk: Walk) -> None:
        """Without a graph: nothing is kept but the output."""
        S, Q, K = self.S, self.Q, self.K
        self._norm(walk)
        walk.free(self.statistics)
        self._heads_alone(walk)
        self._core_alone(walk)
        walk.alloc(self.O)
        walk.free(Q + 2 * K)
        if self.sp:
            self._sum_alone(walk)
            return
        walk.alloc(S)
        walk.free(self.O)
        if self.serial:
            walk.free(S)  # the norm's result
        if self.serial or self.tp == 1:
            walk.touch(S)  # + the input
        self._mlp_alone(walk)

    def _mlp_alone(self, walk: Walk) -> None:
        S, A = self.S, self.A
        self._activated_alone(walk)
        walk.alloc(S)
        walk.free(A + (0 if self.one_norm else S))
        walk.alloc(S)  # + what was before
        walk.free(2 * S if self.serial else 3 * S)

    def _heads_alone(self, walk: Walk) -> None:
        Q, K, spec = self.Q, self.K, self.spec
        self._columns(walk, Q, K, K)
        if spec.qk_norm:
            for size, sums, width in ((Q, self.q_sums, spec.q_width), (K, self.k_sums, spec.kv_width)):
                walk.alloc(sums)
                self._wide_norm(walk, self.t * width)
                walk.alloc(size)
                walk.free(sums)
            walk.free(Q + K)
        if spec.position == "rotary":
            walk.touch(Q, K)

    def _activated_alone(self, walk: Walk) -> None:
        """What the MLP's second product reads, and the norm's result that it was made of."""
        if not self.one_norm:
            self._norm(walk)
            walk.free(self.statistics)
        self._columns(walk, self.products * self.A)
        walk.alloc(self.A)
        walk.free(self.products * self.A)

    def _sum_alone(self, walk: Walk) -> None:
        """With sequence parallelism, from attention's result on: products are made when they are summed."""
        S = self.S
        if self.serial:
            walk.free(S)  # the norm's result
            self._product(walk)
            walk.touch(S)  # + the input
            walk.free(self.O)
        self._mlp_sum_alone(walk)

    def _mlp_sum_alone(self, walk: Walk) -> None:
        S, A = self.S, self.A
        self._activated_alone(walk)
        if not self.one_norm:
            walk.free(S)
        self._product(walk)
        if self.serial:
            walk.free(A)
        walk.alloc(S)  # + what was before
        walk.free(2 * S if self.serial else 2 * S + self.O + A)

    def _columns(self, walk: Walk, *results: Column) -> None:
        """Products that read a norm's result."""
        together = self.W if self.sp else 0
        walk.alloc(together)
        walk.alloc(*results)
        walk.free(together)

    def _product(self, walk: Walk, core: bool = False) -> None:
        """What is added to the stream. `core`: with sequence parallelism, where attention's is made again, it is made
        for this product alone."""
        again = core and self.sp and self.repeat == "selective"
        if again:
            self._core_alone(walk)
        walk.alloc(self.S)
        walk.touch(self.W + self.O * again if self.sp else 0)

    def _norm(self, walk: Walk) -> None:
        walk.alloc(self.statistics)
        if self.spec.norm == "rms":
            self._wide_norm(walk, self.own * self.spec.hidden)
        walk.alloc(self.S)

    def _wide_norm(self, walk: Walk, elements: Column) -> None:
        if self.e < 4:
            walk.touch(2 * elements * 4)

    def _attention(self, walk: Walk) -> None:
        self._heads(walk)
        if self.repeat != "selective":
            self._core(walk)
        elif not self.sp:
            self._core_alone(walk)
            walk.touch(self.O, self.S)

    def _heads(self, walk: Walk) -> None:
        """Queries, keys and values."""
        Q, K, spec = self.Q, self.K, self.spec
        self._columns(walk, Q, K, K)
        if spec.qk_norm:
            for size, sums, width in ((Q, self.q_sums, spec.q_width), (K, self.k_sums, spec.kv_width)):
                walk.alloc(sums)
                self._wide_norm(walk, self.t * width)
                walk.alloc(size)
        if spec.position == "rotary":
            walk.touch(Q, K)  # turned, in place of those before

    def _core(self, walk: Walk) -> None:
        if self.core is None:
            walk.alloc(self.Q, self.q_sums)
        else:
            self.core.forward(walk)

    def _core_alone(self, walk: Walk) -> None:
        """Without a graph: what it takes, its result among it."""
        alone = Walk()
        self._core(alone)
        walk.touch(alone.highest)

    def backward(self, walk: Walk) -> None:
        """The gradient of the output is there, and gives way to that of the input; so does what was kept, but for the
        output, to which the input corresponds. Where all is repeated, input and output's gradient outlive it."""
        self._mlp_backward(walk)
        S = self.S
        if not self.one_norm:
            walk.touch(normed(self.spec, self.own, self.e))
            walk.free(self.statistics)
        if self.serial:
            walk.free(S)  # between attention and MLP
            if self.repeat == "full":
                walk.alloc(S)  # the sum of two gradients; one is the output's
            walk.free(S)  # one gradient of two
        self._attention_backward(walk)
        walk.touch(normed(self.spec, self.own, self.e))
        walk.free(self.statistics)
        if self.repeat == "full" and self.one_norm:
            walk.alloc(S)  # the sum of two gradients; one is the output's
            walk.free(S)
        if self.repeat == "full" and not self.one_norm:
            walk.free(S)  # the output's gradient, to which others were added
        walk.free(2 * S)  # the input; one gradient of two

    def _mlp_backward(self, walk: Walk) -> None:
        S, A = self.S, self.A
        if self.sp:
            self._product_backward(walk, mlp=True, attention=not self.serial)
        else:
            walk.alloc(A)
            walk.touch(self.dW_mlp * self.made)
        walk.free(A)  # what the second product read
        if self.spec.gated:
            walk.alloc(3 * A)
            walk.free(4 * A)
        else:
            walk.alloc(A)
            walk.free(2 * A)
        if self.joint:  # gradients of all weights that read one input are made beside its own, which travels
            self._columns_backward(walk, *[(A, self.dW_mlp)] * self.products)
            self._read(walk)
            return
        walk.alloc(S)
        walk.touch(self.dW_mlp)
        walk.free(A)
        if self.spec.gated:
            walk.alloc(S)
            walk.touch(self.dW_mlp)
            walk.free(A)
        self._read(walk)
        if self.spec.gated:
            self._add(walk, self.dW_mlp, self.spec.mlp_bias)

    def _columns_backward(self, walk: Walk, *parts: tuple[Column, int]) -> None:
        """Over tp ranks: with sequence parallelism the input is brought together once more, and its gradient is there
        of all tokens before it is of own ones. `parts`: the gradients of results, which go, and of weights."""
        together = 2 * self.W if self.sp else 0
        walk.alloc(self.S, together)
        walk.touch(sum(weight for _, weight in parts))
        walk.free(together, *(size for size, _ in parts))

    def _product_backward(self, walk: Walk, mlp: bool, attention: bool) -> None:
        """With sequence parallelism, of the MLP's second product and of attention's, together where they are of one
        sum: then what is made for attention waits for its turn. That is the gradient of the weight, and that of
        attention's result, or where it was made again those of what it is made of."""
        walk.alloc(self.W)
        again = attention and self.repeat == "selective"
        if again:
            self._core_again(walk)
        walk.alloc(self.A * mlp + self.O * attention)
        walk.alloc(self.dW_mlp * mlp + self.dW_o * attention)
        walk.free(self.W)
        if again:
            self._core_backward(walk)
            walk.masked = walk.highest
        if attention and self.apart:
            walk.free(self.O)
        walk.free(self.dW_mlp * mlp)

    def _read(self, walk: Walk) -> None:
        """All gradients of products that read a norm's result are made: it goes, where nobody else has read it."""
        if not self.one_norm:
            walk.free(self.S)

    def _add(self, walk: Walk, weight: Column, bias: bool) -> None:
        """Two gradients of one tensor become one, when the gradient of the weight is not yet gone: a bias has torch
        flatten the input, and then it is."""
        walk.alloc(self.S)
        walk.touch(0 if bias else weight)
        walk.free(2 * self.S)

    def _core_again(self, walk: Walk) -> None:
        """Made once more, of queries, keys and values that outlive it."""
        self._core(walk)
        if self.moved:
            walk.alloc(self.Q + 2 * self.K)  # which Ulysses alone would have left behind

    def _core_backward(self, walk: Walk) -> None:
        """The gradient of the result is there, and gives way to those of queries, keys and values."""
        Q, K = self.Q, self.K
        if self.core is None:
            walk.alloc(Q, K, K)
            walk.free(Q)
            walk.free(2 * Q + 2 * K + self.q_sums)
            return
        self.core.backward(walk)
        if self.repeat == "selective" and self.moved:
            walk.free(Q + 2 * K)

    def _attention_backward(self, walk: Walk) -> None:
        S = self.S
        added = S if not self.serial and not self.one_norm else 0
        selective = self.repeat == "selective"
        if self.sp:
            if self.serial:
                self._product_backward(walk, mlp=False, attention=True)
            walk.free(self.dW_o)
        else:
            if selective:
                self._core_again(walk)
            walk.alloc(self.O)
            walk.touch(self.dW_o * self.made)
            if self.apart:
                walk.free(self.O)
        if self.repeat == "none" or (self.sp and selective):
            walk.free(added)  # the gradient of the output, which that of the MLP's norm was added to
        if not (self.sp and selective):
            self._core_backward(walk)
            walk.masked = walk.highest
        if selective and not self.sp:
            walk.free(added)
        self._heads_backward(walk)

    def _heads_backward(self, walk: Walk) -> None:
        """The gradients of queries, keys and values give way to that of the norm's result."""
        Q, K, spec = self.Q, self.K, self.spec
        if spec.position == "rotary":
            walk.touch(Q)
        if spec.qk_norm:
            for size, sums, heads in ((K, self.k_sums, spec.kv_heads), (Q, self.q_sums, spec.heads)):
                walk.touch(rms_temporaries(self.t * heads, spec.head_dim, self.e))
                walk.free(size, sums)
        bias = spec.qkv_bias
        self._heads_input(walk, (K, self.dW_k, bias), (K, self.dW_k, bias), (Q, self.dW_q, bias))

    def _heads_input(self, walk: Walk, *parts: tuple[Column, int, bool]) -> None:
        """Of products that read the norm's result, the last one first: the gradients of what they make, which go, and
        of their weights, and whether there is a bias."""
        S = self.S
        if self.joint:
            self._columns_backward(walk, *((size, weight) for size, weight, _ in parts))
            walk.free(S)
            if self.one_norm:
                self._add(walk, 0, bias=True)
            return
        for i, (size, weight, bias) in enumerate(parts):
            walk.alloc(S)
            walk.touch(weight)
            walk.free(size)
            if i == len(parts) - 1:
                walk.free(S)  # the norm's result: nobody else has read it, or all have
            if i or self.one_norm:
                self._add(walk, weight, bias)
