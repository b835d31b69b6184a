"""What a schedule that fails its proof raises."""

from __future__ import annotations


class Unproved(ValueError):
    """A schedule that does not do what it should; the message names rank, chunk and round."""
