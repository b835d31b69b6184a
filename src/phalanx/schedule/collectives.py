"""Collective algorithms, written once, for any number of ranks and any size.

Each builder takes `groups`, (groups, p) ranks that run the same algorithm side by side, and the interval [low, high)
of each group; so an algorithm over all ranks and one over every host at once are the same code, and hierarchies are
compositions. Sources: Thakur, Rabenseifner & Gropp 2005; Bruck et al. 1997; Patarasuk & Yuan 2009.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from phalanx.schedule.transfers import Ints, Round, Schedule, compose, cut, intervals, reverse
from phalanx.spec.errors import InputError, nearest

Rounds = list[Round]


def _round(groups: Ints, source: Ints, destination: Ints, low: Ints, high: Ints, reduces: bool) -> Round:
    """A round from member indices (members,) and intervals (groups, members)."""
    shape = (len(groups), len(source))
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    return Round(groups[:, source], groups[:, destination], low, high - low, reduces)


def ring_reduce_scatter(groups: Ints, low: Ints, high: Ints) -> Rounds:
    """p-1 rounds; member i sends chunk i-1-s to i+1 and ends with chunk i (Patarasuk & Yuan)."""
    p = groups.shape[1]
    bounds, i = cut(low, high, p), np.arange(p)
    return [
        _round(groups, i, (i + 1) % p, bounds[:, (i - 1 - s) % p], bounds[:, (i - 1 - s) % p + 1], True)
        for s in range(p - 1)
    ]


def pairwise_reduce_scatter(groups: Ints, low: Ints, high: Ints) -> Rounds:
    """p-1 rounds; in round s member i sends chunk i+s straight to its owner."""
    p = groups.shape[1]
    bounds, i = cut(low, high, p), np.arange(p)
    return [
        _round(groups, i, (i + s) % p, bounds[:, (i + s) % p], bounds[:, (i + s) % p + 1], True) for s in range(1, p)
    ]


def _power_below(p: int) -> int:
    return 1 << (p.bit_length() - 1)


def halving_reduce_scatter(groups: Ints, low: Ints, high: Ints) -> Rounds:
    """lg p rounds, halving what is sent each time, far partner first. Other p: the members beyond the largest power
    of two m first give everything to member i-m, and get their chunk from it in the end."""
    p = groups.shape[1]
    m = _power_below(p)
    bounds, i, extra = cut(low, high, p), np.arange(m), np.arange(m, p)
    rounds = [_round(groups, extra, extra - m, low[:, None], high[:, None], True)] if len(extra) else []
    half = m // 2
    while half:
        partner = i ^ half
        first = partner // half * half  # the partner's half of the block: members first .. first + half - 1
        parts = [(bounds[:, first], bounds[:, first + half])]
        beyond = np.minimum(first + m, p), np.minimum(first + half + m, p)
        parts.append((bounds[:, beyond[0]], bounds[:, beyond[1]]))
        rounds.append(_joined([_round(groups, i, partner, a, b, True) for a, b in parts]))
        half //= 2
    if len(extra):
        rounds.append(_round(groups, extra - m, extra, bounds[:, extra], bounds[:, extra + 1], False))
    return rounds


def _joined(parts: Rounds) -> Round:
    """Parts of one round as one: several intervals of one message."""
    return Round(
        np.concatenate([r.source.ravel() for r in parts]),
        np.concatenate([r.destination.ravel() for r in parts]),
        np.concatenate([r.offset.ravel() for r in parts]),
        np.concatenate([r.length.ravel() for r in parts]),
        parts[0].reduces,
    )


def bruck_all_gather(groups: Ints, low: Ints, high: Ints) -> Rounds:
    """ceil(lg p) rounds for any p; member i sends the chunks i, i+1, ... that it has to i-2^k."""
    p = groups.shape[1]
    bounds, i = cut(low, high, p), np.arange(p)
    rounds, have = [], 1
    while have < p:
        count = min(have, p - have)
        stop = i + count
        direct = _round(groups, i, (i - have) % p, bounds[:, i], bounds[:, np.minimum(stop, p)], False)
        zero = np.zeros_like(i)
        wrapped = _round(groups, i, (i - have) % p, bounds[:, zero], bounds[:, np.maximum(stop - p, 0)], False)
        rounds.append(_joined([direct, wrapped]))
        have += count
    return rounds


def binomial_broadcast(groups: Ints, low: Ints, high: Ints, root: int = 0) -> Rounds:
    """ceil(lg p) rounds; those who have it send it 2^k further, the farthest first."""
    p = groups.shape[1]
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        sender = np.arange(0, p, 2 << k)
        sender = sender[sender + (1 << k) < p]
        receiver = sender + (1 << k)
        rounds.append(_round(groups, (sender + root) % p, (receiver + root) % p, low[:, None], high[:, None], False))
    return rounds


def flat_broadcast(groups: Ints, low: Ints, high: Ints, root: int = 0) -> Rounds:
    """p-1 rounds; the root sends to one after the other."""
    p = groups.shape[1]
    others = [(root + s) % p for s in range(1, p)]
    return [
        _round(groups, np.array([root]), np.array([other]), low[:, None], high[:, None], False) for other in others
    ]


def chain_broadcast(groups: Ints, low: Ints, high: Ints, root: int = 0, segments: int = 8) -> Rounds:
    """p-2+m rounds; m segments travel down a chain behind each other."""
    p = groups.shape[1]
    bounds = cut(low, high, segments)
    rounds = []
    for r in range(p - 2 + segments):
        hop = np.arange(max(0, r - segments + 1), min(p - 1, r + 1))
        segment = r - hop
        rounds.append(
            _round(groups, (hop + root) % p, (hop + 1 + root) % p, bounds[:, segment], bounds[:, segment + 1], False)
        )
    return rounds


def binomial_scatter(groups: Ints, low: Ints, high: Ints, root: int = 0) -> Rounds:
    """ceil(lg p) rounds; a sender passes on the chunks of the subtree that it hands over. Chunk i is member i's."""
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
        rounds.append(_joined([_round(groups, source, destination, low_, high_, False) for low_, high_ in parts]))
    return rounds


