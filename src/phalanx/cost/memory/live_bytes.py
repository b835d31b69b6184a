"""Live bytes along a pass, and what norms hold of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.spec.model.spec import ModelSpec


@dataclass
class Walk:
    """Live bytes above those at the start, and the most there were."""

    live: Column = 0
    highest: Column = 0
    masked: Column = 0
    """The most until masks are not needed any more."""

    def take(self, *sizes: Column) -> None:
        """Tensors are allocated."""
        self.live = self.live + sum(sizes)
        self.highest = np.maximum(self.highest, self.live)

    def give(self, *sizes: Column) -> None:
        """Tensors are freed."""
        self.live = self.live - sum(sizes)

    def touch(self, *sizes: Column) -> None:
        """Tensors are there for a moment."""
        self.take(*sizes)
        self.give(*sizes)


def statistics(spec: ModelSpec, t: Column, e: int) -> Column:
    """What a norm keeps beside its input and output."""
    return t * (max(e, 4) if spec.norm == "rms" else 2 * e)


def normed(spec: ModelSpec, t: Column, e: int) -> Column:
    """What a norm of the stream holds in its backward pass, its result included, when the normed input has given way
    to its gradient."""
    return rms_temporaries(t, spec.hidden, e) if spec.norm == "rms" else t * spec.hidden * e


def rms_temporaries(rows: Column, width: int, e: int) -> Column:
    """What an RMSNorm's backward pass holds, its result included (nn/functions.py)."""
    wide = max(e, 4)
    return 3 * rows * width * wide if e < 4 else 2 * rows * width * wide + rows * wide
