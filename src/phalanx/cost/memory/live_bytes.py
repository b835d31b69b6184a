"""Walk: live bytes along a pass, as tensors are allocated and freed; and the bytes that norms hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.spec.model.spec import ModelSpec


@dataclass
class Walk:
    """Live bytes above those at the start of a pass, and their peak so far."""

    live: Column = 0
    highest: Column = 0
    masked: Column = 0
    """The peak until masks are no longer needed."""

    def alloc(self, *sizes: Column) -> None:
        """Allocate tensors of these sizes, in bytes, at once."""
        self.live = self.live + sum(sizes)
        self.highest = np.maximum(self.highest, self.live)

    def free(self, *sizes: Column) -> None:
        """Free tensors of these sizes, in bytes."""
        self.live = self.live - sum(sizes)

    def touch(self, *sizes: Column) -> None:
        """Allocate tensors and free them again."""
        self.alloc(*sizes)
        self.free(*sizes)


def statistics(spec: ModelSpec, t: Column, e: int) -> Column:
    """Return the bytes of statistics that a norm of t tokens keeps besides its input and output."""
    return t * (max(e, 4) if spec.norm == "rms" else 2 * e)


def normed(spec: ModelSpec, t: Column, e: int) -> Column:
    """Return the bytes that a norm of the residual stream holds in its backward pass, with its result, once the
    normed input has been replaced by its gradient."""
    return rms_temporaries(t, spec.hidden, e) if spec.norm == "rms" else t * spec.hidden * e


def rms_temporaries(rows: Column, width: int, e: int) -> Column:
    """Return the bytes that an RMSNorm's backward pass holds, with its result (nn/norms.py)."""
    wide = max(e, 4)
    return 3 * rows * width * wide if e < 4 else 2 * rows * width * wide + rows * wide