def flat_scatter(groups: Ints, low: Ints, high: Ints, root: int = 0) -> Rounds:
    """p-1 rounds; the root sends each member its chunk."""
    p = groups.shape[1]
    bounds = cut(low, high, p)
    others = [np.array([(root + s) % p]) for s in range(1, p)]
    return [_round(groups, np.array([root]), o, bounds[:, o], bounds[:, o + 1], False) for o in others]


def _folded(groups: Ints, low: Ints, high: Ints, inner: Callable[[Ints, Ints, Ints], Rounds]) -> Rounds:
    """An all-reduce for powers of two, made one for any p: the members beyond fold into the others and get the
    result back, 2 more messages of everything."""
    p = groups.shape[1]
    m = _power_below(p)
    extra = np.arange(m, p)
    if not len(extra):
        return inner(groups, low, high)
    whole = low[:, None], high[:, None]
    fold = _round(groups, extra, extra - m, *whole, True)
    unfold = _round(groups, extra - m, extra, *whole, False)
    return [fold, *inner(groups[:, :m], low, high), unfold]


def doubling_all_reduce(groups: Ints, low: Ints, high: Ints) -> Rounds:
    """lg p rounds in which partners exchange everything."""

    def inner(groups: Ints, low: Ints, high: Ints) -> Rounds:
        i = np.arange(groups.shape[1])
        steps = [1 << k for k in range((groups.shape[1] - 1).bit_length())]
        return [_round(groups, i, i ^ step, low[:, None], high[:, None], True) for step in steps]

    return _folded(groups, low, high, inner)


def rabenseifner_all_reduce(groups: Ints, low: Ints, high: Ints) -> Rounds:
    """Recursive halving, then recursive doubling: 2 lg p rounds and 2n(p-1)/p bytes (Rabenseifner 2004)."""

    def inner(groups: Ints, low: Ints, high: Ints) -> Rounds:
        scatter = halving_reduce_scatter(groups, low, high)
        return scatter + reverse(scatter, reduces=False)

    return _folded(groups, low, high, inner)


def ring_all_reduce(groups: Ints, low: Ints, high: Ints) -> Rounds:
    """Reduce-scatter and all-gather, both by ring: 2(p-1) rounds, the fewest bytes."""
    scatter = ring_reduce_scatter(groups, low, high)
    # Reversed, the ring turns the other way round, which is as good.
    return scatter + reverse(scatter, reduces=False)


def naive_all_reduce(groups: Ints, low: Ints, high: Ints) -> Rounds:
    down = flat_broadcast(groups, low, high)
    return reverse(down, reduces=True) + down


def binomial_all_reduce(groups: Ints, low: Ints, high: Ints) -> Rounds:
    down = binomial_broadcast(groups, low, high)
    return reverse(down, reduces=True) + down


