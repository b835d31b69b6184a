"""One rank's work in a collective over shared memory: a list of copies and additions between addresses.

    all_reduce       rank i reduces slice i of every rank's buffer and writes it into every rank's buffer
    reduce_scatter   rank i reduces part i of every rank's source
    all_gather, all_to_all   each rank copies the parts that are for it

Reductions go block by block, so that a block is still in the core's cache when it is written to the others.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.runtime.comm.shm_arena import ArenaNeighbour
from phalanx.runtime.comm.transport import Call
from phalanx.schedule.event import Reduction

Step = tuple[Callable[..., object], tuple[Any, ...]]
"""A function and its arguments."""
Source = tuple[ArenaNeighbour, int, int]
"""A peer's arena, its buffer's offset in it, and the word at which its entry in the control block begins."""

_BLOCK = 1 << 18  # bytes
_ADD: dict[Reduction, Callable[..., object]] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


def work(call: Call, sources: dict[int, Source]) -> list[Step]:
    """Return this rank's steps of a call. `sources`: the other ranks' buffers, by index in the group."""
    return _WORK[call.op](call, sources)


def reduced_slice(call: Call) -> tuple[int, int]:
    """Return the range [low, high) of the source's elements that this rank reduces. Slices of an all-reduce begin at
    cache lines, so that no two ranks write to the same line."""
    if call.op == "reduce_scatter":
        n = call.target.numel()
        return call.me * n, (call.me + 1) * n
    p, n, line = len(call.ranks), call.source.numel(), 64 // call.source.dtype.itemsize
    lines = -(-n // line)
    return min(n, lines * call.me // p * line), min(n, lines * (call.me + 1) // p * line)


def copy(target: int, source: int, size: int) -> Iterator[Step]:
    """Copy `size` bytes between addresses. The C library's copy does not read what it overwrites, so outside the
    cache it is up to 1.5 times as fast as a tensor's own."""
    if size:
        yield ctypes.memmove, (target, source, size)


def copy_others(call: Call, target: Tensor, source: Tensor) -> Iterator[Step]:
    """Copy all but the part that this rank reduces, which no other rank reads."""
    low, high = reduced_slice(call)
    e = source.dtype.itemsize  # bytes
    yield from copy(target.data_ptr(), source.data_ptr(), low * e)
    yield from copy(target.data_ptr() + high * e, source.data_ptr() + high * e, (source.numel() - high) * e)


def _add(reduction: Reduction, out: Tensor, a: Tensor, b: Tensor) -> Step:
    """Compute out = a (+) b, by NumPy if it has the type: its calls take a third of the time to start."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return _ADD[reduction], (a.numpy(), b.numpy(), out.numpy())
    functions = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}
    return partial(functions.get(reduction, torch.add), a, b, out=out), ()


def _reduce(call: Call, out: Tensor, mine: Tensor, theirs: list[Tensor], copies: list[Tensor]) -> list[Step]:
    """Reduce `mine` and `theirs` into `out`, and copy the result to `copies`; all of the same size."""
    steps: list[Step] = []
    size = max(1, _BLOCK // mine.dtype.itemsize)
    for low in range(0, mine.numel(), size):
        into, first = out[low : low + size], mine[low : low + size]
        for other in theirs:
            steps.append(_add(call.reduction, into, first, other[low : low + size]))
            first = into
        if call.reduction == "avg":
            steps.append((into.div_, (len(call.ranks),)))
        for other in copies:
            steps += copy(other.data_ptr() + low * mine.dtype.itemsize, into.data_ptr(), into.nbytes)
    return steps


def _parts(call: Call, sources: dict[int, Source]) -> tuple[Tensor, list[Tensor]]:
    """Return the part that this rank reduces: of its own source, and of the others'."""
    low, high = reduced_slice(call)
    e = call.source.dtype.itemsize
    theirs = [peer.tensor(at + low * e, high - low, call.source.dtype) for peer, at, _ in sources.values()]
    return call.source[low:high], theirs


def _all_reduce(call: Call, sources: dict[int, Source]) -> list[Step]:
    mine, theirs = _parts(call, sources)
    return _reduce(call, mine, mine, theirs, copies=theirs)


def _reduce_scatter(call: Call, sources: dict[int, Source]) -> list[Step]:
    mine, theirs = _parts(call, sources)
    return _reduce(call, call.target, mine, theirs, copies=[])


def _all_gather(call: Call, sources: dict[int, Source]) -> list[Step]:
    out, size = call.target.data_ptr(), call.source.nbytes
    mine = out + call.me * size
    steps = [] if mine == call.source.data_ptr() else [*copy(mine, call.source.data_ptr(), size)]
    for i in _from_next(call):
        peer, at, _ = sources[i]
        steps += copy(out + i * size, peer.base + at, size)
    return steps


def _all_to_all(call: Call, sources: dict[int, Source]) -> list[Step]:
    e, me, sent, received = call.source.dtype.itemsize, call.me, call.sent, call.received
    into = [call.target.data_ptr() + begins * e for begins in accumulate(received, initial=0)]
    steps = [*copy(into[me], call.source.data_ptr() + sum(sent[:me]) * e, received[me] * e)]
    for i in _from_next(call):
        peer, at, entry = sources[i]
        low, high = (
            (peer.words[entry + k] for k in (me, me + 1)) if call.sends else (me * sent[i], (me + 1) * sent[i])
        )
        if high - low != received[i]:
            raise RuntimeError(f"rank {peer.rank} sends {high - low} elements, not {received[i]}, in {call}")
        steps += copy(into[i], peer.base + at + low * e, received[i] * e)
    return steps


def _from_next(call: Call) -> Iterator[int]:
    """Yield the other indices from the next one on, so that not all ranks read one rank's memory at once."""
    p = len(call.ranks)
    return ((call.me + s) % p for s in range(1, p))


_WORK: dict[str, Callable[[Call, dict[int, Source]], list[Step]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}
