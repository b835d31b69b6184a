"""Live bytes of attention's core along the passes: on one rank, or over several (attention_core.py). The core has one
width for all tensors; if values are narrower, the result is a copy."""

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.live_bytes import Walk
from phalanx.cost.memory.pass_sizes import PassSizes
from phalanx.spec.model.blocks.operators import Attend, Dim


def heads(p: PassSizes, op: Attend) -> tuple[Column, Column]:
    """Return the bytes of queries, and of keys or values, in the core's width."""
    return p.bytes_of(Dim(op.y.dim.count, op.core)), p.bytes_of(Dim(op.kv.count, op.core))


def copies_result(p: PassSizes, op: Attend) -> bool:
    """Whether the result that the next product reads is a copy of the core's: because values are narrower, or because
    Ulysses has returned it."""
    return op.value < op.core or p.ulysses


def forward(p: PassSizes, walk: Walk, op: Attend) -> None:
    """Walk the core with an autograd graph, which keeps queries, keys, values, the result and the log-sum-exp."""
    q, k = heads(p, op)
    _attended(p, walk, op)
    if op.value < op.core:
        walk.alloc(p.bytes_of(op.y.dim))
        if p.ulysses:
            walk.touch(q + 2 * k)  # queries, keys and values before the exchange
            walk.free(q)


def without_graph(p: PassSizes, walk: Walk, op: Attend) -> None:
    """Walk the core without an autograd graph. Everything is freed, including the result, which callers allocate. The
    log-sum-exp is freed before values are copied."""
    inside = Walk()
    _attended(p, inside, op)
    walk.touch(inside.highest)
    walk.touch((heads(p, op)[0] + p.bytes_of(op.y.dim)) * (op.value < op.core))


def recompute(p: PassSizes, walk: Walk, op: Attend) -> None:
    """Recompute the core from queries, keys and values, which outlive it."""
    q, k = heads(p, op)
    forward(p, walk, op)
    if p.ulysses:
        walk.alloc(q + 2 * k)  # which Ulysses would otherwise have freed


def backward(p: PassSizes, walk: Walk, op: Attend, keeps_result: bool) -> None:
    """Walk the core's backward pass: the result's gradient is replaced by the gradients of queries, keys and values.
    `keeps_result`: W needs the result."""
    q, k = heads(p, op)
    narrow, repeats = op.value < op.core, p.repeat == "selective"
    recomputed_result = p.sp and repeats  # the result, by the recomputation
    if narrow:
        walk.alloc(q)  # padded with zeros
        walk.free(p.bytes_of(op.y.dim) * (not recomputed_result))
    if p.core is None:
        walk.alloc(q + 2 * k)
        walk.free(q)
        walk.free(2 * q + 2 * k + p.numbers(op.y.dim.count))
    else:
        p.core.backward(walk)
        walk.free((q + 2 * k) * (repeats and p.ulysses))
    if narrow:
        walk.free(p.bytes_of(op.y.dim) * recomputed_result)
    walk.masked = walk.highest
    if keeps_result and not copies_result(p, op):
        walk.alloc(q)


def gradients_in_one_buffer(p: PassSizes, op: Attend) -> bool:
    """Whether the gradients of queries, keys and values stay in one receive buffer: if Ulysses leaves a rank one
    head, unless the core is recomputed, because then they are copied."""
    return p.core is not None and p.ulysses and p.core.part.ulysses == op.kv.count and p.repeat != "selective"


def _attended(p: PassSizes, walk: Walk, op: Attend) -> None:
    if p.core is not None:
        p.core.forward(walk)
        return
    walk.alloc(heads(p, op)[0], p.numbers(op.y.dim.count))
