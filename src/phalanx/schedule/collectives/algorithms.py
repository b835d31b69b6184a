"""The algorithms of collectives: along trees (one to all, all to one, two trees that use every link in both
directions), and in chunks (reduce-scatter, all-gather, all-reduce, all-to-all).

Builders take `groups`, (groups, p) ranks that run the same algorithm side by side, and the interval [low, high) of
each group, and return rounds. Sources: Thakur, Rabenseifner & Gropp 2005; Bruck et al. 1997; Patarasuk & Yuan 2009;
Sanders, Speck & Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"; NCCL
`src/graph/trees.cc` (the two trees for any p).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.schedule.collectives.ir import Ints, Round, cut, merge_rounds, parallel_round, reverse


def binomial_broadcast(groups: Ints, low: Ints, high: Ints, root: int = 0) -> list[Round]:
    """Build ceil(lg p) rounds: every member that has the buffer sends it to the member 2^k further, largest k
    first."""
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
    others = [np.array([(root + s) % p]) for s in range(1, p)]
    return [parallel_round(groups, np.array([root]), o, low[:, None], high[:, None], False) for o in others]


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
    """The edges of two trees, each of which carries half of the buffer: columns of equal length, 2 (p - 1). In round
    `step` + 2 s of a broadcast, segment s of a tree goes down an edge. Edges of even steps and edges of odd ones take
    turns; no member has two edges of a turn into it, nor two out of it."""

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
    """Return a colour, 0 or 1, for each edge, such that the edges into a member differ, and so do those out of it. At
    most two go in (one per tree) and at most two out, so conflicts form paths and cycles of even length."""
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


def ring_reduce_scatter(groups: Ints, low: Ints, high: Ints) -> list[Round]:
    """p-1 rounds; member i sends chunk i-1-s to i+1 and ends with chunk i (Patarasuk & Yuan)."""
    return _around(groups, low, high, 1, True)


def _around(groups: Ints, low: Ints, high: Ints, behind: int, reduces: bool) -> list[Round]:
    """p-1 rounds, in which member i sends chunk i-behind-s to its right neighbour, i+1."""
    p = groups.shape[1]
    bounds, i = cut(low, high, p), np.arange(p)
    chunks = [(i - behind - s) % p for s in range(p - 1)]
    return [parallel_round(groups, i, (i + 1) % p, bounds[:, c], bounds[:, c + 1], reduces) for c in chunks]


def pairwise_reduce_scatter(groups: Ints, low: Ints, high: Ints) -> list[Round]:
    """p-1 rounds; in round s member i sends chunk i+s straight to its owner."""
    p = groups.shape[1]
    bounds, i = cut(low, high, p), np.arange(p)
    return [
        parallel_round(groups, i, (i + s) % p, bounds[:, (i + s) % p], bounds[:, (i + s) % p + 1], True)
        for s in range(1, p)
    ]


def _power_below(p: int) -> int:
    return 1 << (p.bit_length() - 1)


def halving_reduce_scatter(groups: Ints, low: Ints, high: Ints) -> list[Round]:
    """Build lg p rounds, each sending half as much as the one before, starting with the farthest partner. If p is no
    power of two: members beyond the largest power of two m first send everything to member i-m, and receive their
    chunk at the end."""
    p = groups.shape[1]
    m = _power_below(p)
    bounds, i, extra = cut(low, high, p), np.arange(m), np.arange(m, p)
    rounds = [parallel_round(groups, extra, extra - m, low[:, None], high[:, None], True)] if len(extra) else []
    half = m // 2
    while half:
        partner = i ^ half
        first = partner // half * half  # the partner's half of the block: members first .. first + half - 1
        parts = [(bounds[:, first], bounds[:, first + half])]
        beyond = np.minimum(first + m, p), np.minimum(first + half + m, p)
        parts.append((bounds[:, beyond[0]], bounds[:, beyond[1]]))
        rounds.append(merge_rounds([parallel_round(groups, i, partner, a, b, True) for a, b in parts]))
        half //= 2
    if len(extra):
        rounds.append(parallel_round(groups, extra - m, extra, bounds[:, extra], bounds[:, extra + 1], False))
    return rounds


def bruck_all_gather(groups: Ints, low: Ints, high: Ints) -> list[Round]:
    """ceil(lg p) rounds for any p; in round k member i sends its chunks i, i+1, ... to i-2^k."""
    p = groups.shape[1]
    bounds, i = cut(low, high, p), np.arange(p)
    rounds, have = [], 1
    while have < p:
        count = min(have, p - have)
        stop = i + count
        direct = parallel_round(groups, i, (i - have) % p, bounds[:, i], bounds[:, np.minimum(stop, p)], False)
        zero = np.zeros_like(i)
        wrapped = parallel_round(
            groups, i, (i - have) % p, bounds[:, zero], bounds[:, np.maximum(stop - p, 0)], False
        )
        rounds.append(merge_rounds([direct, wrapped]))
        have += count
    return rounds


def _folded(groups: Ints, low: Ints, high: Ints, inner: Callable[[Ints, Ints, Ints], list[Round]]) -> list[Round]:
    """Extend an all-reduce for powers of two to any p: surplus members add their buffers to the others' first and get
    the result back at the end, which costs 2 more messages of the entire buffer."""
    p = groups.shape[1]
    m = _power_below(p)
    extra = np.arange(m, p)
    if not len(extra):
        return inner(groups, low, high)
    buffer = low[:, None], high[:, None]
    fold = parallel_round(groups, extra, extra - m, *buffer, True)
    unfold = parallel_round(groups, extra - m, extra, *buffer, False)
    return [fold, *inner(groups[:, :m], low, high), unfold]


def doubling_all_reduce(groups: Ints, low: Ints, high: Ints) -> list[Round]:
    """Return lg p rounds in which partners exchange the entire buffer."""

    def inner(groups: Ints, low: Ints, high: Ints) -> list[Round]:
        i = np.arange(groups.shape[1])
        steps = [1 << k for k in range((groups.shape[1] - 1).bit_length())]
        return [parallel_round(groups, i, i ^ step, low[:, None], high[:, None], True) for step in steps]

    return _folded(groups, low, high, inner)


def rabenseifner_all_reduce(groups: Ints, low: Ints, high: Ints) -> list[Round]:
    """Recursive halving, then recursive doubling: 2 lg p rounds and 2n(p-1)/p bytes (Rabenseifner 2004)."""

    def inner(groups: Ints, low: Ints, high: Ints) -> list[Round]:
        scatter = halving_reduce_scatter(groups, low, high)
        return scatter + reverse(scatter, reduces=False)

    return _folded(groups, low, high, inner)


def ring_all_reduce(groups: Ints, low: Ints, high: Ints) -> list[Round]:
    """Reduce-scatter and all-gather, both by ring: 2(p-1) rounds, in each of which every member sends to its right;
    the fewest bytes."""
    return ring_reduce_scatter(groups, low, high) + _around(groups, low, high, 0, False)


def pairwise_all_to_all(starts: Ints, lengths: Ints) -> list[Round]:
    """p-1 rounds; in round s rank i sends its block straight to i+s."""
    p = len(starts)
    i = np.arange(p)
    return [Round(i, to, starts[i, to], lengths[i, to], False) for to in ((i + s) % p for s in range(1, p))]


def bruck_all_to_all(starts: Ints, lengths: Ints) -> list[Round]:
    """ceil(lg p) rounds; a block with distance d to go moves 2^k ahead for every bit k of d (Bruck et al.)."""
    p = len(starts)
    i, d = np.arange(p), np.arange(p)[:, None]
    to = (i + d) % p
    starts, lengths = starts[i, to], lengths[i, to]  # (distance, from)
    rounds = []
    for k in range((p - 1).bit_length()):
        moves = np.nonzero(d[:, 0] >> k & 1)[0]
        holder = to[moves & ((1 << k) - 1)]  # where the lower bits of d have moved it
        ahead = to[(moves & ((1 << k) - 1)) + (1 << k)]
        rounds.append(Round(holder, ahead, starts[moves], lengths[moves], False))
    return rounds


def hierarchical_all_reduce(groups: Ints, low: Ints, high: Ints, tiers: tuple[int, ...]) -> list[Round]:
    """Reduce-scatter inside the innermost tier, all-reduce of every chunk across, all-gather inside.

    `tiers`: sizes, innermost first, with product p; each level works on 1/size of the elements at the level below it.
    """
    p, q = groups.shape[1], tiers[0]
    if len(tiers) == 1:
        return ring_all_reduce(groups, low, high)
    hosts = p // q
    inside = groups.reshape(-1, q)  # (groups x hosts, q)
    scatter = ring_reduce_scatter(inside, np.repeat(low, hosts), np.repeat(high, hosts))
    across = groups.reshape(len(groups), hosts, q).transpose(0, 2, 1).reshape(-1, hosts)  # (groups x q, hosts)
    bounds = cut(low, high, q)
    up = hierarchical_all_reduce(across, bounds[:, :-1].ravel(), bounds[:, 1:].ravel(), tiers[1:])
    return scatter + up + reverse(scatter, reduces=False)
