"""The error that a schedule raises when it fails its proof."""

from __future__ import annotations


class Unproved(ValueError):
    """A schedule that does not do what it must. The message names rank, action or chunk, and round."""
