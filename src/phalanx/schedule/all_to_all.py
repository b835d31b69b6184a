"""All-to-all, in even or uneven blocks.

`starts` and `lengths`, (p, p), say where the block from rank i to rank j lies in the address space, and its size.
Sources: Thakur, Rabenseifner & Gropp 2005 (pairwise); Bruck et al. 1997.
"""

from __future__ import annotations

import numpy as np

from phalanx.schedule.transfers import Ints, Round


def pairwise_all_to_all(starts: Ints, lengths: Ints) -> list[Round]:
    """p-1 rounds; in round s rank i sends its block straight to i+s."""
    p = len(starts)
    i = np.arange(p)
    return [Round(i, to, starts[i, to], lengths[i, to], False) for to in ((i + s) % p for s in range(1, p))]


def bruck_all_to_all(starts: Ints, lengths: Ints) -> list[Round]:
    """ceil(lg p) rounds; a block that has distance d to go moves 2^k ahead for every bit k of d."""
    p = len(starts)
    i, d = np.arange(p), np.arange(p)[:, None]
    to = (i + d) % p
    starts, lengths = starts[i, to], lengths[i, to]  # (distance, from)
    rounds = []
    for k in range((p - 1).bit_length()):
        moves = np.nonzero(d[:, 0] >> k & 1)[0]
        holder = to[moves & ((1 << k) - 1)]  # where the lower bits of d have brought it
        ahead = to[(moves & ((1 << k) - 1)) + (1 << k)]
        rounds.append(Round(holder, ahead, starts[moves], lengths[moves], False))
    return rounds
