"""The slice size of the head: how many logits a rank computes at a time."""

from __future__ import annotations

LOGITS_AT_ONCE = 2**17
"""The cross-entropy works on slices of this many logits, which stay in a core's cache (nn/functional.py)."""
