"""Live bytes of matrix products: of rounded operands in narrow formats, and of products that share an input or a sum.

R2  On one rank, products of one input have backward passes of their own, last one first; their input gradients are
    summed two by two, while the last weight's gradient lives (with a bias it is freed first).
R3  Over tp, or if layers can defer weight gradients, they have one input gradient; over tp it is reduced while all
    weights' gradients are computed.
R4  With sequence parallelism, their input is gathered for them, again in the backward pass, and their result is
    scattered.
"""

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.live_bytes import Walk
from phalanx.cost.memory.pass_sizes import PassSizes
from phalanx.schedule.layers.collectives import chunks
from phalanx.spec.model.blocks.operators import Linear

GradientBytes = tuple[Column, int]
"""(Bytes of the gradient of a product's result, bytes of its weight's gradient)."""


def round_operands(p: PassSizes, walk: Walk, read: Column, result: Column, weights: bool = True) -> None:
    """Touch the tensors of a product in a narrow format: its rounded operands, with `weights` its matrix too, and the
    result. `read`, `result`: bytes of its input and its result for all tokens."""
    if p.operand_bytes:
        row = p.t * p.e
        m, k, n = p.t, read // row, result // row
        walk.touch((m * k + n * k * weights) * p.operand_bytes + m * n * p.e)


def weight_gradient(p: PassSizes, walk: Walk, weight: Column, g: Column, x: Column) -> None:
    """Touch the gradient of a weight, of `weight` bytes, computed from the gradient of a result and the input, of `g`
    and `x` bytes; in a narrow format with the rounded operands."""
    walk.touch(weight)
    if p.operand_bytes:
        row = p.t * p.e
        m, k, n = g // row, p.t, x // row
        walk.touch((m * k + n * k) * p.operand_bytes + m * n * p.e)


