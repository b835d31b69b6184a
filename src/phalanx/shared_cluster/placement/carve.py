"""Nested blocks of ranks carved from uneven hosts.

A mesh in some order of its axes is nested blocks: b_1 ranks of the innermost axis, b_2 = b_1 x the next axis, ...,
the world. A host with c free GPUs holds floor(c / b_j) blocks of every size b_j at once (mixed radix, since each b
divides the next), so no other way of filling it keeps more blocks in one piece. What is left over on the hosts of a
leaf switch is joined there first, then over all leaves; blocks that are in one piece are taken first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.spec.cluster.topology import Ints


@dataclass(frozen=True, eq=False)
class FreeBlock:
    """The free GPUs of a block of the innermost tier: a host, mostly."""

    scopes: tuple[int, ...]
    """Blocks of the tiers above that contain it, the outermost first, without the outermost tier."""
    gpus: Ints


@dataclass(frozen=True, eq=False)
class _Block:
    """A block of ranks, joined from the blocks of the level below."""

    level: int
    """Index of its size: 0 is a single rank, j a block of b_j ranks."""
    together: int
    """Level of the smallest block inside that lies on one host: the size of its pieces."""
    scopes: tuple[int, ...]
    parts: tuple[Ints, ...]
    """GPUs, in one or several arrays."""


def carve(hosts: Sequence[FreeBlock], sizes: Sequence[int]) -> Ints | None:
    """Return GPUs for the ranks of nested blocks, in their order, (world,); None if too few are free.

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
        inventory = _joined(inventory, levels, outer)
    return np.concatenate(_take(inventory, levels, len(levels) - 1, 1))


def _cuts(room: int, levels: Sequence[int]) -> list[tuple[int, int]]:
    """Return the blocks that fit in `room` GPUs as (level, first GPU), the largest first."""
    result, start = [], 0
    for level in range(len(levels) - 1, -1, -1):
        whole, rest = divmod(room - start, levels[level])
        result += [(level, start + i * levels[level]) for i in range(whole)]
        start = room - rest
    return result


def _joined(inventory: list[list[_Block]], levels: list[int], outer: int) -> list[list[_Block]]:
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
            own = sorted(by_scope[scope], key=lambda b: (-b.together, b.scopes))
            whole = len(own) // ratio * ratio
            for start in range(0, whole, ratio):
                pending.append(_join(own[start : start + ratio], level + 1, scope))
            result[level] += own[whole:]
    return result


def _join(parts: Sequence[_Block], level: int, scope: tuple[int, ...]) -> _Block:
    common = scope + parts[0].scopes[len(scope) :] if _alike(parts) else scope
    return _Block(level, min(p.together for p in parts), common, tuple(gpus for p in parts for gpus in p.parts))


def _alike(parts: Sequence[_Block]) -> bool:
    first = parts[0].scopes
    return all(part.scopes == first for part in parts)


def _take(inventory: list[list[_Block]], levels: list[int], level: int, count: int) -> list[Ints]:
    """Take `count` blocks of a level: those in the largest pieces first, from the scopes that have most of them; what
    is missing is joined from smaller blocks."""
    many: dict[tuple[int, ...], int] = {}
    for block in inventory[level]:
        many[block.scopes] = many.get(block.scopes, 0) + 1
    own = sorted(inventory[level], key=lambda b: (-b.together, -many[b.scopes], b.scopes))
    taken = own[:count]
    parts = [gpus for block in sorted(taken, key=lambda b: (b.scopes, -b.together)) for gpus in block.parts]
    missing = count - len(taken)
    if missing:
        # Blocks of this level that are not needed elsewhere were all taken: the rest comes from smaller ones.
        parts += _take(inventory, levels, level - 1, missing * (levels[level] // levels[level - 1]))
    return parts
