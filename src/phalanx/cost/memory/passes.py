"""Live bytes along the passes of a block: its sublayers, and the residual stream between them.

F       forward; with full recomputation without a graph, and again in the backward pass
B       backward
I, W    B in two parts: gradients of inputs, then of weights (runtime/autograd/deferred_weight_grads.py)

R4  With sequence parallelism, sublayers' results are computed when they are scattered: with parallel residuals one
    sum for all of them, which comes first in the backward pass.
R5  A gradient is added in place, unless W or recomputation still holds it.
"""

from collections.abc import Sequence

from phalanx.cost.memory import attention
from phalanx.cost.memory.derived import require_derived
from phalanx.cost.memory.live_bytes import Parts, Pass, Walk
from phalanx.cost.memory.pass_sizes import PassSizes
from phalanx.cost.memory.products import in_chunks, weights_of_one
from phalanx.cost.memory.sublayer import SublayerWalk
from phalanx.spec.model.blocks.block import Block


class BlockWalk:
    """The walks of a block's passes."""

    def __init__(self, block: Block, p: PassSizes) -> None:
        require_derived(block, p)
        self.p, self.serial, self.full = p, block.residual == "serial", p.repeat == "full"
        self.one_norm, self.one_sum = block.residual == "parallel_one_norm", p.sp and block.residual != "serial"
        self.lines = [SublayerWalk(s, p, block.residual, s is block.sublayers[0]) for s in block.sublayers]

    def passes(self) -> tuple[Walk, Walk]:
        """Return the walks of the forward and the backward pass."""
        forward, backward = Walk(), Walk()
        if self.full:
            self._forward(forward, graph=False)
        self._forward(backward if self.full else forward, output=not self.full)
        self._backward(backward)
        if self.full:  # the inputs of the pass are kept until it ends
            backward.masked = backward.highest
        return forward, backward

    def parts(self) -> Parts:
        """Return the backward pass split in I and W."""
        inputs, weights = Walk(), Walk()
        if self.full:
            self._forward(inputs, output=False)
        self._inputs(inputs)
        for line in reversed(self.lines):
            line.weights(weights)
        biases = [line.bias_of_sum for line in self.lines]
        # With sequence parallelism I computes the gradients of biases.
        small = (max(biases) if self.one_sum else sum(biases)) * self.p.sp
        inputs.alloc(small)
        weights.free(small)
        if self.full:
            inputs.masked = inputs.highest
        return Parts(Pass.from_walk(inputs), Pass.from_walk(weights))

    def _forward(self, walk: Walk, graph: bool = True, output: bool = True) -> None:
        """Walk the forward pass. With a `graph`, the tensors live at its end are kept for the backward pass,
        including the output but not the input; without, only the output is live. `output`: whether to compute the
        output, and what only it needs."""
        stream = self.p.stream
        waiting: list[SublayerWalk] = []  # sublayers whose results are not summed yet
        for line in self.lines:
            more = line is not self.lines[-1]
            wanted = output or (self.serial and more)
            line.forward(walk, graph, wanted or line.after is not None)
            waiting.append(line)
            if not (wanted or line.after) or (self.one_sum and more):
                continue
            self._sum(walk, waiting, graph)
            line.after_forward(walk, graph)
            if not wanted:
                walk.free(stream)
                continue
            walk.touch(stream)  # + the input; the sum takes the place of what is added
            walk.free(stream * (line.after is not None and not graph))
            # Its input; or the sum of other sublayers' results.
            walk.free(stream * (not line.first and (not graph if self.serial else not self.p.sp)))
            waiting = []
        if not graph and not self.serial:
            walk.free(stream)  # the first norm's result

    def _sum(self, walk: Walk, lines: Sequence[SublayerWalk], graph: bool) -> None:
        """Walk the sum over ranks of sublayers' results."""
        p, last = self.p, lines[-1]
        read = p.stream * (last.frees_normed and not graph)  # the norm's result
        if p.sp and last.experts is None:
            walk.free(read)
            read = 0
        if p.sp and last.added is not None:
            self._scattered(walk, lines)
        if last.experts is not None:
            last.experts.complete(walk)
        walk.free(read, *(line.added_size for line in lines if p.sp and not graph))

    def _scattered(self, walk: Walk, lines: Sequence[SublayerWalk]) -> None:
        """Walk the products whose results are summed over ranks; with selective recomputation, attention's core is
        computed for them and not kept."""
        p, held = self.p, self.p.whole
        for line in lines:
            if line.repeats is not None:
                attention.without_graph(p, walk, line.repeats)
                held = held + line.added_size
        walk.alloc(p.stream, held)
        in_chunks(p, walk, *(line.added_size for line in lines), added=True, weights=not p.gathered)
        walk.free(held)

    def _sum_backward(self, walk: Walk, lines: Sequence[SublayerWalk], whole: bool) -> None:
        """Walk the backward pass of products whose results are summed over ranks, or with not `whole` its first part,
        I. Weight gradients stay live until their sublayer's backward pass, as do the gradients of attention's result
        or, if the core was recomputed, of queries, keys and values."""
        p, lines = self.p, [line for line in lines if line.added is not None]
        if not lines:
            return
        repeats = [line.repeats for line in lines if line.repeats is not None]
        walk.alloc(p.together)
        for attend in repeats:
            attention.recompute(p, walk, attend)
        walk.alloc(*(line.added_size for line in lines))
        in_chunks(p, walk, *(line.added_size for line in lines))
        if whole:
            weights_of_one(p, walk, *((line.added_size, line.added_weight) for line in lines))
            walk.free(p.together)
        for attend in repeats:
            attention.backward(p, walk, attend, keeps_result=not whole)
        if whole:
            walk.free(*(line.read_by_sum for line in lines))
        walk.free(p.stream * any(line.after is not None for line in lines))

    def _backward(self, walk: Walk) -> None:
        """Walk the backward pass. The output's gradient is replaced by the input's, and tensors kept by the forward
        pass are freed; the input is freed in place of the output. With full recomputation, the input and the output's
        gradient outlive the pass."""
        stream = self.p.stream
        if self.one_sum:
            self._sum_backward(walk, self.lines, whole=True)
        for line in reversed(self.lines):
            line.after_backward(walk, whole=True)
            if self.p.sp and self.serial:
                self._sum_backward(walk, [line], whole=True)
            line.backward(walk, whole=True)
            if self.serial and not line.first:
                walk.free(stream)  # what entered it
            if self.full and (line is self.lines[-1] if self.serial else self.one_norm and line.first):
                walk.alloc(stream)  # R5: the sum of two gradients; one is the output's
            if self.serial or line.first:
                walk.free(stream)  # one gradient of two
        walk.free(stream * self.full)  # the output's gradient, with others added to it
        walk.free(stream)  # the input

    def _inputs(self, walk: Walk) -> None:
        """Walk I, in the order of `_backward`."""
        stream = self.p.stream
        if self.one_sum:
            self._sum_backward(walk, self.lines, whole=False)
        for line in reversed(self.lines):
            line.after_backward(walk, whole=False)
            if self.p.sp and self.serial:
                self._sum_backward(walk, [line], whole=False)
            line.backward(walk, whole=False)
            if self.serial and not line.first:
                walk.free(stream)  # what entered it
            if self.one_norm and not line.first:
                continue
            last = line is self.lines[-1] or self.one_norm
            held = line.keeps_gradient or (self.full and last)  # R5
            if not self.serial and not self.one_norm and line.first:
                held = False
            walk.touch(stream * held)
            walk.free(stream * (not held))
        if self.full and not self.lines[-1].keeps_gradient:
            walk.free(stream)  # the output's gradient
        walk.free(stream)  # the input