def hierarchical_all_reduce(groups: Ints, low: Ints, high: Ints, tiers: tuple[int, ...]) -> Rounds:
    """Reduce-scatter inside the innermost tier, all-reduce of every chunk across, all-gather inside.

    `tiers`: sizes, innermost first, with product p; each level works on 1/size of what the level below had.
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


def pairwise_all_to_all(p: int, block: int) -> Rounds:
    """p-1 rounds; in round s rank i sends its block straight to i+s."""
    i = np.arange(p)
    length = np.full(p, block)
    return [Round(i, (i + s) % p, (i * p + (i + s) % p) * block, length, False) for s in range(1, p)]


def bruck_all_to_all(p: int, block: int) -> Rounds:
    """ceil(lg p) rounds; a block that has distance d to go moves 2^k ahead for every bit k of d."""
    a, d = (x.ravel() for x in np.meshgrid(np.arange(p), np.arange(p), indexing="ij"))
    rounds = []
    for k in range((p - 1).bit_length()):
        moves = (d >> k & 1).astype(bool)
        start, distance = a[moves], d[moves]
        holder = (start + (distance & ((1 << k) - 1))) % p
        offset = (start * p + (start + distance) % p) * block
        rounds.append(Round(holder, (holder + (1 << k)) % p, offset, np.full(len(holder), block), False))
    return rounds


_SCATTERS = {"ring": ring_reduce_scatter, "halving": halving_reduce_scatter, "pairwise": pairwise_reduce_scatter}
_ALL_REDUCES = {
    "naive": naive_all_reduce,
    "binomial": binomial_all_reduce,
    "doubling": doubling_all_reduce,
    "ring": ring_all_reduce,
    "rabenseifner": rabenseifner_all_reduce,
}
_BROADCASTS = {"flat": flat_broadcast, "binomial": binomial_broadcast, "chain": chain_broadcast}

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "broadcast": (*_BROADCASTS, "scatter_all_gather"),
    "reduce": ("flat", "binomial"),
    "scatter": ("flat", "binomial"),
    "gather": ("flat", "binomial"),
    "all_gather": ("ring", "doubling", "bruck"),
    "reduce_scatter": tuple(_SCATTERS),
    "all_to_all": ("pairwise", "bruck"),
    "all_reduce": (*_ALL_REDUCES, "hierarchical"),
}


def build(
    op: str, algorithm: str, ranks: int, size: int, root: int = 0, tiers: tuple[int, ...] | None = None
) -> Schedule:
    """The schedule of a collective over `ranks` ranks and a buffer of `size` elements (the gathered buffer; of an
    all-to-all each rank's send buffer, in equal blocks). `tiers` for hierarchical: sizes, innermost first.

    Raises InputError for what does not exist.
    """
    if op not in ALGORITHMS:
        raise InputError("--op", op, "is not a collective", nearest(op, ALGORITHMS))
    if algorithm not in ALGORITHMS[op]:
        raise InputError("algorithm", algorithm, f"{op} has no such algorithm", nearest(algorithm, ALGORITHMS[op]))
    if ranks < 1 or size < 0 or not 0 <= root < ranks:
        raise InputError("--ranks", ranks, "needs ranks >= 1, size >= 0 and a root among the ranks")
    if op == "all_to_all" and size % ranks:
        raise InputError("size", size, "all_to_all sends equal blocks", f"use a multiple of {ranks}")
    if tiers is not None and int(np.prod(tiers)) != ranks:
        raise InputError("--tiers", "x".join(map(str, tiers)), f"has not product {ranks}")
    groups, low, high = np.arange(ranks)[None], np.zeros(1, dtype=np.int64), np.full(1, size, dtype=np.int64)
    everyone = np.arange(ranks)
    whole = intervals(everyone, 0, size)
    bounds = cut(low, high, ranks)[0]
    own = intervals(everyone, bounds[:-1], np.diff(bounds))
    at_root = intervals(root, 0, size)
    space, start, end = size, whole, whole
    if op == "all_reduce":
        if algorithm == "hierarchical":
            rounds = hierarchical_all_reduce(groups, low, high, tiers or (ranks,))
        else:
            rounds = _ALL_REDUCES[algorithm](groups, low, high)
    elif op == "reduce_scatter":
        rounds, end = _SCATTERS[algorithm](groups, low, high), own
    elif op == "all_gather":
        start = own
        if algorithm == "bruck":
            rounds = bruck_all_gather(groups, low, high)
        else:
            dual = {"ring": ring_reduce_scatter, "doubling": halving_reduce_scatter}[algorithm]
            rounds = reverse(dual(groups, low, high), reduces=False)
    elif op in ("broadcast", "reduce"):
        if algorithm == "scatter_all_gather":
            gather = reverse(ring_reduce_scatter(groups, low, high), reduces=False)
            rounds = binomial_scatter(groups, low, high, root) + gather
        else:
            rounds = _BROADCASTS[algorithm](groups, low, high, root)
        start = at_root
        if op == "reduce":
            rounds, start, end = reverse(rounds, reduces=True), whole, at_root
    elif op in ("scatter", "gather"):
        rounds = {"flat": flat_scatter, "binomial": binomial_scatter}[algorithm](groups, low, high, root)
        start, end = at_root, own
        if op == "gather":
            rounds, start, end = reverse(rounds, reduces=False), own, at_root
    else:
        block, space = size // ranks, size * ranks
        rounds = {"pairwise": pairwise_all_to_all, "bruck": bruck_all_to_all}[algorithm](ranks, block)
        start = intervals(everyone, everyone * size, size)
        pairs = np.arange(ranks)[:, None] * ranks + everyone  # block i p + j
        end = intervals(np.broadcast_to(everyone, pairs.shape), pairs * block, block)
    return compose(op, algorithm, ranks, space, rounds, start, end)
