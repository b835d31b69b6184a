"""How much of the head's logits a rank computes at once."""

from __future__ import annotations

LOGITS_AT_ONCE = 2**17
"""The cross-entropy works on slices of so many logits, which stay in a core's cache (nn/functions.py)."""
