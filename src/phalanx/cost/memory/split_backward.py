"""Live bytes along the passes of a block whose layers may put gradients of weights off, in the order of nn/decoder.py
and runtime/weight_gradients.py: backward passes in two parts, I and W, and those in one, B.

What W needs stays after I: of each matrix product its input and the gradient of its output. Norms' own gradients,
which are small, are made in I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.block import Block
from phalanx.cost.memory.live_bytes import Walk, normed, rms_temporaries, statistics
from phalanx.spec.model.spec import ModelSpec


@dataclass(frozen=True)
class Pass:
    """Live bytes above those when it begins: the most there are, and those in the end. `masked`: the most until masks
    are not needed any more."""

    highest: Column
    change: Column
    masked: Column = 0

    @classmethod
    def of(cls, walk: Walk) -> Pass:
        return cls(walk.highest, walk.live, walk.masked)


@dataclass(frozen=True)
class Parts:
    """A backward pass in two. The gradient of the output is live when I begins, that of the input when it ends."""

    inputs: Pass
    weights: Pass


class SplitBlock(Block):
    """The same tensors; on one rank too, all products of one input have their backward pass together. `in_place`:
    gradients are put into memory of their own type, where products are made right there."""

    def __init__(self, *given: Any, in_place: bool, **named: Any) -> None:
        super().__init__(*given, **named)
        self.joint = True
        self.made = int(not in_place)

    def parts(self) -> Parts:
        inputs, weights = Walk(), Walk()
        if self.repeat == "full":
            self.forward(inputs, made=False)
        self._inputs(inputs)
        self._weights(weights)
        biases = self._biases()
        inputs.alloc(biases)
        weights.free(biases)
        if self.repeat == "full":
            inputs.masked = inputs.highest
        return Parts(Pass.of(inputs), Pass.of(weights))

    def _inputs(self, walk: Walk) -> None:
        """As `backward`. A gradient that W needs, or whoever repeats the pass, is not added to in its place."""
        S = self.S
        self._mlp_inputs(walk)
        if not self.one_norm:
            self._norm_inputs(walk)
        if self.serial:
            walk.free(S)  # between attention and MLP
        if not self.one_norm:
            self._added(walk, held=self._output_left or self.repeat == "full")
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
        if self.repeat == "full" and not self._output_left:
            walk.free(S)  # the gradient of the output
        walk.free(S)  # the input

    @property
    def _output_left(self) -> bool:
        """Whether W needs the gradient of the output."""
        return not self.sp

    def _added(self, walk: Walk, held: bool) -> None:
        """A gradient, `held` or not, and another one become their sum."""
        walk.touch(self.S * held)
        walk.free(self.S * (not held))

    def _biases(self) -> int:
        """The gradients of those that are added to the stream, which with sequence parallelism are made in I."""
        biased = self.spec.out_bias + self.spec.mlp_bias
        return (biased if self.serial else min(biased, 1)) * self.spec.hidden * self.e * self.sp

    def _norm_inputs(self, walk: Walk) -> None:
        walk.alloc(norm_weights(self.spec, self.e))
        walk.touch(normed(self.spec, self.own, self.e))
        walk.free(self.statistics)

    def _mlp_inputs(self, walk: Walk) -> None:
        A = self.A
        if self.sp:
            self._product_inputs(walk, self.A, attention=not self.serial)
        else:
            walk.alloc(A)
        if self.spec.gated:
            walk.alloc(3 * A)
            walk.free(4 * A)
        else:
            walk.alloc(A)
            walk.free(2 * A)
        self._columns_inputs(walk)

    def _columns_inputs(self, walk: Walk) -> None:
        walk.alloc(self.S)
        walk.touch(self.W if self.sp else 0)

    def _product_inputs(self, walk: Walk, mlp: Column, attention: bool) -> None:
        """With sequence parallelism, of what is of one sum."""
        walk.alloc(self.W)
        again = attention and self.repeat == "selective"
        if again:
            self._core_again(walk)
        walk.alloc(mlp, self.O * attention)
        if again:
            self._core_inputs(walk)

    def _core_inputs(self, walk: Walk) -> None:
        self._core_backward(walk)
        walk.masked = walk.highest
        if not self.apart:
            walk.alloc(self.Q)  # the core's result, which the projection has read

    def _attention_inputs(self, walk: Walk) -> None:
        selective = self.repeat == "selective"
        if self.sp and self.serial:
            self._product_inputs(walk, 0, attention=True)
        elif not self.sp:
            if selective:
                self._core_again(walk)
            walk.alloc(self.O)
        if not (self.sp and selective):
            self._core_inputs(walk)
        self._heads_inputs(walk)
        self._columns_inputs(walk)

    def _heads_inputs(self, walk: Walk) -> None:
        Q, K, spec = self.Q, self.K, self.spec
        if spec.position == "rotary":
            walk.touch(Q)
        if spec.qk_norm:
            for size, sums, heads in ((K, self.k_sums, spec.kv_heads), (Q, self.q_sums, spec.heads)):
                walk.alloc(spec.head_dim * self.e)
                walk.touch(rms_temporaries(self.t * heads, spec.head_dim, self.e))
                walk.free(size, sums)

    def _weights(self, walk: Walk) -> None:
        spec, S = self.spec, self.S
        g = self.W if self.sp else S  # of what is added to the stream
        self._mlp_weights(walk, g)
        if not self.one_norm:
            walk.free(S, norm_weights(spec, self.e))
        self._heads_weights(walk, g)
        walk.free(S, norm_weights(spec, self.e))

    def _mlp_weights(self, walk: Walk, g: Column) -> None:
        walk.touch(self.dW_mlp * self.made)
        walk.free(self.A)  # activated
        if self.serial:
            walk.free(g)
        self._columns_weights(walk, *[(self.A, self.dW_mlp)] * self.products)

    def _heads_weights(self, walk: Walk, g: Column) -> None:
        Q, K = self.Q, self.K
        if self.spec.qk_norm:
            walk.free(2 * self.spec.head_dim * self.e)
        self._result_weight(walk, g)
        self._columns_weights(walk, (K, self.dW_k), (K, self.dW_k), (Q, self.dW_q))

    def _result_weight(self, walk: Walk, g: Column) -> None:
        walk.touch(self.dW_o * self.made)
        walk.free(self.O, g)

    def _columns_weights(self, walk: Walk, *parts: tuple[Column, int]) -> None:
        """Of products that read one input: the gradients of their results, and the weights'."""
        if self.sp:
            walk.touch(self.W + sum(weight for _, weight in parts))
            walk.free(*(size for size, _ in parts))
            return
        self._one_by_one(walk, *parts)

    def _columns_backward(self, walk: Walk, *parts: tuple[Column, int]) -> None:
        if self.tp > 1:
            super()._columns_backward(walk, *parts)
            return
        walk.alloc(self.S)
        self._one_by_one(walk, *parts)

    def _one_by_one(self, walk: Walk, *parts: tuple[Column, int]) -> None:
        """Whoever takes the gradients of weights makes each when its turn comes."""
        for size, weight in parts:
            walk.touch(weight * self.made)
            walk.free(size)