def in_chunks(p: PassSizes, walk: Walk, *others: Column, added: bool = False, weights: bool = True) -> None:
    """Touch the tensors of narrow products that are computed chunk by chunk, with sequence parallelism: all rounded
    weights, and a chunk of the inputs. The products map the stream to tensors of `others` bytes, or if `added` these
    tensors to one sum."""
    if not p.operand_bytes:
        return
    widths = [other // (p.t * p.e) for other in others]
    chunk = p.t // chunks(p.t, p.tp)
    read = p.hidden * (not p.narrow_stream) * p.operand_bytes
    if added:
        read = max(width * p.operand_bytes + p.hidden * p.e * (i > 0) for i, width in enumerate(widths))
    walk.touch(sum(widths) * p.hidden * weights * p.operand_bytes + chunk * read)


def weights_of_one(p: PassSizes, walk: Walk, *parts: GradientBytes) -> None:
    """Allocate the weight gradients of products that share an operand of the stream's width, with sequence
    parallelism."""
    shared = p.t * p.hidden * p.operand_bytes
    walk.alloc(shared)
    for size, weight in parts:
        walk.alloc(weight)
        walk.touch(size // p.e * p.operand_bytes)
    walk.free(shared)


def add_gradients(p: PassSizes, walk: Walk, weight: Column, bias: bool) -> None:
    """Sum two gradients of one tensor, while the weight's gradient is still live. With a bias, torch flattens the
    input, and the weight's gradient is freed first, unless the product is of a narrow format."""
    walk.alloc(p.stream)
    walk.touch(0 if bias and not p.operand_bytes else weight)
    walk.free(2 * p.stream)


def columns(p: PassSizes, walk: Walk, op: Linear) -> None:
    """Walk products that read a norm's result."""
    results = [p.bytes_of(y.dim) for y in op.y]
    if p.sp:
        walk.alloc(p.together)
        walk.alloc(*results)
        in_chunks(p, walk, *results, weights=not p.gathered)
        walk.free(p.together)
        return
    for result in results:
        round_operands(p, walk, p.stream, result, not p.gathered)
        walk.alloc(result)


def columns_backward(
    p: PassSizes, walk: Walk, op: Linear, whole: bool, joint: bool = True, frees: bool = True, adds: bool = False
) -> None:
    """Walk the backward pass of products that read a norm's result, or with not `whole` its first part, I. `joint`:
    whether they have one input gradient over tp; `frees`: whether no other sublayer needs the norm's result; `adds`:
    whether that result has a gradient already."""
    parts, biases = _parts(p, op), _biased(op)
    if not whole:
        _inputs(p, walk, op)
        if adds:
            add_gradients(p, walk, 0, bias=True)
        return
    read = p.stream * frees
    if p.sp or (joint and p.tp > 1):
        _joint(p, walk, parts)
        walk.free(read)
        if adds:
            add_gradients(p, walk, 0, bias=True)
        return
    if p.defers:
        _inputs(p, walk, op)
        if adds:
            # Weight gradients are computed when the engine takes them: by then autograd has added the gradient of the
            # norm's result to the one that it has, and the products still hold that result.
            add_gradients(p, walk, 0, bias=True)
        _one_by_one(p, walk, parts)
        walk.free(read)
        return
    for i in reversed(range(len(parts))):
        size, weight = parts[i]
        round_operands(p, walk, size, p.stream)
        walk.alloc(p.stream)
        weight_gradient(p, walk, weight, size, p.stream)
        walk.free(size)
        if i == 0:
            walk.free(read)
        if i < len(parts) - 1 or adds:
            add_gradients(p, walk, weight, biases[i])


def _inputs(p: PassSizes, walk: Walk, op: Linear) -> None:
    """Walk I of products that read a norm's result."""
    results = [p.bytes_of(y.dim) for y in op.y]
    if p.sp:
        walk.alloc(p.stream, p.whole)
        in_chunks(p, walk, *results, added=True)
        walk.free(p.whole)
        return
    _input_gradient(p, walk, results)


def columns_weights(p: PassSizes, walk: Walk, op: Linear) -> None:
    """Walk W of products that read a norm's result."""
    parts = _parts(p, op)
    if p.sp:
        walk.alloc(p.together)
        weights_of_one(p, walk, *parts)
        walk.free(p.together, *(n for part in parts for n in part))
        return
    _one_by_one(p, walk, parts)


def _parts(p: PassSizes, op: Linear) -> list[GradientBytes]:
    """Return the gradient bytes of each matrix of a product."""
    return [(p.bytes_of(y.dim), p.weight(op, i)) for i, y in enumerate(op.y)]


def _biased(op: Linear) -> list[bool]:
    """Return whether each matrix has a bias."""
    names = [w.name for w in op.weights]
    return [name.replace(".weight", ".bias") in names for name in names if name.endswith(".weight")]


def _joint(p: PassSizes, walk: Walk, parts: list[GradientBytes]) -> None:
    """Walk the backward pass of products with one input gradient."""
    results, weights = [size for size, _ in parts], [weight for _, weight in parts]
    if p.sp:  # the gradient of the input is live for all tokens before it is scattered
        walk.alloc(p.stream, p.together + p.whole)
        in_chunks(p, walk, *results, added=True)
        weights_of_one(p, walk, *parts)
        walk.free(p.together + p.whole, *results, *weights)
        return
    _input_gradient(p, walk, results)
    for size, weight in parts:
        weight_gradient(p, walk, weight, size, p.stream)
        walk.alloc(weight)
    walk.free(*results, *weights)


def _input_gradient(p: PassSizes, walk: Walk, results: list[Column]) -> None:
    """Walk the gradient of the products' input, from the gradients of their results one after the other."""
    round_operands(p, walk, results[0], p.stream)
    walk.alloc(p.stream)
    for size in results[1:]:
        round_operands(p, walk, size, p.stream)


def _one_by_one(p: PassSizes, walk: Walk, parts: list[GradientBytes]) -> None:
    """Walk the weight gradients, one by one."""
    for size, weight in reversed(parts):
        weight_gradient(p, walk, weight * p.copied, size, p.whole)
        walk.free(size)
