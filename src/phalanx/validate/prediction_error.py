"""Predictions compared with measurements, row by row, and their scores.

A row is also predicted with constants fitted without its family, as if the family had not been published.
`python -m calibration --leave-out` writes these; families on which no constant is fitted have none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cost.analytic.chips import system
from phalanx.cost.analytic.fitted_constants import fitted_constants
from phalanx.cost.analytic.memory import memory
from phalanx.cost.analytic.option_effects import with_options
from phalanx.cost.analytic.profile import Profile, profile
from phalanx.cost.analytic.step import Step, step
from phalanx.cost.hardware.columns import Column, gather, take
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.model_shape import Shape, gather_shapes
from phalanx.cost.ledger.rank_layout import LayoutColumns
from phalanx.validate.from_row import Case, cases
from phalanx.validate.models import is_hybrid
from phalanx.validate.records import GIB, Row
from phalanx.validate.scores import errors, fit
from phalanx.validate.systems import Benched, benchmarks_of, corrected_system, description

FILE = Path(__file__).parent / "data" / "left_out.json"
"""By name: the kinds of runs left out together (prediction_error.kinds_of), and the resulting constants that differ
from the shipped ones."""


@cache
def left_out_constants() -> tuple[tuple[frozenset[str], dict[str, float]], ...]:
    """Return (kinds of runs, all constants as fitted without them) for each family that is left out in turn."""
    return tuple(
        (frozenset(without["kinds"]), {**fitted_constants(), **without["constants"]})
        for without in json.loads(FILE.read_text()).values()
    )


Kind = str
"""Meaning of a published memory figure: peak allocated (`peak`; `last`: on the last pipeline rank); reserved by the
allocator (`reserved`; `first`: on the first pipeline rank); shown by the driver (`shown`)."""


@dataclass(frozen=True)
class Pair:
    """One quantity of a row: predicted and measured, seconds or bytes."""

    row: Row
    predicted: float
    measured: float


@dataclass(frozen=True)
class PredictionError:
    """All pairs, by quantity."""

    time: list[Pair]
    """Seconds of a step."""
    allocated: list[Pair]
    """Bytes of allocated memory."""
    reserved: list[Pair]
    """Bytes that the allocator reserved."""
    shown: list[Pair]
    """Bytes shown by the driver."""
    fits: list[tuple[Row, bool, bool, float]]
    """(row, whether it is predicted to fit, whether it fitted, predicted memory as a share of the card's)."""
    skipped: list[tuple[Row, str]]
    """Rows that could not be predicted, with the reason."""
    predicted: int
    """Rows that were predicted."""
    blind: dict[int, float]
    """Seconds of a step predicted with constants fitted without the row's family, by `id` of the row."""
    replaced: Counter[tuple[str, str, bool]]
    """Rows by (the stack that they name, its substitute, whether that is a generic one)."""
    generic: PredictionError | None = None
    """Pairs of rows priced with a generic stack; they are in no other field."""


def predicted_columns(
    cases: Sequence[Case], constants: Mapping[str, float] | None = None, benchmarks: Sequence[Benched] | None = None
) -> tuple[Column, Any]:
    """Predict all cases at once, in columns of one entry per case. `benchmarks`: microbenchmarks run along with
    each run; by default those stated in its row.

    Returns (seconds of a step, (Memory, bytes of the card, bytes of the card less the stack's context)).
    """
    predicted, shapes, layouts, systems, stacks = _predicted_step(cases, constants, benchmarks)
    room = np.asarray(systems.memory_bytes - stacks.context_bytes)
    predicted_memory = memory(shapes, layouts, stacks, predicted.ahead, room)
    return np.asarray(predicted.seconds), (predicted_memory, np.asarray(systems.memory_bytes), room)


def launch_shares(cases: Sequence[Case]) -> Column:
    """Return the share of each predicted step in which the GPU waits for launches."""
    predicted = _predicted_step(cases, None, None)[0]
    return np.asarray(predicted.terms["launch"] / predicted.seconds)


def _predicted_step(
    cases: Sequence[Case], constants: Mapping[str, float] | None, benchmarks: Sequence[Benched] | None
) -> tuple[Step, Shape, LayoutColumns, System, Profile]:
    # What adapters leave of a parameter's state depends on the model.
    keys = [(c.profile, str(c.options), str(c.model) if c.options.lora else "") for c in cases]
    first = {key: c for key, c in zip(reversed(keys), reversed(cases), strict=True)}
    names = sorted(first)
    stacks = take(
        [with_options(profile(name[0], constants), first[name].shape, first[name].options) for name in names],
        np.array([names.index(key) for key in keys]),
    )
    kinds = sorted({description(c.row) for c in cases})
    which = np.array([kinds.index(description(c.row)) for c in cases])
    systems = take([system(*kind, constants=constants) for kind in kinds], which)
    systems = corrected_system(systems, gather(benchmarks or [benchmarks_of(c.row) for c in cases]))
    shapes, layouts = gather_shapes([c.shape for c in cases]), gather([c.layout for c in cases])
    return step(shapes, layouts, systems, stacks), shapes, layouts, systems, stacks


def compare(rows: Sequence[Row], constants: Mapping[str, float] | None = None) -> PredictionError:
    """Predict every row that is specified well enough, and pair predictions with measurements. Rows priced with a
    generic stack are in the field `generic` alone."""
    usable, skipped = cases(list(rows))
    known = _compared([c for c in usable if not c.generic], constants)
    generic = [c for c in usable if c.generic]
    replaced = Counter((c.stack.stated, c.stack.name, c.generic) for c in usable if c.stack.stated)
    apart = _compared(generic, constants) if generic else None
    return replace(known, skipped=skipped, predicted=len(usable), replaced=replaced, generic=apart)


def _compared(usable: Sequence[Case], constants: Mapping[str, float] | None) -> PredictionError:
    if not usable:
        return PredictionError([], [], [], [], [], [], 0, {}, Counter())
    seconds, (memory_of, card, room) = predicted_columns(usable, constants)
    time: list[Pair] = []
    allocated: list[Pair] = []
    reserved: list[Pair] = []
    shown: list[Pair] = []
    fits = []
    for i, c in enumerate(usable):
        row = c.row
        ran = row.completed
        if c.measured_s and ran:
            time.append(Pair(row, float(seconds[i]), c.measured_s))
        steady, peak = row.number("mem_allocated_gb"), row.number("peak_mem_gb")
        if steady and ran:
            allocated.append(Pair(row, float(memory_of.steady[i]), steady * GIB))
        if peak and ran:
            kind = memory_kind(row)
            predicted = getattr(memory_of, kind)[i]
            into = {"reserved": reserved, "first": reserved, "shown": shown}.get(kind, allocated)
            into.append(Pair(row, float(predicted), peak * GIB))
        if not ran or peak:
            fits.append((row, bool(memory_of.reserved[i] <= room[i]), ran, float(memory_of.reserved[i] / card[i])))
    return PredictionError(
        time, allocated, reserved, shown, fits, [], len(usable), left_out_predictions(usable), Counter()
    )


def left_out_predictions(usable: Sequence[Case]) -> dict[int, float]:
    """Return the seconds of each timed case, by `id` of its row, predicted with constants fitted without its family;
    cases without such constants are left out."""
    seconds: dict[int, float] = {}
    for kinds, constants in left_out_constants():
        members = [c for c in usable if kinds_of(c.row) in kinds and c.measured_s and c.row.completed]
        if members:
            seconds |= {
                id(c.row): float(s) for c, s in zip(members, predicted_columns(members, constants)[0], strict=True)
            }
    return seconds


def memory_kind(row: Row) -> Kind:
    """Return the meaning of the row's peak memory, from its `mem_kind`; `shown` if that is not specific."""
    words = row["mem_kind"]
    if "logging rank" in words:
        return "last"
    if "max_allocated" in words:
        return "peak"
    if "reserved" in words:
        return "first" if row["framework"] == "nanotron" else "reserved"  # its first rank writes the table
    return "shown"


def scores(c: PredictionError) -> dict[str, Any]:
    """Score a comparison, as `phalanx validate --json` prints it: overall, and by source family, source group and
    kind of run; with the reasons why rows were skipped."""
    families = sorted(
        {p.row.family for p in (*c.time, *c.allocated, *c.reserved, *c.shown)} | {f[0].family for f in c.fits}
    )
    groups = sorted({p.row.group for p in c.time} | {f[0].group for f in c.fits})
    kinds = sorted({kinds_of(p.row) for p in c.time})
    reasons: dict[str, Counter[str]] = {}
    for row, why in c.skipped:
        reasons.setdefault(row.family or row["hardware"], Counter())[why] += 1
    summary = {
        **_scored(c, lambda row: True),
        "by_family": {name: _scored(c, _in_group(name, lambda row: row.family)) for name in families},
        "by_group": {name: _scored(c, _in_group(name, lambda row: row.group)) for name in groups},
        "by_kind": {name: _scored(c, _in_group(name, kinds_of)) for name in kinds},
        "predicted": c.predicted,
        "skipped": {
            "n": len(c.skipped),
            "reasons": {family: dict(counts.most_common()) for family, counts in sorted(reasons.items())},
            "rows": {row.name: why for row, why in c.skipped},
        },
        "replaced_stacks": [
            {"stated": stated, "priced_as": name, "generic": generic, "rows": n}
            for (stated, name, generic), n in sorted(c.replaced.items())
        ],
    }
    if c.generic:
        summary["generic_stacks"] = _scored(c.generic, lambda row: True)
    return summary


def kinds_of(row: Row) -> str:
    """Name the kind of a run within its family: one node or many, with a pipeline or without, hybrid, MoE or
    dense."""
    if row.family == "vtrain":
        return "vtrain/single-node" if "single" in row.group else "vtrain/multi-node"
    if row.family == "hf-ultrascale":
        return f"hf-ultrascale/pp{'=' if row['pp'] in ('', '1') else '>'}1"
    if row.family == "nvidia-dgxc-benchmarking" and row["framework"] in ("MaxText", "PAX"):
        return "nvidia-dgxc-benchmarking/JAX"
    if is_hybrid(row):
        return f"{row.family}/hybrid"
    return f"{row.family}/{'MoE' if row.moe else 'dense'}"


def _in_group(name: str, group: Callable[[Row], str]) -> Callable[[Row], bool]:
    """Return a test of whether a row's group has this name."""
    return lambda row: group(row) == name


def _scored(c: PredictionError, selects: Callable[[Row], bool]) -> dict[str, Any]:
    out = {}
    for name, pairs in (
        ("time", c.time),
        ("memory_allocated", c.allocated),
        ("memory_reserved", c.reserved),
        ("memory_shown", c.shown),
    ):
        selected = [p for p in pairs if selects(p.row)]
        out[name] = errors([p.predicted for p in selected], [p.measured for p in selected])
    blind = [p for p in c.time if selects(p.row) and id(p.row) in c.blind]
    out["time_left_out"] = errors([c.blind[id(p.row)] for p in blind], [p.measured for p in blind])
    fits = [f for f in c.fits if selects(f[0])]
    near = [f for f in fits if 0.5 <= f[3] <= 2]
    for name, verdicts in (("fit", fits), ("fit_near", near)):
        out[name] = fit([f[1] for f in verdicts], [f[2] for f in verdicts])
    return out
