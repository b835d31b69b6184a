"""Criteria in numbers for when an axis of parallelism pays, which rules of thumb leave out.

T tokens of a rank and micro-batch, h the model's width, s the sequence, M micro-batches, P ranks of the axis. A ridge
is a chip's FLOP/s over the bytes/s of its memory, or of the link in one direction (`phalanx tables roofline`):

    tp    (T, h) by (h, h/tp) in 2 bytes: 2 T h h/tp FLOP over 2 (T h + h h/tp + T h/tp) bytes, h/(tp+1) for large T
    pp    (P-1)/(M+P-1) <= 1/5 if M >= 4 (P-1)
    cp    a ring's step: 4 (s/cp)² h FLOP of attention over 4 (s/cp) h_kv bytes of keys and values
    dp    6 N T FLOP over 4 N bytes of an all-reduce; ZeRO-3: over 6 N, all-gathered twice and reduce-scattered
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.rows import Rows, record


@dataclass(frozen=True)
class Criterion:
    """When an axis pays."""

    axis: str
    pays: str
    holds: str
    """The criterion, in numbers."""
    lints: tuple[str, ...]
    """The lints of `phalanx lint` for jobs that do not meet it."""


CRITERIA = tuple(Rows(Path(__file__).with_suffix(".toml"), record(Criterion, "axis")).values())


def sheet() -> Sheet:
    """Tabulate the criteria."""
    return Sheet(
        "criteria: when an axis pays",
        columns("axis", "asked for when", "pays if", "lint"),
        [(c.axis, c.pays, c.holds, ", ".join(c.lints)) for c in CRITERIA],
        "T: tokens of a rank and micro-batch, h: width; ridges: `phalanx tables roofline`; "
        "lint: what says that it does not",
        charted=False,
    )
