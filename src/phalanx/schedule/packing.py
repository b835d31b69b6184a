"""From documents to sequences, and from sequences to the micro-batches of ranks.

Packing is first-fit over documents in random order: each goes into the first sequence that has room, as
Megatron-Bridge packs a data set before a training (first_fit_shuffle).

Dealing by cost: sequences sorted by cost go to the ranks in groups, one to each, the costliest of a group to the rank
with the least so far. Micro-batches that meet then cost alike, and so do ranks.

Spreading: a document is computed by a group of ranks, the wider the longer it is, groups of a width side by side.
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def first_fit(lengths: Ints, slot: int) -> Ints:
    """Return the sequence that each document is packed into, (documents,). Lengths are at most `slot`."""
    free = np.full(len(lengths) + 1, slot, dtype=np.int64)
    place = np.empty(len(lengths), dtype=np.int64)
    first, least, used = 0, int(lengths.min()), 1  # sequences before `first` have no room for any
    for i, length in enumerate(lengths.tolist()):
        at = first + int(np.argmax(free[first : used + 1] >= length))
        place[i] = at
        free[at] -= length
        used = max(used, at + 1)
        while free[first] < least:
            first += 1
    return place


def deal(costs: Floats, ranks: int, by_cost: bool) -> Ints:
    """Return the index of the micro-batch that each rank computes in each round, (draws, rounds, ranks). `costs`:
    (draws, micro-batches); without `by_cost`, micro-batches are dealt in order."""
    draws, count = costs.shape
    if not by_cost:
        return np.broadcast_to(np.arange(count).reshape(-1, ranks), (draws, count // ranks, ranks))
    groups = np.argsort(-costs, axis=1, kind="stable").reshape(draws, -1, ranks)
    out = np.empty_like(groups)
    load, rows = np.zeros((draws, ranks)), np.arange(draws)[:, None]
    for turn in range(groups.shape[1]):
        order = np.argsort(load, axis=1, kind="stable")  # the least loaded rank first
        out[rows, turn, order] = groups[:, turn]
        load[rows, order] += costs[rows, groups[:, turn]]
    return out


def spread(costs: Floats, widths: Ints, least: Ints, ranks: int) -> tuple[Floats, Ints, Ints]:
    """Give documents to groups of ranks, widest and costliest first, each to the group that is free first, and return
    the seconds of each rank (ranks,), and of each document the width taken, as its place in `widths`, and the first
    rank of its group, (documents,).

    `costs`: seconds of a document at each width, (documents, widths); `widths`: ascending divisors of `ranks`;
    `least`: the narrowest group that holds it, as its place. A document that alone takes longer than all work shared
    equally is computed by a wider group, as long as that is faster."""
    rows = np.arange(len(costs))
    taken = least.copy()
    share = float((costs[rows, taken] * widths[taken]).sum()) / ranks
    for wider in range(1, len(widths)):
        slow = (taken == wider - 1) & (costs[rows, taken] > share) & (costs[:, wider] < costs[:, wider - 1])
        taken[slow] = wider
    load, begins = np.zeros(ranks), np.empty(len(costs), dtype=np.int64)
    for i in np.lexsort((-costs[rows, taken], -taken)).tolist():
        groups = load.reshape(-1, int(widths[taken[i]]))
        free = groups.max(axis=1)
        first = int(free.argmin())
        groups[first] = free[first] + costs[i, taken[i]]
        begins[i] = first * groups.shape[1]
    return load, taken, begins
