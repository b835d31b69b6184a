"""Collectives along trees: one to all, all to one, and the two trees that use every link in both directions.

Builders take `groups`, (groups, p) ranks that run the same algorithm side by side, and the interval [low, high) of
each group, and return rounds. Sources: Thakur, Rabenseifner & Gropp 2005 (binomial); Sanders, Speck & Träff 2009,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan"; NCCL `src/graph/trees.cc` (the two trees for
any p).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.schedule.collectives.ir import Ints, Round, cut, merge_rounds, parallel_round, reverse


def binomial_broadcast(groups: Ints, low: Ints, high: Ints, root: int = 0) -> list[Round]:
    """ceil(lg p) rounds; members that have the buffer send it 2^k further, the farthest first."""
    p = groups.shape[1]
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        sender = np.arange(0, p, 2 << k)
        sender = sender[sender + (1 << k) < p]
        receiver = sender + (1 << k)
        rounds.append(
            parallel_round(groups, (sender + root) % p, (receiver + root) % p, low[:, None], high[:, None], False)
        )
    return rounds


def flat_broadcast(groups: Ints, low: Ints, high: Ints, root: int = 0) -> list[Round]:
    """p-1 rounds; the root sends to one member after the other."""
    p = groups.shape[1]
    others = [(root + s) % p for s in range(1, p)]
    return [
        parallel_round(groups, np.array([root]), np.array([other]), low[:, None], high[:, None], False)
        for other in others
    ]


def chain_broadcast(groups: Ints, low: Ints, high: Ints, root: int, segments: int) -> list[Round]:
    """p-2+m rounds; m segments travel down a chain one behind the other. Best m = sqrt((p-2) n β / α)."""
    p = groups.shape[1]
    m = _segments(low, high, segments)
    bounds = cut(low, high, m)
    rounds = []
    for r in range(p - 2 + m):
        hop = np.arange(max(0, r - m + 1), min(p - 1, r + 1))
        part = r - hop
        rounds.append(
            parallel_round(
                groups, (hop + root) % p, (hop + 1 + root) % p, bounds[:, part], bounds[:, part + 1], False
            )
        )
    return rounds


def _segments(low: Ints, high: Ints, wanted: int) -> int:
    """Return the number of segments: `wanted`, or fewer where some would be empty."""
    return max(1, min(wanted, int((high - low).max())))


def binomial_scatter(groups: Ints, low: Ints, high: Ints, root: int = 0) -> list[Round]:
    """ceil(lg p) rounds; a sender forwards the chunks of the receiver's subtree. Chunk i belongs to member i."""
    p = groups.shape[1]
    bounds = cut(low, high, p)
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        sender = np.arange(0, p, 2 << k)
        sender = sender[sender + (1 << k) < p]
        first = sender + (1 << k)
        stop = np.minimum(first + (1 << k), p)
        # Chunks root + first .. root + stop - 1, modulo p: one interval, or two.
        a, b = first + root, stop + root
        parts = [
            (bounds[:, np.minimum(a, p)], bounds[:, np.minimum(b, p)]),
            (bounds[:, np.maximum(a - p, 0)], bounds[:, np.maximum(b - p, 0)]),
        ]
        source, destination = (sender + root) % p, (first + root) % p
        rounds.append(
            merge_rounds([parallel_round(groups, source, destination, low_, high_, False) for low_, high_ in parts])
        )
    return rounds


def flat_scatter(groups: Ints, low: Ints, high: Ints, root: int = 0) -> list[Round]:
    """p-1 rounds; the root sends each member its chunk."""
    p = groups.shape[1]
    bounds = cut(low, high, p)
    others = [np.array([(root + s) % p]) for s in range(1, p)]
    return [parallel_round(groups, np.array([root]), o, bounds[:, o], bounds[:, o + 1], False) for o in others]


@dataclass(frozen=True)
class TwoTrees:
    """The edges of two trees, each of which carries half of the buffer: columns of equal length, 2 (p - 1).

    In round `step` + 2 s of a broadcast, segment s of a tree goes down an edge. Edges of even steps and edges of
    odd ones take turns; no member has two edges of a turn into it, nor two out of it.
    """

    tree: Ints
    parent: Ints
    child: Ints
    step: Ints