def embed(
    spec: ModelSpec,
    t: Column,
    own: Column,
    e: int,
    placed: int,
    tp: int,
    sp: bool,
    index: Column,
    rows: Column | None,
    ids: Column,
) -> Parts:
    """The embedding has no input that wants a gradient: I leaves what came. `placed`: bytes per element where
    gradients are put; `index`: of token ids, where they are copied; `rows`: of the position's gradient where it is
    summed over sequences, else None; `ids`: of positions that a forward pass has made."""
    inputs, weights, h = Walk(), Walk(), spec.hidden
    wider = h * placed if placed != e else 0
    if spec.position == "learned":
        if rows is not None:
            inputs.alloc(rows * h * e)
            weights.touch(rows * wider)
        else:
            weights.touch(index * (not sp) + own * wider)
        weights.free((0 if rows is None else rows * h * e) + ids)
    if tp > 1:
        found = t * h * e  # those of tokens that this rank has, zeros else
        weights.touch(found + t * 9)
        weights.touch(found + t * 8 + t * wider)
    else:
        weights.touch(index + t * wider)
    weights.free(own * h * e)
    return Parts(Pass.of(inputs), Pass.of(weights))


def head(spec: ModelSpec, t: Column, own: Column, e: int, stream: Column, together: Column, weight: int) -> Parts:
    """The gradient of the logits lies in their memory. `weight`: the bytes of that of the projection's, where it has
    any before it is put."""
    logits = t * spec.vocab * e
    inputs, weights = Walk(), Walk()
    inputs.alloc(stream)
    inputs.touch(together)
    inputs.alloc(norm_weights(spec, e))
    inputs.touch(normed(spec, own, e))
    inputs.free(statistics(spec, own, e) + stream)
    weights.alloc(together)
    weights.touch(weight)
    weights.free(together)
    weights.free(logits + stream + norm_weights(spec, e))
    return Parts(Pass.of(inputs), Pass.of(weights))


def norm_weights(spec: ModelSpec, e: int) -> int:
    """The gradients of a norm of the stream."""
    parts = 2 if spec.norm == "layer" and spec.norm_bias else 1
    return parts * spec.hidden * e
