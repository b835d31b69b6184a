"""Live bytes of routing and of experts along a sublayer's passes, in the order of the autograd functions of
nn/experts/moe.py, which lay out rows, exchange them and run all experts of a rank."""

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.live_bytes import Walk
from phalanx.cost.memory.pass_sizes import PassSizes
from phalanx.schedule.layers.routing import round_up_rows


class ExpertsWalk:
    """The tensors of a router, of rows and of experts, in bytes.

    N (own tokens, hidden)   the tokens that the rank routes    P (own tokens, count)   scores, in fp32 or fp64
    R (rows, hidden)         their rows, each once              I (own tokens, width)   8 bytes for each choice
    D (rows, hidden)         the rows as sent, with copies      w (own tokens, width)   routing weights, typed as P
    C (received, hidden)     the rows that are received         F (received, ffn)       inside the local experts
    Z (own tokens, count)    the router's logits
    """

    def __init__(self, p: PassSizes, shared: bool) -> None:
        x, rows, h, e = p.experts, p.rows, p.hidden, p.e
        assert x is not None
        assert rows is not None
        self.p, self.x, self.rows, self.shared = p, x, rows, shared
        self.chosen = x.chooser == "tokens"
        width = x.top_k if self.chosen else x.count
        self.N, self.R, self.C = (n * h * e for n in (rows.tokens, rows.rows, rows.received))
        self.D, self.F = self.R * rows.copies, rows.received * x.ffn * e
        self.P, self.Z = rows.tokens * x.count * p.wide, rows.tokens * x.count * e
        self.n_w, self.w, self.I = (rows.tokens * width * b for b in (1, p.wide, 8))
        self.dW_expert, self.dW_experts, self.dW_router = x.ffn * h * e, x.here * x.ffn * h * e, x.count * h * e
        self.sent = rows.copies > 1 or x.here < x.count
        """Whether rows are sent, because some experts are on other ranks."""
        # Rounded operands of one expert's weight gradients in products of a narrow format.
        self.both = 0
        if p.operands is not None:
            self.both = round_up_rows(rows.most, p.operands.multiple) * (h + x.ffn) * p.operand_bytes + self.dW_expert
        laid_out = self.sent and x.here > 1
        self.in_order, self.order = self.C * laid_out, rows.received * 8 * laid_out
        """Bytes of received rows, sorted by expert; and of their order."""
        self.z_sums = rows.tokens * p.wide if x.z_loss else 0
        self.choices = rows.tokens * x.top_k * self.chosen
        self.kept_choice = self.choices * 8 + self.P * (1 + bool(x.balance_loss)) + self.z_sums
        self.copied_rows = self.D if rows.copies > 1 else 0

    # Forward.

    def choose(self, walk: Walk, graph: bool) -> None:
        """Walk from the router's logits to the rows' destinations and weights."""
        p, x, P, ids = self.p, self.x, self.P, self.I
        cast = P if p.e < p.wide else 0
        walk.alloc(cast)
        walk.alloc(P)
        walk.free(cast)
        # Choices, and the order of rows by expert.
        if self.chosen:
            best = self.choices * (p.wide + 8)
            walk.touch(best + P * (x.balance_bias is not None) + P * 2 * (x.groups > 1))
            walk.alloc(self.choices * 8)
            walk.alloc(P * bool(x.balance_loss))
        key = 0 if self.chosen and x.capacity is None else ids
        walk.alloc(key)
        walk.touch(2 * ids)
        walk.alloc(ids)  # slots
        # Losses and weights.
        walk.touch(2 * P * bool(x.balance_loss or x.z_loss))
        walk.alloc(self.z_sums)
        walk.touch(3 * self.w)
        walk.alloc(self.w)
        if self.chosen:
            walk.alloc(ids)  # places
            walk.touch(ids)
        walk.alloc(self.order)
        walk.touch(2 * self.order)
        walk.free(self.Z + key)
        walk.free(self.kept_choice * (not graph))

    def dispatch(self, walk: Walk) -> None:
        """Walk the layout of rows and their exchange."""
        walk.alloc(self.rows.rows * 8)
        walk.alloc(self.R)
        walk.free(self.rows.rows * 8)
        if self.rows.copies > 1:
            walk.alloc(self.D)
            walk.free(self.R)
        walk.alloc(self.C * self.sent)

    def run(self, walk: Walk, graph: bool) -> None:
        """Walk the local experts, from the sort of received rows to the return of results, which replace the rows."""
        if self.sent:
            walk.free(self.D)
            walk.touch(self.in_order)
        walk.alloc(2 * self.F)
        walk.touch(self._into(not self.p.gathered))
        walk.alloc(self.F)
        walk.alloc(self.C)
        walk.touch(self._out_of(not self.p.gathered))
        walk.free(self.F if graph else 3 * self.F + self.C)  # its inputs too
        if self.sent:
            walk.alloc(self.in_order)
            walk.alloc(self.D)
            walk.free(self.in_order)
            walk.free(self.C)

    def combine(self, walk: Walk, graph: bool) -> None:
        """Walk the weighted sum of each token's results."""
        cast = self.n_w * self.p.e if self.p.e < self.p.wide else 0
        walk.alloc(cast)
        walk.alloc(self.copied_rows)  # in order
        walk.alloc(self.N)
        self._sum_rows(walk, weighted=True)
        walk.free(self.copied_rows)
        walk.free(cast)
        walk.free((self.D + self.w + self.I * (1 + self.chosen) + self.order) * (not graph))

    def complete(self, walk: Walk) -> None:
        """Walk from the routed tokens' sums to all tokens' sums, with the shared expert's result, which with sequence
        parallelism is computed here."""
        p = self.p
        if p.sp:
            walk.alloc(p.stream * self.shared)
            walk.free(2 * p.stream * self.shared)
            return
        if p.tp > 1:
            walk.alloc(p.stream)
            walk.free(self.N)
        if self.shared:
            walk.alloc(p.stream)
            walk.free(2 * p.stream)

    # Backward.

    def combine_backward(self, walk: Walk) -> None:
        """Walk to the gradients of the experts' results and of routing weights; the results are freed."""
        R, e = self.R, self.p.e
        walk.touch(self.rows.rows * 8 + R)
        walk.alloc(R)
        walk.alloc(self.copied_rows)
        walk.touch(R + self.rows.rows * e)
        walk.alloc(self.w)
        walk.free(self.copied_rows)
        if self.rows.copies > 1:
            walk.alloc(self.D)
            walk.free(R)
        walk.free(self.D)
        walk.free(self.w)  # one of two: the weights themselves
        if self.sent:
            walk.alloc(self.C)
            walk.touch(self.in_order)
            walk.free(self.D)

    def run_backward(self, walk: Walk, whole: bool) -> None:
        """Walk the experts' backward pass, or with not `whole` its part I, and the return of the received rows'
        gradient. Activations are computed again."""
        C, F, dW = self.C, self.F, self.dW_experts
        at_once = whole and not self.p.defers
        walk.alloc(F)
        walk.touch(self._into())
        walk.alloc(3 * F)
        walk.free(F)
        if at_once:
            walk.alloc(dW)
            walk.touch(self.both)
            walk.free(F)
        walk.alloc(C)
        walk.touch(self._out_of() + self.rows.most * self.p.hidden * self.p.e * (self.p.operands is not None))
        if at_once:
            walk.alloc(2 * dW)
            walk.touch(self.both)
            walk.free(3 * dW + 4 * F + 2 * C)  # gate, up, the received rows, the gradient of the results
        else:
            walk.free(2 * F)
            if whole:
                self.weights(walk)
        if self.sent:
            walk.alloc(self.in_order)
            walk.alloc(self.D)
            walk.free(self.in_order)

    def weights(self, walk: Walk) -> None:
        """Walk the weight gradients of layers that can defer them: each product keeps its operands, expert by
        expert."""
        for size in (self.C + self.F, self.F, self.F + self.C):  # down, up, gate
            walk.touch(self.both if self.p.operands else self.dW_expert * self.p.copied)
            walk.free(size)

    def dispatch_backward(self, walk: Walk) -> None:
        """Walk to the routed tokens' part of the gradient."""
        walk.free(self.C * self.sent)  # rows that have been sent
        walk.alloc(self.copied_rows)
        walk.alloc(self.N)
        self._sum_rows(walk, weighted=False)
        walk.free(self.copied_rows)
        walk.free(self.D)

    def choose_backward(self, walk: Walk) -> None:
        """Walk from the gradient of routing weights to that of the router's logits."""
        if self.shared and self.p.sp:  # the shared expert has given the tokens a gradient already
            walk.touch(self.N)
            walk.free(self.N)
        cast = self.Z if self.p.e < self.p.wide else 0
        walk.touch(2 * self.w + (3 + bool(self.x.balance_loss)) * self.P)
        walk.alloc(self.P)
        walk.alloc(cast)
        walk.free(self.P * (cast > 0))
        walk.free(self.w + self.kept_choice)
        walk.free(self.I * (1 + self.chosen) + self.order)

    def router_backward(self, walk: Walk, whole: bool) -> None:
        """Walk from the gradient of logits to that of the norm's result."""
        p, weight = self.p, self.dW_router * self.p.copied
        walk.alloc(weight)
        walk.touch(2 * self.N)  # from the router, and the sum
        walk.free(self.Z, weight)
        if p.tp > 1 and not p.sp:
            walk.alloc(p.stream)
            walk.free(self.N)
        if self.shared and not p.sp:
            walk.touch(p.stream)
            walk.free(p.stream)
        walk.free(p.stream * whole)  # the norm's result
        walk.alloc(self.Z * (not whole))  # kept for W

    def router_weights(self, walk: Walk) -> None:
        """Walk W of the router."""
        walk.touch(self.dW_router * self.p.copied)
        walk.free(self.Z)

    def _sum_rows(self, walk: Walk, weighted: bool) -> None:
        """Walk the sum of each token's rows."""
        if self.chosen:
            walk.touch(np.minimum(self.x.top_k * self.rows.copies, 2) * self.N)
        else:
            walk.touch(self.rows.rows * (8 + 8 * weighted + self.p.e * weighted) + self.R * weighted)

    def _into(self, weights: bool = True) -> Column:
        """Return the bytes of rounded operands of narrow products into an expert's width."""
        return self._rounded(self.p.hidden, weights)

    def _out_of(self, weights: bool = True) -> Column:
        """Return the bytes of rounded operands of narrow products out of an expert's width."""
        return self._rounded(self.x.ffn, weights)

    def _rounded(self, width: int, weights: bool) -> Column:
        """Return the bytes of rounded rows of this width, and with `weights` of a matrix."""
        return (self.rows.most * width + self.x.ffn * self.p.hidden * weights) * self.p.operand_bytes
