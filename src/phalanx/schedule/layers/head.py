"""Slicing of the head: how many logits a rank computes at a time, and whether it ever holds all of them.

The loss of some tokens needs the logits of these alone. So the head can go through its tokens in slices: logits,
softmax - onehot in their place, and at once both products with that, for the gradients of the input and the weight.
What is kept for the backward pass then is (tokens + vocab) x hidden, not tokens x vocab; FLOPs are the same, all in
the forward pass. Where tp ranks have a part of the vocabulary each, every slice takes the two all-reduces of the
loss, of its own tokens: slices are then few, and of equal size, whatever the device.

A schedule that splits backward passes fills its bubbles with weights' gradients, the head's too: it keeps all logits.

Reference: Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", section 3.2.
"""

from typing import Any

import numpy as np

Column = Any
"""A number, or a NumPy array of them."""

LOGITS_AT_ONCE = 2**17
"""The cross-entropy works on slices of this many logits, which stay in a core's cache (nn/functional.py)."""
ROWS_AT_ONCE = 128
"""Minimum tokens in a slice: smaller products would be slow."""
MOST_SLICES = 64
"""Maximum slices of a micro-batch: each adds to the whole gradient of the weight."""
SLICES_OVER_RANKS = (4, 2)
"""Candidate slice counts where tp ranks reduce the loss, largest first: each slice waits for two all-reduces."""


def sliced(tokens: Column, vocab: Column, hidden: Column, e: int) -> Column:
    """Whether a head with the full vocabulary goes through its tokens in slices: where that keeps fewer bytes than
    all logits. `e`: bytes per element."""
    return kept_bytes(tokens, vocab, hidden, e) < tokens * vocab * e


def kept_bytes(tokens: Column, vocab: Column, hidden: Column, e: int) -> Column:
    """Return the bytes that a sliced head keeps: the gradients of the input, and of the weight, summed in 4 bytes or
    more."""
    return tokens * hidden * e + vocab * hidden * np.maximum(e, 4)


def rows_of_slice(tokens: Column, vocab: Column, least: int = ROWS_AT_ONCE, logits: int = LOGITS_AT_ONCE) -> Column:
    """Return the number of tokens of a slice."""
    rows = np.maximum(np.maximum(least, logits // vocab), -(-tokens // MOST_SLICES))
    return np.minimum(tokens, rows)


def slices_over_ranks(tokens: Column, vocab: Column, hidden: Column, e: int) -> Column:
    """Return the number of equal slices into which tp ranks, each with `vocab` rows of the head, cut `tokens` tokens;
    1: holding all logits takes less memory."""
    n: Column = 1
    for count in reversed(SLICES_OVER_RANKS):
        n = np.where((tokens % count == 0) & (tokens >= count * ROWS_AT_ONCE), count, n)
    less = n * kept_bytes(tokens, vocab, hidden, e) < (n - 1) * (tokens * vocab * e)
    return np.where(less, n, 1)
