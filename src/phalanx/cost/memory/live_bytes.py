"""Live bytes along a pass, as tensors are allocated and freed (Walk), bytes of a unit (Footprint), and bytes of
norms."""

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
    """The peak until masks are no longer needed, and the peak after that until rotary angles are no longer needed."""

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


@dataclass(frozen=True)
class Pass:
    """Live bytes of a pass above those at its start: the peak (`highest`) and those at its end (`change`). `masked`:
    the peak until masks are no longer needed."""

    highest: Column
    change: Column
    masked: Column = 0

    @classmethod
    def of(cls, walk: Walk) -> Pass:
        """Return the Pass of a finished walk."""
        return cls(walk.highest, walk.live, walk.masked)


@dataclass(frozen=True)
class Parts:
    """A backward pass split in two, I and W. The gradient of the output is live when I begins, that of the input when
    it ends."""

    inputs: Pass
    weights: Pass


@dataclass(frozen=True)
class Footprint:
    """Bytes of one unit and micro-batch.

    `kept`: allocated forward, freed backward. `forward`: peak of the forward pass's temporaries above `kept`.
    `backward`: temporaries above the live bytes at the beginning of the backward pass. `leaves`: bytes left after the
    backward pass (the gradient that flows on, a shared weight's partial gradient). `masked`: for a block, `backward`
    until masks are no longer needed.
    """

    kept: Column
    forward: Column
    backward: Column
    leaves: Column
    masked: Column = 0
    parts: Parts | None = None
    """The backward pass split in two, for layers that can defer weight gradients."""


def statistics(spec: ModelSpec, t: Column, e: int) -> Column:
    """Return the bytes of statistics that a norm of t tokens keeps in addition to its input and output."""
    return t * (max(e, 4) if spec.norm == "rms" else 2 * e)


def normed(spec: ModelSpec, t: Column, e: int) -> Column:
    """Return the bytes that a norm of the residual stream holds in its backward pass, with its result, once the
    normed input has been replaced by its gradient."""
    return rms_temporaries(t, spec.hidden, e) if spec.norm == "rms" else t * spec.hidden * e


def rms_temporaries(rows: Column, width: int, e: int) -> Column:
    """Return the bytes that an RMSNorm's backward pass holds, with its result (nn/norms.py)."""
    wide = max(e, 4)
    return 3 * rows * width * wide if e < 4 else 2 * rows * width * wide + rows * wide
