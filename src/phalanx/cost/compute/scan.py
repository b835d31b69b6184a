"""The work of recurrences in chunks, and of the convolution before them.

Ranks that share sequences (cp) each process whole sequences for a part of the heads (schedule/layers/context.py).
FLOPs are of matrix products: forward, of a chunk of c tokens, K groups and H heads with states of n x p,

    ssd, lightning   c² (2 n K + 2 p H) + c 4 n p H     scores; results inside the chunk; the state read, written
    delta            c² (4 n K + 2 p H) + c 6 n p H     scores of keys and of queries; inside; seen, read, written
    channel_delta    the same, with c (c - 1) / 2 for c² in the scores (schedule/layers/halves.py)

and backward these again, then two for each. Triangular systems (delta) are solved outside of products and count none.
Elements and kernels were counted in plain torch; they match the operands and results of all operations, at drawn
sizes, within 20 %.
"""

from typing import NamedTuple

from phalanx.cost.compute.work import Column, Work
from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.operators import Conv, Scan
from phalanx.spec.strategy.spec import Strategy


class _Pass(NamedTuple):
    """Coefficients of the work of a recurrence's pass. FLOPs: of n K and p H for each pair of tokens of a chunk (of
    n K in channel_delta: for each token and an earlier one), of n p H for each token, and for each token before the
    last chunk. Elements: of p H and n K for each token, of H and K for each pair, of n p H for each chunk."""

    flops: tuple[int, int, int, int]
    elements: tuple[int, int, int, int, int]
    kernels: int


_PASSES = {
    "ssd": (_Pass((2, 2, 4, 0), (22, 6, 9, 2, 8), 29), _Pass((6, 6, 10, 2), (73, 35, 15, 4, 22), 94)),
    "delta": (_Pass((4, 2, 6, 0), (28, 24, 14, 2, 9), 45), _Pass((12, 6, 20, 0), (86, 107, 60, 9, 30), 158)),
    "lightning": (_Pass((2, 2, 4, 0), (34, 0, 10, 0, 7), 29), _Pass((6, 4, 8, 2), (89, 0, 21, 0, 15), 60)),
    "channel_delta": (_Pass((4, 2, 6, 0), (142, 0, 11, 0, 7), 118), _Pass((14, 6, 18, 0), (512, 0, 39, 0, 23), 405)),
}
"""Forward and backward pass by kind; delta includes the norms of its queries and keys."""


def recurrence(op: Scan, tokens: Column, seq: int, e: int, s: Strategy, backward: bool) -> Work:
    """Return the work of a pass of a recurrence over `tokens` tokens of a rank. Raises InputError for kinds without
    coefficients."""
    if op.kind not in _PASSES:
        raise InputError(
            "model.mixers", op.kind, "is a recurrence whose step is not priced yet", f"use {', '.join(_PASSES)}"
        )
    row = _PASSES[op.kind][backward]
    heads, groups = op.y.dim.groups(s) // s.cp, max(1, op.groups.groups(s) // s.cp)
    sequences, chunks, (full, rest) = tokens * s.cp // max(seq, 1), -(-seq // op.chunk), divmod(seq, op.chunk)
    pairs, states = full * op.chunk**2 + rest**2, heads * op.y.dim.each * op.state
    of_head, of_group = heads * op.y.dim.each, groups * op.state
    scores, inside, state, before = row.flops
    scored = (pairs - seq) // 2 if op.kind == "channel_delta" else pairs
    flops = (scored * scores * of_group + pairs * inside * of_head) + (
        seq * state + (full - (not rest)) * op.chunk * before
    ) * states
    by_head, by_group, head_pairs, group_pairs, by_state = row.elements
    elements = seq * (by_head * of_head + by_group * of_group) + chunks * by_state * states
    elements += pairs * (head_pairs * heads + group_pairs * groups)
    return Work(sequences * flops, 0, sequences * elements * max(e, 4), row.kernels * chunks)


def convolution(op: Conv, s: Sublayer, tokens: Column, seq: int, e: int, d: Strategy, backward: bool) -> Work:
    """Return the work of a pass of a convolution, a chunk of the recurrence at a time, tap by tap."""
    scan = s.first(Scan)
    slices = 1 if scan is None else -(-seq // scan.chunk)
    elements = tokens * sum(dim.here(d) for dim in op.channels) * op.taps * (15 if backward else 3)
    return Work(0, 0, elements * max(e, 4), slices * len(op.channels) * (8 if backward else 1) * op.taps)
