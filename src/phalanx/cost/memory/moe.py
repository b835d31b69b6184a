"""Live bytes along the passes of a block with experts in place of its MLP, in the order of nn/moe.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.cost.compute.work import Column
from phalanx.cost.memory.block import Block
from phalanx.cost.memory.live_bytes import Walk
from phalanx.cost.memory.split_backward import SplitBlock
from phalanx.schedule.layers.routing import Routed, padded

if TYPE_CHECKING:
    from phalanx.spec.model.mechanisms import Experts


class _Mixture(Block):
    """The tensors of experts and their rows, in bytes; the rest as in Block, where A refers to the MLP that all
    tokens share.

    N (own tokens, hidden)   the tokens that the rank routes       P (own tokens, count)   scores, in fp32 or fp64
    R (rows, hidden)         their rows, each once                 I (own tokens, width)   8 bytes for each choice
    D (rows, hidden)         the rows when sent             w (own tokens, width)   routing weights, as scores
    C (received, hidden)     the rows that are received            F (received, ffn)       inside the local experts
    """

    def __init__(self, *args: Any, rows: Routed, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.spec.experts is not None
        x: Experts = self.spec.experts
        h, e, wide = self.spec.hidden, self.e, max(self.e, 4)
        self.x, self.rows, self.wide = x, rows, wide
        self.chosen = x.chooser == "tokens"
        width = x.top_k if self.chosen else x.count
        self.N, self.R, self.C = (n * h * e for n in (rows.tokens, rows.rows, rows.received))
        self.D, self.F = self.R * rows.copies, rows.received * x.ffn * e
        self.P, self.Z = rows.tokens * x.count * wide, rows.tokens * x.count * e
        self.n_w, self.w, self.I = (rows.tokens * width * b for b in (1, wide, 8))
        self.shared = x.shared_ffn > 0
        self.A, self.dW_mlp = self.t * x.shared_ffn * e, x.shared_ffn * h * e
        self.dW_expert, self.dW_experts = x.ffn * h * e, x.here * x.ffn * h * e
        self.dW_router = x.count * h * e
        self.all_local = rows.copies == 1 and x.here == x.count
        """All experts are on this rank, so no rows are sent."""
        # Rounded operands of one expert's weight gradients in products of a narrow format.
        self.both = 0
        if self.operands is not None:
            numbers = padded(rows.most, self.operands.multiple) * (h + x.ffn)
            self.both = numbers * self.operand_bytes + self.dW_expert
        laid_out = not self.all_local and x.here > 1
        self.in_order, self.order = self.C * laid_out, rows.received * 8 * laid_out
        """Bytes of received rows, sorted by expert; and of their order."""
        self.kept_choice = (rows.tokens * x.top_k * 8 if self.chosen else 0) + self.P
        self.kept_choice = (
            self.kept_choice + (rows.tokens * wide if x.z_loss else 0) + (self.P if x.balance_loss else 0)
        )

    @property
    def into(self) -> Column:
        """Bytes of rounded operands of narrow products to an expert's width: rows, and a matrix."""
        return self._rounded_expert(self.spec.hidden)

    @property
    def out_of(self) -> Column:
        """Bytes of rounded operands of narrow products from an expert's width."""
        return self._rounded_expert(self.x.ffn)

    def _rounded_expert(self, width: int) -> Column:
        return (self.rows.most * width + self.x.ffn * self.spec.hidden * self.rounds_weights) * self.operand_bytes

    def _choose(self, walk: Walk, keep: bool) -> None:
        """Walk from the router's product to the destinations of rows. `keep`: keep tensors for the weights' backward
        pass."""
        x, P, ids = self.x, self.P, self.I
        # Logits and scores.
        walk.alloc(self.Z)
        cast = P if self.e < self.wide else 0
        walk.alloc(cast)
        walk.alloc(P)
        walk.free(cast)
        # Choices, and the order of rows by expert.
        even = 0
        if self.chosen:
            best = self.rows.tokens * x.top_k
            walk.touch(best * (self.wide + 8) + P * (x.balance_bias is not None) + P * 2 * (x.groups > 1))
            walk.alloc(best * 8)
            even = P * bool(x.balance_loss)
            walk.alloc(even)
            key = 0 if x.capacity is None else ids
        else:
            key = ids
        walk.alloc(key)
        walk.touch(2 * ids)
        walk.alloc(ids)  # slots
        # Losses and weights.
        walk.touch(2 * P * bool(x.balance_loss or x.z_loss))
        walk.alloc(self.rows.tokens * self.wide if x.z_loss else 0)
        walk.touch(3 * self.w)
        walk.alloc(self.w)
        if self.chosen:
            walk.alloc(ids)  # places
            walk.touch(ids)
        walk.alloc(self.order)
        walk.touch(2 * self.order)
        walk.free(self.Z + key)
        if not keep:
            walk.free(self.kept_choice)

    def _dispatch(self, walk: Walk) -> None:
        """Walk laying out rows and sending them."""
        walk.alloc(self.rows.rows * 8)
        walk.alloc(self.R)
        walk.free(self.rows.rows * 8)
        if self.rows.copies > 1:
            walk.alloc(self.D)
            walk.free(self.R)
        if not self.all_local:
            walk.alloc(self.C)

    def _receive(self, walk: Walk) -> None:
        """Walk sorting received rows by expert."""
        if not self.all_local:
            walk.free(self.D)
            walk.touch(self.in_order)

    def _return(self, walk: Walk) -> None:
        """Walk sending the experts' results back; received rows replace them."""
        if not self.all_local:
            walk.alloc(self.in_order)
            walk.alloc(self.D)
            walk.free(self.in_order)
            walk.free(self.C)

    def _combine(self, walk: Walk) -> None:
        """Walk summing each token's results by routing weight."""
        cast = self.n_w * self.e if self.e < self.wide else 0
        walk.alloc(cast)
        walk.alloc(self.D if self.rows.copies > 1 else 0)  # in order
        walk.alloc(self.N)
        self._sum_rows(walk, weighted=True)
        walk.free(self.D if self.rows.copies > 1 else 0)
        walk.free(cast)

    def _sum_rows(self, walk: Walk, weighted: bool) -> None:
        """Walk adding each token's rows to its sum."""
        if self.chosen:
            walk.touch(np.minimum(self.x.top_k * self.rows.copies, 2) * self.N)
        else:
            walk.touch(self.rows.rows * (8 + 8 * weighted + self.e * weighted) + self.R * weighted)

    def _experts(self, walk: Walk, keep: bool) -> None:
        """Walk the local experts' MLPs."""
        walk.alloc(2 * self.F)
        walk.touch(self.into)
        walk.alloc(self.F)
        walk.alloc(self.C)
        walk.touch(self.out_of)
        walk.free(self.F if keep else 3 * self.F + self.C)  # its inputs too

    def _shared_term(self, walk: Walk) -> None:
        """Walk the first products and activation of the shared MLP."""
        if self.shared:
            self._columns(walk, *[self.A] * self.products)
            walk.alloc(self.A)

    def _mlp(self, walk: Walk, output: bool) -> None:
        S = self.S
        self._choose(walk, keep=True)
        self._dispatch(walk)
        self._shared_term(walk)
        if self.shared and not self.sp:
            self._rounded(walk, self.A * output, S * output)
            walk.alloc(S * output)
        self._receive(walk)
        self._experts(walk, keep=True)
        self._return(walk)
        if not output:
            return
        self._combine(walk)
        self._add_to_stream(walk)
        walk.alloc(S)  # + the residual
        walk.free(S)

    def _add_to_stream(self, walk: Walk) -> None:
        """Walk from the routed tokens' sums to the addition to the stream, with the shared MLP's result."""
        S = self.S
        if self.sp:
            if self.shared:
                walk.alloc(S, self.W)
                self._in_chunks(walk, self.A, added=True)
                walk.free(self.W)
                walk.alloc(S)
                walk.free(2 * S)
            return
        if self.tp > 1:
            walk.alloc(S)
            walk.free(self.N)
        if self.shared:
            walk.alloc(S)
            walk.free(2 * S)

    def _mlp_without_graph(self, walk: Walk) -> None:
        S = self.S
        self._norm(walk)
        walk.free(self.statistics)
        self._choose(walk, keep=False)
        self._dispatch(walk)
        self._shared_term(walk)
        if self.shared:
            walk.free(self.products * self.A)
            if not self.sp:
                self._rounded(walk, self.A, S)
                walk.alloc(S)
                walk.free(self.A)
        self._receive(walk)
        self._experts(walk, keep=False)
        self._return(walk)
        self._combine(walk)
        walk.free(self.D + self.w + self.I + self.I * self.chosen + self.order)
        self._add_to_stream(walk)
        walk.free(S + self.A * (self.shared and self.sp))  # the norm's result
        walk.alloc(S)  # + the residual
        walk.free(2 * S)

    def _mlp_sum_without_graph(self, walk: Walk) -> None:
        self._mlp_without_graph(walk)

    # Backward.

    def _combine_backward(self, walk: Walk) -> None:
        """Walk to the gradients of returned rows and of routing weights; the rows are freed."""
        R, e, copied_rows = self.R, self.e, self.rows.copies > 1
        walk.touch(self.rows.rows * 8 + R)
        walk.alloc(R)
        walk.alloc(self.D if copied_rows else 0)
        walk.touch(R + self.rows.rows * e)
        walk.alloc(self.w)
        walk.free(self.D if copied_rows else 0)
        if copied_rows:
            walk.alloc(self.D)
            walk.free(R)
        walk.free(self.D)
        walk.free(self.w)  # one of two: the weights themselves

    def _return_backward(self, walk: Walk) -> None:
        if not self.all_local:
            walk.alloc(self.C)
            walk.touch(self.in_order)
            walk.free(self.D)

    def _receive_backward(self, walk: Walk) -> None:
        if not self.all_local:
            walk.alloc(self.in_order)
            walk.alloc(self.D)
            walk.free(self.in_order)

    def _dispatch_backward(self, walk: Walk) -> None:
        """Walk to the routed tokens' part of the gradient."""
        if not self.all_local:
            walk.free(self.C)  # rows that have been sent
        walk.alloc(self.D if self.rows.copies > 1 else 0)
        walk.alloc(self.N)
        self._sum_rows(walk, weighted=False)
        walk.free(self.D if self.rows.copies > 1 else 0)
        walk.free(self.D)

    def _weights_backward(self, walk: Walk) -> None:
        """Walk from the gradient of routing weights to that of the router's product."""
        cast = self.Z if self.e < self.wide else 0
        walk.touch(2 * self.w + (3 + bool(self.x.balance_loss)) * self.P)
        walk.alloc(self.P)
        walk.alloc(cast)
        walk.free(self.P * (cast > 0))
        walk.free(self.w + self.kept_choice)

    def _experts_inside(self, walk: Walk) -> None:
        """Walk to the gradients of the gate and up products."""
        walk.alloc(self.F)
        walk.touch(self.into)
        walk.alloc(3 * self.F)
        walk.free(self.F)

    def _received_gradient(self, walk: Walk) -> None:
        """Walk to the gradient of received rows."""
        walk.alloc(self.C)
        walk.touch(self.out_of + self.rows.most * self.spec.hidden * self.e * (self.operands is not None))

    def _mlp_backward(self, walk: Walk) -> None:
        if self.sp and self.shared:
            walk.alloc(self.G)
            walk.alloc(self.A)
            self._in_chunks(walk, self.A)
            self._weights_of_one(walk, (self.A, self.dW_mlp))
            walk.free(self.G)
            walk.free(self.A)
        self._combine_backward(walk)
        self._return_backward(walk)
        self._experts_backward(walk)
        self._receive_backward(walk)
        if self.shared:
            self._shared_backward(walk)
        self._dispatch_backward(walk)
        self._router_backward(walk)
        walk.free(self.S)  # the norm's result

    def _router_backward(self, walk: Walk) -> None:
        """Walk from the gradient of routing weights to that of the norm's result."""
        if self.shared and self.sp:  # the shared MLP has one already
            walk.touch(self.N)
            walk.free(self.N)
        self._weights_backward(walk)
        walk.free(self.I * (1 + self.chosen) + self.order)
        walk.alloc(self.dW_router * self.copied)
        walk.touch(2 * self.N)  # from the router, and the sum
        walk.free(self.Z, self.dW_router * self.copied)
        self._gather_tokens(walk)

    def _gather_tokens(self, walk: Walk) -> None:
        """Walk from the routed tokens' gradient to that of all tokens."""
        if self.tp > 1 and not self.sp:
            walk.alloc(self.S)
            walk.free(self.N)
        if self.shared and not self.sp:
            walk.touch(self.S)
            walk.free(self.S)

    def _experts_backward(self, walk: Walk) -> None:
        raise NotImplementedError

    def _shared_backward(self, walk: Walk) -> None:
        raise NotImplementedError


