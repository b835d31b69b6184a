"""Live bytes along the passes of one sublayer, derived from its operators. The particulars of our runtime are in
`_forward` and `_backward`, by operator.

A pass runs operators in order. Each allocates its results and temporaries. With a graph, tensors that an operator
saves live until its backward pass; backward passes run in reverse order. Without one, a tensor lives until the
statement of its last reader ends.

R1  An argument lives until its function returns: the norm's result through the whole sublayer, a latent until keys
    are laid out. Two results of one statement free their inputs together.
R2 to R4 (products.py), R5 (passes.py)
"""

from itertools import pairwise

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory import attention
from phalanx.cost.memory.experts import ExpertsWalk
from phalanx.cost.memory.live_bytes import Walk, rms_temporaries
from phalanx.cost.memory.pass_sizes import PassSizes
from phalanx.cost.memory.products import (
    columns,
    columns_backward,
    columns_weights,
    round_operands,
    weight_gradient,
)
from phalanx.cost.memory.recurrence import RecurrenceWalk, ShortConvWalk
from phalanx.spec.model.blocks.block import Sublayer, products_of
from phalanx.spec.model.blocks.operators import (
    GATED,
    Activate,
    Attend,
    Combine,
    Conv,
    Dispatch,
    Expand,
    Linear,
    Norm,
    Operator,
    Resize,
    Rotary,
    Router,
    Scan,
    Views,
)


