"""Live bytes along the passes of a block: allocations and frees of each operation, in the order of nn/decoder.py."""

from __future__ import annotations

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.attention_core import Core
from phalanx.cost.memory.live_bytes import Walk, normed, rms_temporaries, statistics
from phalanx.schedule.layers.collectives import chunks
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import NumberFormat
from phalanx.spec.strategy.spec import Recompute


class Block:
    """The tensors of a block on one of `tp` ranks, in bytes, for `t` tokens and `e` bytes per element. `spec`: the
    rank's part of the model. `core`: attention's core over several ranks. `repeat`: recomputation in the backward
    pass (runtime/autograd/recompute.py). `mask`: bytes of the masks between documents, without rotary angles.

    S (t, hidden)    residual stream, its norms, their gradients; with `sp` of the rank's own tokens only
    W (t, hidden)    the same of all tokens, while they are summed; G: while they are gathered
    A (t, ffn)       inside the MLP
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
        operands: NumberFormat | None = None,
        gathered: bool = False,
        narrow_stream: bool = False,
        mask: Column = 0,
    ) -> None:
        self.mask = mask
        self.operands = operands  # the products' narrow format, or None
        self.operand_bytes = operands.bytes_per_value if operands else 0
        self.gathered = gathered  # weights are gathered in it, so that forward passes do not round them
        self.narrow_stream = narrow_stream  # and so are gathers of sequence parallelism
        self.rounds_weights = 1
        self.spec, self.t, self.e, self.tp, self.sp, self.repeat, self.core = spec, t, e, tp, sp, repeat, core
        h, wide = spec.hidden, max(e, 4)
        self.own_tokens = t // tp if sp else t
        self.S, self.W = self.own_tokens * h * e, t * h * e
        self.G = t * h if narrow_stream else self.W
        self.A, self.Q, self.K = (t * n * e for n in (spec.ffn, spec.q_width, spec.kv_width))
        self.q_sums, self.k_sums = t * spec.heads * wide, t * spec.kv_heads * wide
        self.statistics = statistics(spec, self.own_tokens, e)
        self.dW_mlp, self.dW_q, self.dW_k = (n * h * e for n in (spec.ffn, spec.q_width, spec.kv_width))
        self.O, self.dW_o = self.Q, self.dW_q
        self.serial, self.one_norm = spec.residual == "serial", spec.residual == "parallel_one_norm"
        self.products = 2 if spec.gated else 1  # that read the MLP's input
        self.joint = tp > 1  # products of one input have their backward pass together
        self.copied = 1  # 0 where a product's weight gradient is computed in its final memory, without a copy
        self.ulysses = core is not None and core.part.ulysses > 1  # heads are scattered, tokens gathered
        self.result_copied = self.ulysses  # the core's result is kept as Ulysses returned it, too

    def passes(self) -> tuple[Walk, Walk]:
        """Return the walks of the forward and the backward pass."""
        forward, backward = Walk(), Walk()
        self.rounds_weights = int(not self.gathered)
        if self.repeat == "full":
            self.forward_without_graph(forward)
            self.forward(backward, output=False)
        else:
            self.forward(forward)
        self.rounds_weights = 1  # and transposes gathered weights
        self.backward(backward)
        if self.repeat == "full":  # the inputs of the pass are kept until it ends
            backward.masked = backward.highest
        return forward, backward

    def forward(self, walk: Walk, output: bool = True) -> None:
        """Walk the forward pass. Tensors live at its end are kept for the backward pass, including the output, not
        the input. `output`: also compute the output, and its exclusive inputs."""
        self._norm(walk)
        self._attention(walk)
        if (output or self.serial) and (self.serial or not self.sp):
            self._product(walk, self.O, core=True)
            walk.touch(self.S)  # + the input
        if not self.one_norm:
            self._norm(walk)
        self._mlp(walk, output)

    def _mlp(self, walk: Walk, output: bool) -> None:
        self._columns(walk, *[self.A] * self.products)
        walk.alloc(self.A)  # activation
        if output:
            self._product(walk, self.A, core=not self.serial)
            walk.alloc(self.S)  # + the residual
            walk.free(self.S if self.serial or self.sp else 2 * self.S)

    def forward_without_graph(self, walk: Walk) -> None:
        """Walk the forward pass without an autograd graph: only the output is kept."""
        S, Q, K = self.S, self.Q, self.K
        self._norm(walk)
        walk.free(self.statistics)
        self._heads_without_graph(walk)
        self._core_without_graph(walk)
        walk.alloc(self.O)
        walk.free(Q + 2 * K)
        if self.sp:
            self._sum_without_graph(walk)
            return
        self._rounded(walk, self.O, S)
        walk.alloc(S)
        walk.free(self.O)
        if self.serial:
            walk.free(S)  # the norm's result
        if self.serial or self.tp == 1:
            walk.touch(S)  # + the input
        self._mlp_without_graph(walk)

    def _mlp_without_graph(self, walk: Walk) -> None:
        S, A = self.S, self.A
        self._activated_without_graph(walk)
        self._rounded(walk, A, S)
        walk.alloc(S)
        walk.free(A + (0 if self.one_norm else S))
        walk.alloc(S)  # + the residual
        walk.free(2 * S if self.serial else 3 * S)

    def _heads_without_graph(self, walk: Walk) -> None:
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

    def _activated_without_graph(self, walk: Walk) -> None:
        """Walk to the MLP's activation; the norm's result that it comes from stays live."""
        if not self.one_norm:
            self._norm(walk)
            walk.free(self.statistics)
        self._columns(walk, *[self.A] * self.products)
        walk.alloc(self.A)
        walk.free(self.products * self.A)

    def _sum_without_graph(self, walk: Walk) -> None:
        """With sequence parallelism, walk from attention's result on: products are computed when they are
        reduce-scattered."""
        S = self.S
        if self.serial:
            walk.free(S)  # the norm's result
            self._product(walk, self.O)
            walk.touch(S)  # + the input
            walk.free(self.O)
        self._mlp_sum_without_graph(walk)

    def _mlp_sum_without_graph(self, walk: Walk) -> None:
        S, A = self.S, self.A
        self._activated_without_graph(walk)
        if not self.one_norm:
            walk.free(S)
        self._product(walk, A)
        if self.serial:
            walk.free(A)
        walk.alloc(S)  # + the residual
        walk.free(2 * S if self.serial else 2 * S + self.O + A)

    def _columns(self, walk: Walk, *results: Column) -> None:
        """Walk products that read a norm's result; with sequence parallelism, it is gathered for them."""
        together = self.G if self.sp else 0
        walk.alloc(together)
        if self.sp:
            walk.alloc(*results)
            self._in_chunks(walk, *results)
            walk.free(together)
            return
        for result in results:
            self._rounded(walk, self.S, result)
            walk.alloc(result)
        walk.free(together)

    def _rounded(self, walk: Walk, read: Column, result: Column) -> None:
        """Touch the tensors of a product of a narrow format: its rounded operands, and the result. `read`, `result`:
        bytes of the tensors of all tokens."""
        if self.operand_bytes:
            row = self.t * self.e
            m, k, n = self.t, read // row, result // row
            walk.touch((m * k + n * k * self.rounds_weights) * self.operand_bytes + m * n * self.e)

    def _weight(self, walk: Walk, weight: Column, g: Column, x: Column) -> None:
        """Touch the gradient of a weight, of `weight` bytes, from the gradient g of a result and the x it read, in
        bytes; in products of a narrow format with their operands."""
        walk.touch(weight)
        if self.operand_bytes:
            row = self.t * self.e
            m, k, n = g // row, self.t, x // row
            walk.touch((m * k + n * k) * self.operand_bytes + m * n * self.e)

    def _in_chunks(self, walk: Walk, *others: Column, added: bool = False) -> None:
        """Touch the tensors of narrow products computed chunk by chunk, with sequence parallelism: all rounded
        weights, and a chunk of the inputs. The products map the stream to tensors of `others` bytes, or if `added`
        these to one sum."""
        if not self.operand_bytes:
            return
        widths = [other // (self.t * self.e) for other in others]
        chunk, h = self.t // chunks(self.t, self.tp), self.spec.hidden
        read = h * (not self.narrow_stream) * self.operand_bytes
        if added:
            read = max(width * self.operand_bytes + h * self.e * (i > 0) for i, width in enumerate(widths))
        walk.touch(sum(widths) * h * self.rounds_weights * self.operand_bytes + chunk * read)

    def _weights_of_one(self, walk: Walk, *parts: tuple[Column, int]) -> None:
        """Allocate weight gradients of products that share a factor of the stream's width, with sequence parallelism.
        `parts`: (bytes of the other factor, bytes of the weight's gradient)."""
        shared = self.t * self.spec.hidden * self.operand_bytes
        walk.alloc(shared)
        for size, weight in parts:
            walk.alloc(weight)
            walk.touch(size // self.e * self.operand_bytes)
        walk.free(shared)

    def _product(self, walk: Walk, read: Column, core: bool = False) -> None:
        """Walk a product that is added to the stream, of a tensor of `read` bytes. `core`: with sequence parallelism
        and selective recomputation, attention's core is computed for this product and not kept."""
        recomputed = core and self.sp and self.repeat == "selective"
        if recomputed:
            self._core_without_graph(walk)
        if not self.sp:
            self._rounded(walk, read, self.S)
            walk.alloc(self.S)
            return
        held = self.W + self.O * recomputed
        walk.alloc(self.S, held)
        self._in_chunks(walk, *((read,) if self.serial else (self.O, read)), added=True)
        walk.free(held)

    def _norm(self, walk: Walk) -> None:
        """Walk a norm of the residual stream."""
        walk.alloc(self.statistics)
        if self.spec.norm == "rms":
            self._wide_norm(walk, self.own_tokens * self.spec.hidden)
        walk.alloc(self.S)

    def _wide_norm(self, walk: Walk, elements: Column) -> None:
        """Walk the fp32 temporaries of an RMSNorm over `elements` elements of a narrower dtype."""
        if self.e < 4:
            walk.touch(2 * elements * 4)

    def _attention(self, walk: Walk) -> None:
        self._heads(walk)
        if self.repeat != "selective":
            self._core(walk)
        elif not self.sp:
            self._core_without_graph(walk)
            walk.touch(self.O, self.S)

    def _heads(self, walk: Walk) -> None:
        """Walk the products to queries, keys and values, their norms and rotation."""
        Q, K, spec = self.Q, self.K, self.spec
        self._columns(walk, Q, K, K)
        if spec.qk_norm:
            for size, sums, width in ((Q, self.q_sums, spec.q_width), (K, self.k_sums, spec.kv_width)):
                walk.alloc(sums)
                self._wide_norm(walk, self.t * width)
                walk.alloc(size)
        if spec.position == "rotary":
            walk.touch(Q, K)  # rotated, replacing the previous ones

    def _core(self, walk: Walk) -> None:
        if self.core is None:
            walk.alloc(self.Q, self.q_sums)
        else:
            self.core.forward(walk)

    def _core_without_graph(self, walk: Walk) -> None:
        """Walk the core without an autograd graph. All of it is freed, the result too, which callers allocate."""
        core_walk = Walk()
        self._core(core_walk)
        walk.touch(core_walk.highest)

    def backward(self, walk: Walk) -> None:
        """Walk the backward pass. The output's gradient is replaced by the input's, and tensors kept by the forward
        pass are freed; the input is freed in place of the output. With full recomputation, the input and the output's
        gradient outlive the pass."""
        self._mlp_backward(walk)
        S = self.S
        if not self.one_norm:
            walk.touch(normed(self.spec, self.own_tokens, self.e))
            walk.free(self.statistics)
        if self.serial:
            walk.free(S)  # between attention and MLP
            if self.repeat == "full":
                walk.alloc(S)  # the sum of two gradients; one is the output's
            walk.free(S)  # one gradient of two
        self._attention_backward(walk)
        walk.touch(normed(self.spec, self.own_tokens, self.e))
        walk.free(self.statistics)
        if self.repeat == "full" and self.one_norm:
            walk.alloc(S)  # the sum of two gradients; one is the output's
            walk.free(S)
        if self.repeat == "full" and not self.one_norm:
            walk.free(S)  # the output's gradient, with others added to it
        walk.free(2 * S)  # the input; one gradient of two

    def _mlp_backward(self, walk: Walk) -> None:
        S, A = self.S, self.A
        # The second product.
        if self.sp:
            self._product_backward(walk, mlp=True, attention=not self.serial)
        else:
            self._rounded(walk, S, A)
            walk.alloc(A)
            self._weight(walk, self.dW_mlp * self.copied, S, A)
        walk.free(A)  # the input of the second product
        # The activation.
        if self.spec.gated:
            walk.alloc(3 * A)
            walk.free(4 * A)
        else:
            walk.alloc(A)
            walk.free(2 * A)
        # The products that read the MLP's input.
        if self.joint:  # all weight gradients of one input are computed while its own gradient is reduced
            self._columns_backward(walk, *[(A, self.dW_mlp)] * self.products)
            self._read(walk)
            return
        for _ in range(self.products):
            self._rounded(walk, A, S)
            walk.alloc(S)
            self._weight(walk, self.dW_mlp, A, S)
            walk.free(A)
        self._read(walk)
        if self.spec.gated:
            self._add(walk, self.dW_mlp, self.spec.mlp_bias)

    def _columns_backward(self, walk: Walk, *parts: tuple[Column, int]) -> None:
        """Walk the joint backward pass of products of one input. With sequence parallelism the input is gathered
        again, and its gradient is live for all tokens before it is scattered. `parts`: (bytes of the result's
        gradient, which is freed; bytes of the weight's gradient) of each product."""
        results, weights = [size for size, _ in parts[::-1]], [weight for _, weight in parts]
        if self.sp:
            together = self.G + self.W
            walk.alloc(self.S, together)
            self._in_chunks(walk, *results, added=True)
            self._weights_of_one(walk, *parts[::-1])
            walk.free(together, *results, *weights)
            return
        self._input_gradient(walk, *results)
        for size, weight in parts[::-1]:
            self._weight(walk, weight, size, self.S)
            walk.alloc(weight)
        walk.free(*results, *weights)

    def _input_gradient(self, walk: Walk, *results: Column) -> None:
        """Walk the gradient of an input of products from the gradients of their results, in sequence."""
        self._rounded(walk, results[0], self.S)
        walk.alloc(self.S)
        for size in results[1:]:
            self._rounded(walk, size, self.S)

    def _product_backward(self, walk: Walk, mlp: bool, attention: bool) -> None:
        """Walk the backward pass of products added to the stream, with sequence parallelism: the MLP's second
        product, attention's, or both where one sum has both. In that case attention's gradients wait for their turn:
        the weight's, and the result's or, where the core was recomputed, the gradients of queries, keys and
        values."""
        walk.alloc(self.G)
        recomputed = attention and self.repeat == "selective"
        if recomputed:
            self._core_recompute(walk)
        walk.alloc(self.A * mlp + self.O * attention)
        parts = ((self.O, self.dW_o),) * attention + ((self.A, self.dW_mlp),) * mlp
        self._in_chunks(walk, *(size for size, _ in parts))
        self._weights_of_one(walk, *parts)
        walk.free(self.G)
        if recomputed:
            self._core_backward(walk)
            walk.masked = walk.highest
        if attention and self.result_copied:
            walk.free(self.O)
        walk.free(self.dW_mlp * mlp)

    def _read(self, walk: Walk) -> None:
        """Free a norm's result after the gradients of all products that read it, unless attention and MLP share the
        norm."""
        if not self.one_norm:
            walk.free(self.S)

    def _add(self, walk: Walk, weight: Column, bias: bool) -> None:
        """Sum two gradients of one tensor, while the weight's gradient is still live. With a bias, torch flattens the
        input, and the weight's gradient is freed first, unless the product is of a narrow format."""
        walk.alloc(self.S)
        walk.touch(0 if bias and not self.operand_bytes else weight)
        walk.free(2 * self.S)

    def _core_recompute(self, walk: Walk) -> None:
        """Recompute the core from queries, keys and values, which outlive it."""
        self._core(walk)
        if self.ulysses:
            walk.alloc(self.Q + 2 * self.K)  # which Ulysses would otherwise have freed

    def _core_backward(self, walk: Walk) -> None:
        """Walk the core's backward pass: the result's gradient is replaced by the gradients of queries, keys and
        values."""
        Q, K = self.Q, self.K
        if self.core is None:
            walk.alloc(Q, K, K)
            walk.free(Q)
            walk.free(2 * Q + 2 * K + self.q_sums)
            return
        self.core.backward(walk)
        if self.repeat == "selective" and self.ulysses:
            walk.free(Q + 2 * K)

    def _rotated(self, walk: Walk, size: Column) -> None:
        """Walk the rotation of the last gradients of `size` bytes: the angles outlive the masks until then."""
        walk.touch(size)
        walk.masked = np.maximum(walk.masked, walk.highest - self.mask)

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
                self._core_recompute(walk)
            self._rounded(walk, S, self.O)
            walk.alloc(self.O)
            self._weight(walk, self.dW_o * self.copied, S, self.O)
            if self.result_copied:
                walk.free(self.O)
        if self.repeat == "none" or (self.sp and selective):
            walk.free(added)  # the output's gradient, to which that of the MLP's norm was added
        if not (self.sp and selective):
            self._core_backward(walk)
            walk.masked = walk.highest
        if selective and not self.sp:
            walk.free(added)
        self._heads_backward(walk)

    def _heads_backward(self, walk: Walk) -> None:
        """Walk from the gradients of queries, keys and values to that of the norm's result, which replaces them."""
        Q, K, spec = self.Q, self.K, self.spec
        if spec.position == "rotary":
            self._rotated(walk, Q)
        if spec.qk_norm:
            for size, sums, heads in ((K, self.k_sums, spec.kv_heads), (Q, self.q_sums, spec.heads)):
                walk.touch(rms_temporaries(self.t * heads, spec.head_dim, self.e))
                walk.free(size, sums)
        bias = spec.qkv_bias
        self._heads_input(walk, *((size, weight, bias) for size, weight in self._heads_parts))

    @property
    def _heads_parts(self) -> tuple[tuple[Column, int], ...]:
        """(Bytes of the result, bytes of the weight) of the products that read the norm's result, last one first."""
        return (self.K, self.dW_k), (self.K, self.dW_k), (self.Q, self.dW_q)

    def _heads_input(self, walk: Walk, *parts: tuple[Column, int, bool]) -> None:
        """Walk the backward pass of products that read the norm's result, last one first. `parts`: (bytes of the
        result's gradient, which is freed; bytes of the weight's gradient; whether there is a bias) of each
        product."""
        S = self.S
        if self.joint:
            self._columns_backward(walk, *((size, weight) for size, weight, _ in parts))
            walk.free(S)
            if self.one_norm:
                self._add(walk, 0, bias=True)
            return
        for i, (size, weight, bias) in enumerate(parts):
            self._rounded(walk, size, S)
            walk.alloc(S)
            self._weight(walk, weight, size, S)
            walk.free(size)
            if i == len(parts) - 1:
                walk.free(S)  # the norm's result, after its last use
            if i or self.one_norm:
                self._add(walk, weight, bias)