class ExpertsBlock(_Mixture):
    """A block with experts whose weight gradients are computed in the backward pass."""

    def _experts_backward(self, walk: Walk) -> None:
        C, F, dW = self.C, self.F, self.dW_experts
        self._experts_inside(walk)
        walk.alloc(dW)
        walk.touch(self.both)
        walk.free(F)
        self._received_gradient(walk)
        walk.alloc(2 * dW)
        walk.touch(self.both)
        walk.free(3 * dW + 4 * F + 2 * C)  # also gate, up, the received rows, the gradient of the experts' results

    def _shared_backward(self, walk: Walk) -> None:
        """Walk the shared MLP's backward pass: that of an MLP on one rank, except with sequence parallelism."""
        S, A = self.S, self.A
        if self.sp:
            walk.free(self.dW_mlp)
        else:
            self._rounded(walk, S, A)
            walk.alloc(A)
            self._weight(walk, self.dW_mlp, S, A)
            walk.free(A)
        walk.alloc(3 * A)
        walk.free(4 * A)
        if self.sp:
            self._columns_backward(walk, *[(A, self.dW_mlp)] * self.products)
            return
        for _ in range(self.products):
            self._rounded(walk, A, S)
            walk.alloc(S)
            self._weight(walk, self.dW_mlp, A, S)
            walk.free(A)
        self._add(walk, self.dW_mlp, self.spec.mlp_bias)


