"""Live bytes along a pass while tensors are allocated and freed (Walk), the bytes of a unit (Footprint), and of
norms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.spec.model.spec import ModelSpec


@dataclass
class Walk:
    """Live bytes since the start of a pass (`live`), and their peak so far (`highest`)."""

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
    """Live bytes of a pass less those at its start: at the peak (`highest`) and at its end (`change`). `masked`: the
    peak until masks are no longer needed."""

    highest: Column
    change: Column
    masked: Column = 0

    @classmethod
    def from_walk(cls, walk: Walk) -> Pass:
        """Return the Pass of a finished walk."""
        return cls(walk.highest, walk.live, walk.masked)


@dataclass(frozen=True)
class Parts:
    """A backward pass split into I and W. The output's gradient is live when I begins, the input's when it ends."""

    inputs: Pass
    weights: Pass


@dataclass(frozen=True)
class Footprint:
    """Bytes of one unit and micro-batch. `kept`: allocated by the forward pass, freed by the backward pass.
    `forward`: peak of the forward pass's temporaries, in addition to `kept`. `backward`: peak of the backward pass's
    temporaries, in addition to the live bytes at its beginning. `leaves`: bytes left after the backward pass (the
    gradient that is passed on, a shared weight's partial gradient). `masked`: for a block, `backward` until masks are
    no longer needed.
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


def norm_temporaries(spec: ModelSpec, t: Column, e: int) -> Column:
    """Return the bytes of temporaries and result of a norm of the residual stream in its backward pass, once the
    normed input has been replaced by its gradient."""
    return rms_temporaries(t, spec.hidden, e) if spec.norm == "rms" else t * spec.hidden * e


def rms_temporaries(rows: Column, width: int, e: int) -> Column:
    """Return the bytes of an RMSNorm's temporaries and result in its backward pass (nn/norms.py)."""
    wide = max(e, 4)
    return 3 * rows * width * wide if e < 4 else 2 * rows * width * wide + rows * wide