def two_trees(p: int) -> TwoTrees:
    """Return two binary trees over p members. An inner node of one (except member 0 if p is odd) is a leaf of the
    other, so that in a broadcast every member sends and receives two halves of the buffer (Sanders, Speck &
    Träff)."""
    member = np.arange(p)
    # In-order numbering: odd members are leaves, 4 k + 2 are the parents of leaves, and so on; 0 has one child.
    bit = member & -member
    above = (member ^ bit) | (bit << 1)
    parent = np.where(above < p, above, member ^ bit)[1:]
    # The second tree is the first one's mirror image, or for odd p the first one moved on by one.
    name = p - 1 - member if p % 2 == 0 else (member + 1) % p
    tree = np.repeat([0, 1], p - 1)
    parents = np.concatenate([parent, name[parent]])
    children = np.concatenate([member[1:], name[1:]])
    colour = _alternate(parents.tolist(), children.tolist())
    step = [0] * len(tree)
    into = {(int(t), int(c)): e for e, (t, c) in enumerate(zip(tree, children, strict=True))}
    # Parents first: a parent's lowest bit is higher than its child's.
    for e in np.argsort(-np.tile(bit[1:], 2), kind="stable").tolist():
        incoming = into.get((int(tree[e]), int(parents[e])))
        ready = 0 if incoming is None else step[incoming] + 1
        step[e] = ready + (ready + colour[e]) % 2
    return TwoTrees(tree, parents, children, np.array(step, dtype=np.int64))


def _alternate(parents: list[int], children: list[int]) -> list[int]:
    """Return a colour, 0 or 1, for each edge, such that the edges into a member differ, and so do those out of it.

    At most two go in (one per tree) and at most two out, so conflicts form paths and cycles of even length.
    """
    conflicts: list[list[int]] = [[] for _ in parents]
    for ends in (parents, children):
        first: dict[int, int] = {}
        for e, member in enumerate(ends):
            neighbour = first.setdefault(member, e)
            if neighbour != e:
                conflicts[e].append(neighbour)
                conflicts[neighbour].append(e)
    colour = [-1] * len(parents)
    for start in range(len(parents)):
        if colour[start] < 0:
            colour[start], waiting = 0, [start]
            while waiting:
                e = waiting.pop()
                for neighbour in conflicts[e]:
                    if colour[neighbour] < 0:
                        colour[neighbour] = 1 - colour[e]
                        waiting.append(neighbour)
    return colour


def double_tree_all_reduce(groups: Ints, low: Ints, high: Ints, segments: int) -> list[Round]:
    """Each tree reduces its half of the buffer upwards, then broadcasts it downwards, in k segments one behind the
    other: at most 4 k + 4 lg p rounds of n / 2k elements each, and every port is busy in all but O(lg p) of them."""
    p = groups.shape[1]
    if p == 1:
        return []
    trees = two_trees(p)
    middle = low + (high - low) // 2
    halves = np.stack([low, middle]), np.stack([middle, high])  # (2, groups)
    bounds = cut(*halves, _segments(*halves, segments))
    begin, end = bounds[..., :-1], bounds[..., 1:]
    # Reversed in time and in segments, so that the segment that is reduced first is broadcast first.
    up = reverse(_down(trees, groups, begin[..., ::-1], end[..., ::-1]), reduces=True)
    return up + _down(trees, groups, begin, end)


def _down(trees: TwoTrees, groups: Ints, begin: Ints, end: Ints) -> list[Round]:
    """Return the rounds that move segments [begin, end), (2, groups, k), from the roots to all members."""
    k, rounds = begin.shape[2], []
    for r in range(int(trees.step.max()) + 2 * k - 1):
        segment, turn = np.divmod(r - trees.step, 2)
        e = np.nonzero((turn == 0) & (segment >= 0) & (segment < k))[0]
        tree, part = trees.tree[e], segment[e]
        low, high = begin[tree, :, part].T, end[tree, :, part].T  # (groups, edges)
        rounds.append(parallel_round(groups, trees.parent[e], trees.child[e], low, high, False))
    return rounds
