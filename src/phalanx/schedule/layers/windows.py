"""Attention in a sliding window over long sequences, in bands of neighbouring queries: a band reads the keys that any
of its queries sees, so that neither work nor masks grow with the square of the sequence.

    band     queries low .. high and the keys first .. high, first = low - window + 1 or 0
    mask     (BAND, BAND + window - 1), the same for every band but for its edges
"""

FROM = 4096
"""Length in tokens from which on a sequence is computed in bands; shorter ones have a mask of all their pairs."""


def banded(seq: int, window: int | None) -> bool:
    """Whether a window's attention over `seq` tokens is computed in bands."""
    return window is not None and seq >= FROM and queries(window) + window <= seq // 2


def queries(window: int) -> int:
    """Return the number of queries of a band: as few as keep a device busy, since each reads the band's last key."""
    return max(128, window // 4)


def bands(seq: int, window: int) -> list[tuple[int, int, int]]:
    """Return (low, high, first) of every band: its queries, and its first key."""
    n = queries(window)
    return [(low, min(low + n, seq), max(low - window + 1, 0)) for low in range(0, seq, n)]


def mask_elements(seq: int, window: int) -> int:
    """Return the elements of the mask of a window over `seq` tokens, which is built once."""
    return queries(window) * (queries(window) + window - 1) if banded(seq, window) else seq * seq


def pairs(seq: int, window: int) -> int:
    """Return the number of (query, key) pairs whose products the bands of a sequence compute."""
    return sum((high - low) * (high - first) for low, high, first in bands(seq, window))