class SplitExpertsBlock(_Mixture, SplitBlock):
    """A block with experts whose layers can defer weight gradients: each product keeps its operands, expert by
    expert."""

    def _experts_backward(self, walk: Walk) -> None:
        self._experts_inputs(walk)
        self._experts_weights(walk)

    def _experts_inputs(self, walk: Walk) -> None:
        self._experts_inside(walk)
        self._received_gradient(walk)
        walk.free(2 * self.F)

    def _experts_weights(self, walk: Walk) -> None:
        C, F = self.C, self.F
        for size in (C + F, F, F + C):  # down, up, gate
            walk.touch(self.both if self.operands else self.dW_expert * self.copied)
            walk.free(size)

    def _shared_backward(self, walk: Walk) -> None:
        A, parts = self.A, [(self.A, self.dW_mlp)] * self.products
        if self.sp:
            walk.free(self.dW_mlp)
        else:
            self._rounded(walk, self.S, A)
            walk.alloc(A)
            self._weight(walk, self.dW_mlp * self.copied, self.S, A)
            walk.free(A)
        walk.alloc(3 * A)
        walk.free(4 * A)
        if self.sp:
            self._columns_backward(walk, *parts)
            return
        self._input_gradient(walk, *(size for size, _ in parts))
        self._one_by_one(walk, *parts)

    def _mlp_inputs(self, walk: Walk) -> None:
        A = self.A
        if self.sp and self.shared:
            self._product_inputs(walk, A, attention=False)
        self._combine_backward(walk)
        self._return_backward(walk)
        self._experts_inputs(walk)
        self._receive_backward(walk)
        if self.shared:
            if not self.sp:
                self._rounded(walk, self.S, A)
                walk.alloc(A)
            walk.alloc(3 * A)
            walk.free(4 * A)
            self._columns_inputs(walk, *[A] * self.products)
        self._dispatch_backward(walk)
        self._router_backward(walk)
        walk.alloc(self.Z)  # kept for W

    def _mlp_weights(self, walk: Walk, g: Column) -> None:
        self._experts_weights(walk)
        if self.shared:
            super()._mlp_weights(walk, g)
        walk.touch(self.dW_router * self.copied)
        walk.free(self.Z)

    def _biases(self) -> int:
        biased = self.spec.out_bias + (self.spec.mlp_bias and self.shared)
        return biased * self.spec.hidden * self.e * self.sp

    @property
    def _output_grad_kept(self) -> bool:
        return self.shared and not self.sp
