"""Reduce-scatter, all-gather, all-reduce and all-to-all in chunks.

Builders take `groups`, (groups, p) ranks that run the same algorithm side by side, and the interval [low, high) of
each group, and return rounds. Sources: Thakur, Rabenseifner & Gropp 2005; Bruck et al. 1997; Patarasuk & Yuan 2009.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from phalanx.schedule.collectives.ir import Ints, Round, cut, merge_rounds, parallel_round, reverse


def ring_reduce_scatter(groups: Ints, low: Ints, high: Ints) -> list[Round]:
    """p-1 rounds; member i sends chunk i-1-s to i+1 and ends with chunk i (Patarasuk & Yuan)."""
    p = groups.shape[1]
    bounds, i = cut(low, high, p), np.arange(p)
    return [
        parallel_round(groups, i, (i + 1) % p, bounds[:, (i - 1 - s) % p], bounds[:, (i - 1 - s) % p + 1], True)
        for s in range(p - 1)
    ]


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
    """Reduce-scatter and all-gather, both by ring: 2(p-1) rounds, the fewest bytes."""
    scatter = ring_reduce_scatter(groups, low, high)
    # Reversed, the ring turns the other way, which is just as good.
    return scatter + reverse(scatter, reduces=False)


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
