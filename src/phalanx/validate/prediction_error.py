"""Predictions beside measurements, row by row, and their scores as a table of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.analytic.chips import system
from phalanx.cost.analytic.fitted_constants import CONSTANTS
from phalanx.cost.analytic.memory import memory
from phalanx.cost.analytic.stacks import profile
from phalanx.cost.analytic.step import step
from phalanx.cost.hardware.columns import Column, gather, take
from phalanx.validate.from_row import Case, cases
from phalanx.validate.records import GIB, Row
from phalanx.validate.scores import errors, fit
from phalanx.validate.systems import benched, description, measured

Kind = str
"""What a published memory is: allocated after a step (steady), at its peak, or then on the last rank; reserved by the
allocator, or that on the first rank; shown by the driver."""


@dataclass(frozen=True)
class Pair:
    """One quantity of a row: predicted and measured, seconds or bytes."""

    row: Row
    predicted: float
    measured: float


@dataclass(frozen=True)
class Comparison:
    """All pairs by quantity, and what is said of whether rows fit: (row, predicted, measured, share of the card)."""

    time: list[Pair]
    allocated: list[Pair]
    reserved: list[Pair]
    shown: list[Pair]
    fits: list[tuple[Row, bool, bool, float]]
    skipped: list[tuple[Row, str]]
    predicted: int


def priced(found: Sequence[Case], constants: Mapping[str, float] = CONSTANTS) -> tuple[Column, Any]:
    """Seconds of a step and Memory of each case, in columns."""
    names = sorted({c.profile for c in found})
    stacks = take([profile(n, constants) for n in names], np.array([names.index(c.profile) for c in found]))
    kinds = sorted({description(c.row) for c in found})
    which = np.array([kinds.index(description(c.row)) for c in found])
    systems = take([system(*kind, constants=constants) for kind in kinds], which)
    systems = measured(systems, gather([benched(c.row) for c in found]))
    shapes, layouts = gather([c.shape for c in found]), gather([c.layout for c in found])
    found_step = step(shapes, layouts, systems, stacks)
    room = np.asarray(systems.memory_bytes - stacks.context_bytes)
    held = memory(shapes, layouts, stacks, found_step.ahead, room)
    return np.asarray(found_step.seconds), (held, np.asarray(systems.memory_bytes), room)


def compare(rows: Sequence[Row], constants: Mapping[str, float] = CONSTANTS) -> Comparison:
    """Predict every row that is specified enough, and set it beside what was measured."""
    found, skipped = cases(list(rows))
    if not found:
        return Comparison([], [], [], [], [], skipped, 0)
    seconds, (held, card, room) = priced(found, constants)
    time: list[Pair] = []
    allocated: list[Pair] = []
    reserved: list[Pair] = []
    shown: list[Pair] = []
    fits = []
    for i, c in enumerate(found):
        row = c.row
        ran = row["status"] in ("", "ok")
        if c.measured_s and ran:
            time.append(Pair(row, float(seconds[i]), c.measured_s))
        steady, peak = row.number("mem_allocated_gb"), row.number("peak_mem_gb")
        if steady and ran:
            allocated.append(Pair(row, float(held.steady[i]), steady * GIB))
        if peak and ran:
            kind = memory_kind(row)
            at = getattr(held, kind)[i]
            into = {"reserved": reserved, "first": reserved, "shown": shown}.get(kind, allocated)
            into.append(Pair(row, float(at), peak * GIB))
        if not ran or peak:
            fits.append((row, bool(held.reserved[i] <= room[i]), ran, float(held.reserved[i] / card[i])))
    return Comparison(time, allocated, reserved, shown, fits, skipped, len(found))


def memory_kind(row: Row) -> Kind:
    said = row["mem_kind"]
    if "logging rank" in said:
        return "last"
    if "max_allocated" in said:
        return "peak"
    if "reserved" in said:
        return "first" if row["framework"] == "nanotron" else "reserved"  # its first rank writes the table
    return "shown"


def scores(c: Comparison) -> dict[str, Any]:
    """The scores of `phalanx validate --json`: overall, by source family, by source group, and by
    kinds of runs that a family has."""
    families = sorted(
        {p.row.family for p in (*c.time, *c.allocated, *c.reserved, *c.shown)} | {f[0].family for f in c.fits}
    )
    groups = sorted({p.row.group for p in c.time} | {f[0].group for f in c.fits})
    kinds = sorted({kinds_of(p.row) for p in c.time})
    reasons: dict[str, Counter[str]] = {}
    for row, why in c.skipped:
        reasons.setdefault(row.family or row["hardware"], Counter())[why] += 1
    return {
        **_scored(c, lambda row: True),
        "by_family": {name: _scored(c, lambda row, name=name: row.family == name) for name in families},
        "by_group": {name: _scored(c, lambda row, name=name: row.group == name) for name in groups},
        "by_kind": {name: _scored(c, lambda row, name=name: kinds_of(row) == name) for name in kinds},
        "predicted": c.predicted,
        "skipped": {
            "n": len(c.skipped),
            "reasons": {family: dict(found.most_common()) for family, found in sorted(reasons.items())},
            "rows": {row.name: why for row, why in c.skipped},
        },
    }


def kinds_of(row: Row) -> str:
    """Runs of a family that are alike: vTrain's on one node or on many; pipelines or none; experts or none."""
    if row.family == "vtrain":
        return "vtrain/single-node" if "single" in row.group else "vtrain/multi-node"
    if row.family == "hf-ultrascale":
        return f"hf-ultrascale/pp{'=' if row['pp'] in ('', '1') else '>'}1"
    if row.family == "nvidia-dgxc-benchmarking" and row["framework"] in ("MaxText", "PAX"):
        return "nvidia-dgxc-benchmarking/JAX"
    return f"{row.family}/{'MoE' if row.moe else 'dense'}"


def _scored(c: Comparison, wanted: Any) -> dict[str, Any]:
    found = {}
    for name, pairs in (
        ("time", c.time),
        ("memory_allocated", c.allocated),
        ("memory_reserved", c.reserved),
        ("memory_shown", c.shown),
    ):
        of = [p for p in pairs if wanted(p.row)]
        found[name] = errors([p.predicted for p in of], [p.measured for p in of])
    fits = [f for f in c.fits if wanted(f[0])]
    near = [f for f in fits if 0.5 <= f[3] <= 2]
    for name, of_fit in (("fit", fits), ("fit_near", near)):
        found[name] = fit([f[1] for f in of_fit], [f[2] for f in of_fit])
    return found
