"""Nested blocks of ranks carved from uneven hosts.

A mesh in some order of its axes is nested blocks: b_1 ranks of the innermost axis, b_2 = b_1 x the next axis, ...,
the world. A host with c free GPUs holds floor(c / b_j) blocks of every size b_j at once (mixed radix, since each b
divides the next), so no other way of filling it keeps more blocks in one piece. Remainders on the hosts of a leaf
switch are joined there first, then over all leaves; blocks that are in one piece are taken first.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.spec.cluster.topology import Ints


@dataclass(frozen=True, eq=False)
class FreeBlock:
    """The free GPUs of a block of the innermost tier, which usually is a host."""

    scopes: tuple[int, ...]
    """Numbers of the blocks of higher tiers that contain it, outermost first, without the outermost tier."""
    gpus: Ints


@dataclass(frozen=True, eq=False)
class _Block:
    """A block of ranks, joined from the blocks of the level below."""

    level: int
    """Index of its size: 0 is a single rank, j a block of b_j ranks."""
    together: int
    """Level of its smallest part that is on one host: the size of its pieces."""
    scopes: tuple[int, ...]
    parts: tuple[Ints, ...]
    """GPUs, in one or several arrays."""


def carve(hosts: Sequence[FreeBlock], sizes: Sequence[int]) -> Ints | None:
    """Return the GPU of each rank of nested blocks, (world,); None if too few are free.

    `sizes`: ranks per block, ascending, each dividing the next; the last is the world size.
    """
    levels = [1, *sizes]
    if sum(len(host.gpus) for host in hosts) < levels[-1]:
        return None
    inventory: list[list[_Block]] = [[] for _ in levels]
    cuts = {room: _cuts(room, levels) for room in {len(host.gpus) for host in hosts}}
    for host in hosts:
        for level, start in cuts[len(host.gpus)]:
            part = host.gpus[start : start + levels[level]]
            inventory[level].append(_Block(level, level, host.scopes, (part,)))
    for outer in range(len(hosts[0].scopes), 0, -1):  # join what one block of a tier holds, the innermost tier first
        inventory = _join_blocks(inventory, levels, outer)
    return np.concatenate(_take(inventory, levels, len(levels) - 1, 1))


def _cuts(room: int, levels: Sequence[int]) -> list[tuple[int, int]]:
    """Return the blocks that fit in `room` GPUs as (level, first GPU), the largest first."""
    result, start = [], 0
    for level in range(len(levels) - 1, -1, -1):
        whole, rest = divmod(room - start, levels[level])
        result += [(level, start + i * levels[level]) for i in range(whole)]
        start = room - rest
    return result


def _join_blocks(inventory: list[list[_Block]], levels: list[int], outer: int) -> list[list[_Block]]:
    """Join blocks that share their `outer` outermost scopes into larger ones."""
    result: list[list[_Block]] = [[] for _ in levels]
    pending: list[_Block] = []
    for level in range(len(levels)):
        blocks = inventory[level] + pending
        pending = []
        if level + 1 == len(levels):
            result[level] = blocks
            break
        ratio = levels[level + 1] // levels[level]
        by_scope: dict[tuple[int, ...], list[_Block]] = {}
        for block in blocks:
            by_scope.setdefault(block.scopes[:outer], []).append(block)
        for scope in sorted(by_scope):
            parts = sorted(by_scope[scope], key=lambda b: (-b.together, b.scopes))
            whole = len(parts) // ratio * ratio
            pending += [_join(parts[i : i + ratio], level + 1, scope) for i in range(0, whole, ratio)]
            result[level] += parts[whole:]
    return result


def _join(parts: Sequence[_Block], level: int, scope: tuple[int, ...]) -> _Block:
    first = parts[0].scopes
    common = first if all(part.scopes == first for part in parts) else scope
    return _Block(level, min(p.together for p in parts), common, tuple(gpus for p in parts for gpus in p.parts))


def _take(inventory: list[list[_Block]], levels: list[int], level: int, count: int) -> list[Ints]:
    """Return the GPUs of `count` blocks of a level: blocks in the largest pieces first, from the scopes with most of
    them, then blocks joined from smaller ones."""
    many = Counter(block.scopes for block in inventory[level])
    taken = sorted(inventory[level], key=lambda b: (-b.together, -many[b.scopes], b.scopes))[:count]
    parts = [gpus for block in sorted(taken, key=lambda b: (b.scopes, -b.together)) for gpus in block.parts]
    missing = count - len(taken)
    if missing:
        # Blocks of this level that are not needed elsewhere were all taken: the rest comes from smaller ones.
        parts += _take(inventory, levels, level - 1, missing * (levels[level] // levels[level - 1]))
    return parts