class SublayerWalk:
    """The walks of one sublayer's passes. `first`: whether it is the block's first."""

    def __init__(self, s: Sublayer, p: PassSizes, residual: str, first: bool) -> None:
        self.p, self.norm, self.operators, self.first, self.residual = p, s.norm, s.operators, first, residual
        self.made = {y.name: p.bytes_of(y.dim) for op in products_of(s) for y in op.y}
        self.viewed = {y.name: p.bytes_of(y.dim) for op in s.operators if isinstance(op, Views) for y in op.parts}
        self.attend = s.first(Attend)
        self.added = next((op for op in products_of(s) if op.y[0].name == "y" and op.y[0].rows == "own"), None)
        self.experts = ExpertsWalk(p, s.shared) if s.first(Router) is not None else None
        # What runs a recurrence or a short convolution, with all between its sublayer's products.
        self.runs: Operator | None = s.first(Scan) or s.first(Conv)
        of = RecurrenceWalk if s.first(Scan) is not None else ShortConvWalk
        self.past = of(p, s) if self.runs is not None else None
        self.after, self.gate = s.after, next((op for op in s.operators if _gates(op)), None)
        self.late: Column = 0  # gradients that stay in a buffer with others

    # What the walk of the block needs.

    @property
    def frees_normed(self) -> bool:
        """Whether no other sublayer needs the norm's result after it."""
        return self.norm is not None and (self.residual == "serial" or not self.first)

    @property
    def added_size(self) -> Column:
        """Bytes of the input of the product whose result is added to the stream."""
        return self.p.bytes_of(self.added.into) if self.added is not None else 0

    @property
    def added_weight(self) -> int:
        """Bytes of this product's weight gradient."""
        return self.p.weight(self.added) if self.added is not None else 0

    @property
    def read_by_sum(self) -> Column:
        """Bytes of this product's input, if no other operator has saved it."""
        shared = self.attend is not None and self.gate is None and not attention.copies_result(self.p, self.attend)
        return 0 if shared else self.added_size

    @property
    def bias_of_sum(self) -> int:
        """Bytes of the gradient of this product's bias."""
        weights = self.added.weights if self.added is not None else ()
        return sum(w.shape[0].size for w in weights if w.role == "row_bias") * self.p.e

    @property
    def keeps_gradient(self) -> bool:
        """Whether W needs the gradient of the sublayer's result."""
        return self.added is not None and not self.p.sp and self.after is None

    @property
    def repeats(self) -> Attend | None:
        """Attention's core, if only that is recomputed."""
        return self.attend if self.p.repeat == "selective" else None

    # Forward.

    def forward(self, walk: Walk, graph: bool, output: bool) -> None:
        """Walk the forward pass to the sublayer's result, or with sequence parallelism to the input of the product
        that computes it. `output`: whether to compute what only the output needs."""
        p, norm = self.p, self.norm
        if norm is not None:
            self._normed(walk, norm, graph)
        dead: Column = 0
        for op, after in pairwise((*self.operators, None)):
            if (op is self.added and (p.sp or not output)) or (isinstance(op, Combine) and not output):
                continue
            assert op is not None
            dead = dead + self._forward(walk, op, graph)
            if not _one_statement(op, after):
                walk.free(dead * (not graph))
                dead = 0

    def after_forward(self, walk: Walk, graph: bool) -> None:
        """Walk the norm of the sublayer's result, which is kept."""
        if self.after is not None:
            self._normed(walk, self.after, graph)

    def _normed(self, walk: Walk, norm: Norm, graph: bool) -> None:
        """Walk a norm of the stream."""
        p = self.p
        walk.alloc(_statistics(p, norm))
        if norm.kind == "rms":
            _wide_norm(p, walk, p.own_tokens * p.hidden)
        walk.alloc(p.stream)
        walk.free(_statistics(p, norm) * (not graph))

    def _forward(self, walk: Walk, op: Operator, graph: bool) -> Column:
        """Walk an operator; return the bytes of the tensors that are not read any more, to be freed without a
        graph."""
        p = self.p
        if self.experts is not None and _of_experts(op):
            self._experts_forward(walk, self.experts, op, graph)
            return 0
        if self.past is not None and not isinstance(op, Linear):
            if op is self.runs:
                self.past.forward(walk, graph)
            return 0
        match op:
            case Linear() if op.x == "n":
                columns(p, walk, op)
                return 0
            case Linear():
                read, result = p.bytes_of(op.into), p.stream if op is self.added else p.bytes_of(op.y[0].dim)
                round_operands(p, walk, read, result, not p.gathered)
                walk.alloc(result)
                return read
            case Norm():
                walk.alloc(_sums(p, op))
                _wide_norm(p, walk, p.t * op.y.dim.size)
                walk.alloc(p.bytes_of(op.y.dim))
                walk.free(_sums(p, op) * (not graph))
                return self.made[op.x] - self._looked_at(op.x)
            case Rotary() if op.apart:
                walk.alloc(p.bytes_of(op.heads[0]))
                return 0
            case Rotary():
                walk.touch(*(p.bytes_of(dim) for dim in op.heads))  # all before one replaces what it was
                return 0
            case Resize():
                walk.alloc(p.bytes_of(op.y.dim))
                walk.free(self.made[op.x])
                return 0
            case Expand():
                walk.alloc(sum(p.bytes_of(y.dim) for y in op.y))
                walk.free(self.made[op.up] + self._rope + self._looked_at("kv_down") * (not graph))
                return 0
            case Attend():
                return self._attend(walk, op, graph)
            case Activate():
                walk.touch(2 * p.bytes_of(op.y.dim) * _gates(op))  # the sigmoid, and the result
                walk.alloc(p.bytes_of(op.y.dim))
                return len(op.x) * p.bytes_of(op.y.dim)
            case _:  # views
                return 0

    def _attend(self, walk: Walk, op: Attend, graph: bool) -> Column:
        """Walk attention's core; return as `_forward` does."""
        p, (q, k) = self.p, attention.heads(self.p, op)
        if not graph:
            attention.without_graph(p, walk, op)
            walk.alloc(p.bytes_of(op.y.dim))
            return q + 2 * k
        if p.repeat != "selective":
            attention.forward(p, walk, op)
        elif not p.sp:
            attention.without_graph(p, walk, op)
            walk.touch(p.bytes_of(op.y.dim), p.stream)
        return 0

    def _looked_at(self, name: str) -> Column:
        """Return the bytes of a tensor that a view keeps until keys are laid out: a latent whose last part has no
        rotary positions; else 0."""
        return self.made[name] if name in self.viewed and not self._rope else 0

    @property
    def _rope(self) -> Column:
        """Bytes of the rotated part of a latent."""
        return sum(self.p.bytes_of(op.heads[0]) for op in self.operators if isinstance(op, Rotary) and op.apart)

    def _experts_forward(self, walk: Walk, experts: ExpertsWalk, op: Operator, graph: bool) -> None:
        match op:
            case Linear() if op.experts is None:
                walk.alloc(experts.Z)
            case Router():
                experts.choose(walk, graph)
            case Dispatch():
                experts.dispatch(walk)
            case Linear() if op.x == "rows":
                experts.run(walk, graph)
            case Combine():
                experts.combine(walk, graph)

    # Backward.

    def backward(self, walk: Walk, whole: bool) -> None:
        """Walk the backward pass, or with not `whole` its first part, I, after which products' inputs and their
        results' gradients stay for W."""
        for op in reversed(self.operators):
            self._backward(walk, op, whole)
        walk.free(self.late)
        self.late = 0
        if self.norm is not None:
            self._norm_backward(walk, self.norm, whole)

    def _norm_backward(self, walk: Walk, norm: Norm, whole: bool) -> None:
        """Walk the backward pass of a norm of the stream: its input's gradient replaces its result's."""
        p = self.p
        walk.alloc(_weights(p, norm) * (not whole))
        walk.touch(rms_temporaries(p.own_tokens, p.hidden, p.e) if norm.kind == "rms" else p.stream)
        walk.free(_statistics(p, norm))

    def after_backward(self, walk: Walk, whole: bool) -> None:
        """Walk the backward pass of the norm of the sublayer's result. The residual needs the output's gradient
        too."""
        if self.after is not None:
            self._norm_backward(walk, self.after, whole)
            walk.alloc(self.p.stream)
            walk.free(self.p.stream)  # what was normed

    def _backward(self, walk: Walk, op: Operator, whole: bool) -> None:
        p = self.p
        if self.experts is not None and _of_experts(op):
            self._experts_backward(walk, self.experts, op, whole)
            return
        if self.past is not None and not isinstance(op, Linear):
            if op is self.runs:
                self.past.backward(walk, whole)
            return
        match op:
            case Linear() if op is self.added and p.sp:
                walk.free(self.added_weight * whole)  # the rest with the sum
            case Linear() if op is self.added:
                if self.repeats is not None:
                    attention.recompute(p, walk, self.repeats)
                size = self.added_size
                round_operands(p, walk, p.stream, size)
                walk.alloc(size)
                if whole:
                    weight_gradient(p, walk, self.added_weight * p.copied, p.stream, size)
                    walk.free(self.read_by_sum, p.stream * (self.after is not None))
            case Linear() if op.x == "n":
                one_norm, alone = self.residual == "parallel_one_norm", self.experts is None
                frees = alone and (self.first or not one_norm)
                columns_backward(p, walk, op, whole, alone, frees, adds=self.first and one_norm)
            case Linear():
                read, result = p.bytes_of(op.into), p.bytes_of(op.y[0].dim)
                round_operands(p, walk, result, read)
                walk.alloc(read)
                if whole:
                    weight_gradient(p, walk, p.weight(op) * p.copied, result, read)
                    walk.free(read + result)
                walk.alloc(self._weights_of(op.x))
            case Activate() if _gates(op):
                size = p.bytes_of(op.y.dim)
                walk.alloc(5 * size)  # two gradients, the sigmoid and what multiplies it
                copied = self.attend is not None and attention.copies_result(p, self.attend)
                walk.free(size * (5 + copied))  # three of these, the result's gradient, the gate; the core's result
            case Activate():
                size, more = p.bytes_of(op.y.dim), op.kind in GATED
                walk.alloc(size * (len(op.x) + more))
                walk.free(size * (len(op.x) + 1 + more))
            case Attend():
                self._attend_backward(walk, op, whole)
            case Rotary() if op.apart:
                walk.touch(p.bytes_of(op.heads[0]))
            case Rotary():
                # Queries are the most, and last: the angles outlive the masks until then.
                walk.touch(p.bytes_of(op.heads[0]))
                walk.masked = np.maximum(walk.masked, walk.highest - p.mask)
                walk.free(self.late + self._weights_of("latent") * whole)
                self.late = 0
            case Norm():
                latent = bool(self._weights_of(op.y.name))
                walk.alloc(_weights(p, op) * (not whole and not latent))
                sums = max(1, op.y.dim.count // op.spans)
                walk.touch(rms_temporaries(p.t * sums, op.y.dim.size // sums, p.e))
                walk.free(self.made[op.x], _sums(p, op))
                walk.free(_weights(p, op) * (whole and op.y.name == "q_latent"))
            case Views():
                walk.alloc(p.bytes_of(op.x.dim))
                walk.free(sum(p.bytes_of(part.dim) for part in op.parts))
                walk.free(self._weights_of("latent") * (whole and not self._rope))
            case Resize():
                walk.alloc(self.made[op.x])
                walk.free(p.bytes_of(op.y.dim) + self.late)
                self.late = 0
            case Expand():
                walk.alloc(self.made[op.up], self.viewed[op.rope])
                both = sum(p.bytes_of(y.dim) for y in op.y)
                in_one = self.attend is not None and attention.gradients_in_one_buffer(p, self.attend)
                walk.free(both * (not in_one))
                self.late = both * in_one

    def _attend_backward(self, walk: Walk, op: Attend, whole: bool) -> None:
        p = self.p
        # With parallel residuals, the output's gradient, to which that of the other norm was added.
        added = p.stream * (whole and self.residual == "parallel" and p.repeat != "full")
        after = p.repeat == "selective" and not p.sp
        walk.free(added * (not after))
        if p.repeat != "selective" or not p.sp:
            attention.backward(p, walk, op, keeps_result=not whole and self.gate is None)
        walk.free(added * after)

    def _experts_backward(self, walk: Walk, experts: ExpertsWalk, op: Operator, whole: bool) -> None:
        match op:
            case Combine():
                experts.combine_backward(walk)
            case Linear() if op.experts is not None and op.x != "rows":
                experts.run_backward(walk, whole)
            case Dispatch():
                experts.dispatch_backward(walk)
            case Router():
                experts.choose_backward(walk)
            case Linear() if op.experts is None:
                experts.router_backward(walk, whole)

    def _weights_of(self, name: str) -> int:
        """Return the bytes of the gradient of a latent's norm's weight, which lives from when a product's input
        gradient is computed until that of the norm's input is."""
        norms = (op for op in self.operators if isinstance(op, Norm) and op.y.name == name and op.y.name != op.x)
        return sum(_weights(self.p, op) for op in norms)

    def weights(self, walk: Walk) -> None:
        """Walk W: the gradients of weights."""
        p = self.p
        inside = () if self.past is not None else self.operators
        norms = [op for op in inside if isinstance(op, Norm) and op.y.name == op.x and not op.gate]
        norms += [self.after] if self.after is not None else []
        walk.free(sum(_weights(p, op) for op in norms))
        for op in reversed(self.operators):
            match op:
                case Linear() if op is self.added:
                    weight_gradient(p, walk, self.added_weight * p.copied, p.whole, self.added_size)
                    walk.free(self.added_size)
                    if self.residual == "serial" or self.first:
                        walk.free(p.together if p.sp else p.stream)
                case Linear() if self.experts is not None and _of_experts(op):
                    if op.experts is None:
                        self.experts.router_weights(walk)
                    elif op.x != "rows":
                        self.experts.weights(walk)
                case _ if op is self.runs and self.past is not None:
                    walk.free(self.past.weights)
                case Linear() if op.x == "n":
                    columns_weights(p, walk, op)
                case Linear():
                    read, result = p.bytes_of(op.into), p.bytes_of(op.y[0].dim)
                    weight_gradient(p, walk, p.weight(op) * p.copied, result, read)
                    walk.free(read + result + self._weights_of(op.x))
        if self.norm is not None:
            walk.free(p.stream, _weights(p, self.norm))


def _gates(op: Operator) -> bool:
    """Whether an operator is the sigmoid gate of attention's result."""
    return isinstance(op, Activate) and op.kind == "sigmoid_gate"


def _one_statement(op: Operator, after: Operator | None) -> bool:
    """Whether our runtime computes both operators in one statement, so that their inputs are freed together."""
    if isinstance(op, Norm):
        return not (isinstance(after, Attend) or (isinstance(after, Rotary) and not after.apart))
    return isinstance(after, Expand) or (after is not None and _gates(after))


def _of_experts(op: Operator) -> bool:
    """Whether an operator is computed by the autograd functions of routing and of experts."""
    match op:
        case Linear():
            return op.y[0].rows in ("routed", "received")
        case Activate():
            return op.y.rows == "received"
        case _:
            return isinstance(op, (Router, Dispatch, Combine))


def _statistics(p: PassSizes, norm: Norm) -> Column:
    """Return the bytes that a norm of the stream keeps in addition to its input and output."""
    return p.own_tokens * (p.wide if norm.kind == "rms" else 2 * p.e)


def _sums(p: PassSizes, norm: Norm) -> Column:
    """Return the bytes that a norm of heads keeps in addition to its input and output."""
    return p.numbers(max(1, norm.y.dim.count // norm.spans))


def _weights(p: PassSizes, norm: Norm) -> int:
    """Return the bytes of the gradients of a norm's weights."""
    return sum(w.shape[0].size for w in norm.weights) * p.e


def _wide_norm(p: PassSizes, walk: Walk, elements: Column) -> None:
    """Walk the fp32 temporaries of an RMSNorm over `elements` elements of a narrower dtype."""
    if p.e < 4:
        walk.touch(2 * elements * 4)
