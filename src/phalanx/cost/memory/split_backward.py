"""Live bytes along the passes of a block whose layers can defer weight gradients, in the order of nn/decoder.py and
runtime/autograd/deferred_weight_grads.py: backward passes split in two, I and W, and undivided ones, B.

Tensors needed by W stay live after I: the input and the output's gradient of each matrix product. Gradients of norms'
weights, which are small, are computed in I.
"""

from __future__ import annotations

from typing import Any

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.block import Block
from phalanx.cost.memory.live_bytes import Parts, Pass, Walk, normed, rms_temporaries, statistics
from phalanx.spec.model.spec import ModelSpec


class SplitBlock(Block):
    """The tensors of a block whose layers can defer weight gradients. All products of one input have their backward
    pass together, on one rank too. `in_place`: gradient memory has the products' dtype, so they write straight into
    it, unless they are of a narrow format."""

    def __init__(self, *args: Any, in_place: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.joint = True
        self.copied = int(not in_place or self.operands is not None)

    def parts(self) -> Parts:
        """Return the backward pass split in I and W."""
        inputs, weights = Walk(), Walk()
        if self.repeat == "full":
            self.rounds_weights = int(not self.gathered)
            self.forward(inputs, output=False)
            self.rounds_weights = 1
        self._inputs(inputs)
        self._weights(weights)
        biases = self._biases()
        inputs.alloc(biases)
        weights.free(biases)
        if self.repeat == "full":
            inputs.masked = inputs.highest
        return Parts(Pass.of(inputs), Pass.of(weights))

    def _inputs(self, walk: Walk) -> None:
        """Walk I, in the order of `backward`. A gradient that W or a recomputed pass needs is not accumulated in
        place."""
        S = self.S
        self._mlp_inputs(walk)
        if not self.one_norm:
            self._norm_inputs(walk)
        if self.serial:
            walk.free(S)  # between attention and MLP
        if not self.one_norm:
            self._added(walk, held=self._output_grad_kept or self.repeat == "full")
        self._attention_inputs(walk)
        if self.one_norm:
            self._add(walk, 0, bias=True)
        self._norm_inputs(walk)
        if self.serial:
            self._added(walk, held=not self.sp)
        elif self.one_norm:
            self._added(walk, held=not self.sp or self.repeat == "full")
        else:
            walk.free(S)
        if self.repeat == "full" and not self._output_grad_kept:
            walk.free(S)  # the gradient of the output
        walk.free(S)  # the input

    @property
    def _output_grad_kept(self) -> bool:
        """Whether W needs the output's gradient."""
        return not self.sp

    def _added(self, walk: Walk, held: bool) -> None:
        """Sum two gradients; the first stays live if `held`."""
        walk.touch(self.S * held)
        walk.free(self.S * (not held))

    def _biases(self) -> int:
        """Return bytes of gradients of biases that are added to the stream; with sequence parallelism I computes
        them."""
        biased = self.spec.out_bias + self.spec.mlp_bias
        return (biased if self.serial else min(biased, 1)) * self.spec.hidden * self.e * self.sp

    def _norm_inputs(self, walk: Walk) -> None:
        walk.alloc(norm_weights(self.spec, self.e))
        walk.touch(normed(self.spec, self.own_tokens, self.e))
        walk.free(self.statistics)

    def _mlp_inputs(self, walk: Walk) -> None:
        A = self.A
        if self.sp:
            self._product_inputs(walk, self.A, attention=not self.serial)
        else:
            self._rounded(walk, self.S, A)
            walk.alloc(A)
        if self.spec.gated:
            walk.alloc(3 * A)
            walk.free(4 * A)
        else:
            walk.alloc(A)
            walk.free(2 * A)
        self._columns_inputs(walk, *[A] * self.products)

    def _columns_inputs(self, walk: Walk, *results: Column) -> None:
        """Walk I of products of one input, whose results' gradients have `results` bytes."""
        if not self.sp:
            self._input_gradient(walk, *results)
            return
        walk.alloc(self.S, self.W)
        self._in_chunks(walk, *results, added=True)
        walk.free(self.W)

    def _product_inputs(self, walk: Walk, mlp: Column, attention: bool) -> None:
        """Walk I of the products of one sum, with sequence parallelism."""
        walk.alloc(self.G)
        recomputed = attention and self.repeat == "selective"
        if recomputed:
            self._core_recompute(walk)
        walk.alloc(mlp, self.O * attention)
        self._in_chunks(walk, mlp, self.O * attention)
        if recomputed:
            self._core_inputs(walk)

    def _core_inputs(self, walk: Walk) -> None:
        self._core_backward(walk)
        walk.masked = walk.highest
        if not self.result_copied:
            walk.alloc(self.Q)  # the core's result, which the projection read

    def _attention_inputs(self, walk: Walk) -> None:
        selective = self.repeat == "selective"
        if self.sp and self.serial:
            self._product_inputs(walk, 0, attention=True)
        elif not self.sp:
            if selective:
                self._core_recompute(walk)
            self._rounded(walk, self.S, self.O)
            walk.alloc(self.O)
        if not (self.sp and selective):
            self._core_inputs(walk)
        self._heads_inputs(walk)
        self._columns_inputs(walk, *(size for size, _ in self._heads_parts[::-1]))

    def _heads_inputs(self, walk: Walk) -> None:
        Q, K, spec = self.Q, self.K, self.spec
        if spec.position == "rotary":
            self._rotated(walk, Q)
        if spec.qk_norm:
            for size, sums, heads in ((K, self.k_sums, spec.kv_heads), (Q, self.q_sums, spec.heads)):
                walk.alloc(spec.head_dim * self.e)
                walk.touch(rms_temporaries(self.t * heads, spec.head_dim, self.e))
                walk.free(size, sums)

    def _weights(self, walk: Walk) -> None:
        spec, S = self.spec, self.S
        g = self.G if self.sp else S  # the gradient of what is added to the stream
        self._mlp_weights(walk, g)
        if not self.one_norm:
            walk.free(S, norm_weights(spec, self.e))
        self._heads_weights(walk, g)
        walk.free(S, norm_weights(spec, self.e))

    def _mlp_weights(self, walk: Walk, g: Column) -> None:
        self._weight(walk, self.dW_mlp * self.copied, self.W, self.A)
        walk.free(self.A)  # activation
        if self.serial:
            walk.free(g)
        self._columns_weights(walk, *[(self.A, self.dW_mlp)] * self.products)

    def _heads_weights(self, walk: Walk, g: Column) -> None:
        if self.spec.qk_norm:
            walk.free(2 * self.spec.head_dim * self.e)
        self._result_weight(walk, g)
        self._columns_weights(walk, *self._heads_parts)

    def _result_weight(self, walk: Walk, g: Column) -> None:
        self._weight(walk, self.dW_o * self.copied, self.W, self.O)
        walk.free(self.O, g)

    def _columns_weights(self, walk: Walk, *parts: tuple[Column, int]) -> None:
        """Walk W of products that read one input. `parts`: (bytes of the result's gradient, bytes of the weight's
        gradient)."""
        if self.sp:
            walk.alloc(self.G)
            self._weights_of_one(walk, *parts[::-1])
            walk.free(self.G, *(n for part in parts for n in part))
            return
        self._one_by_one(walk, *parts)

    def _columns_backward(self, walk: Walk, *parts: tuple[Column, int]) -> None:
        if self.tp > 1:
            super()._columns_backward(walk, *parts)
            return
        self._input_gradient(walk, *(size for size, _ in parts[::-1]))
        self._one_by_one(walk, *parts)

    def _heads_input(self, walk: Walk, *parts: tuple[Column, int, bool]) -> None:
        if self.tp > 1 or not self.one_norm:
            super()._heads_input(walk, *parts)
            return
        # The engine makes the products when it takes their gradients: by then autograd has added the gradient of the
        # norm's result to the MLP's, and the products still hold that result.
        self._input_gradient(walk, *(size for size, _, _ in parts[::-1]))
        self._add(walk, 0, bias=True)
        self._one_by_one(walk, *((size, weight) for size, weight, _ in parts))
        walk.free(self.S)

    def _one_by_one(self, walk: Walk, *parts: tuple[Column, int]) -> None:
        """Walk computing weight gradients one by one, each when it is needed."""
        for size, weight in parts:
            self._weight(walk, weight * self.copied, size, self.W)
            walk.free(size)


def embed(
    spec: ModelSpec,
    t: Column,
    own_tokens: Column,
    e: int,
    placed: int,
    tp: int,
    sp: bool,
    index: Column,
    rows: Column | None,
    ids: Column,
) -> Parts:
    """Return the split backward pass of the embedding, in bytes. Its input needs no gradient, so I keeps the incoming
    one. `placed`: bytes per element of gradient memory. `index`: bytes of token ids, where they are copied. `rows`:
    rows of the position embedding's gradient where it is summed over sequences, else None. `ids`: bytes of position
    ids that the forward pass keeps."""
    inputs, weights, h = Walk(), Walk(), spec.hidden
    wider = h * placed if placed != e else 0
    if spec.position == "learned":
        if rows is not None:
            inputs.alloc(rows * h * e)
            weights.touch(rows * wider)
        else:
            weights.touch(index * (not sp) + own_tokens * wider)
        weights.free((0 if rows is None else rows * h * e) + ids)
    if tp > 1:
        lookup = t * h * e  # rows of tokens that this rank has, else zeros
        weights.touch(lookup + t * 9)
        weights.touch(lookup + t * 8 + t * wider)
    else:
        weights.touch(index + t * wider)
    weights.free(own_tokens * h * e)
    return Parts(Pass.of(inputs), Pass.of(weights))


def head(
    spec: ModelSpec, t: Column, own_tokens: Column, e: int, stream: Column, together: Column, weight: int
) -> Parts:
    """Return the split backward pass of the head, in bytes. The gradient of the logits reuses their memory. `weight`:
    bytes of the projection's weight gradient before it is written to gradient memory; 0 if it is computed there."""
    logits = t * spec.vocab * e
    inputs, weights = Walk(), Walk()
    inputs.alloc(stream)
    inputs.touch(together)
    inputs.alloc(norm_weights(spec, e))
    inputs.touch(normed(spec, own_tokens, e))
    inputs.free(statistics(spec, own_tokens, e) + stream)
    weights.alloc(together)
    weights.touch(weight)
    weights.free(together)
    weights.free(logits + stream + norm_weights(spec, e))
    return Parts(Pass.of(inputs), Pass.of(weights))


def norm_weights(spec: ModelSpec, e: int) -> int:
    """Return bytes of the weight gradients of a norm of the residual stream."""
    parts = 2 if spec.norm == "layer" and spec.norm_bias else 1
    return parts * spec.hidden * e
