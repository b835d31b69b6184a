"""A term: all events of one template in one step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phalanx.cost.compute.unit_work import NO_WORK, Column, Work
from phalanx.schedule.event import Event
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, seen_from, units
from phalanx.spec.strategy.spec import Recompute, Strategy

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """Strategies that differ in what stands here as NumPy columns, and else are as `like` is."""

    like: Strategy
    micro_batch: Column
    bucket_bytes: Column

    def accumulation(self, job: Job) -> Column:
        return job.global_batch // (self.micro_batch * self.like.dp)


def columns(strategies: Sequence[Strategy]) -> list[tuple[Columns, Indices]]:
    """Strategies as columns, group by group, with the rows that each group stands for."""
    groups: dict[Strategy, list[int]] = {}
    for i, s in enumerate(strategies):
        groups.setdefault(replace(s, micro_batch=1, bucket="auto"), []).append(i)
    return [
        (
            Columns(
                like, *(np.array([getattr(strategies[i], f) for i in rows]) for f in ("micro_batch", "bucket_bytes"))
            ),
            np.array(rows),
        )
        for like, rows in groups.items()
    ]


@dataclass(frozen=True)
class Term:
    """`count` events like `event` in a step. `bytes` and `work` are totals over them; `alloc`, `free` are each's, and
    `before` is what is freed before each, by computes whose own terms do not say it. `masked`: `alloc` until masks
    are not needed any more."""

    event: Event
    count: Column
    bytes: Column = 0
    work: Work = NO_WORK
    alloc: Column = 0
    free: Column = 0
    before: Column = 0
    masked: Column = 0
    again: Work = NO_WORK
    """Of the work, that of forward passes that are repeated."""
    beside: Work = NO_WORK
    """What is computed of the same passes while this travels."""
    coding: Work = NO_WORK
    """Of compressing what is sent, by the compressor `code`."""
    code: str = ""


def highest(term: Term, masks: Column) -> Column:
    """What a pass allocates that is the last to need masks of so many bytes."""
    return np.maximum(term.masked, term.alloc - masks)


def unit_classes(spec: ModelSpec, s: Strategy) -> dict[str, tuple[str, ...]]:
    """The units whose passes are alike, in forward order, by the name of their terms: `embed`, `head`, and `blocks`
    apart from those that repeat something, and where there are experts from those that have none."""
    return _classes(spec, Strategy(recompute=s.recompute))


@functools.cache
def _classes(spec: ModelSpec, s: Strategy) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for unit in units(spec):
        name = unit_class(spec, s, unit)
        found[name] = (*found.get(name, ()), unit)
    return found


def unit_class(spec: ModelSpec, s: Strategy, unit: str) -> str:
    """The name of a unit's terms."""
    kind, repeat = unit.split(".")[0], repeat_of(s, unit)
    dense = ", dense" if spec.experts is not None and seen_from(spec, unit).experts is None else ""
    return kind + dense if repeat == "none" else f"{kind}{dense}, {repeat}"


def repeat_of(s: Strategy, unit: str) -> Recompute:
    """What of a unit's forward pass its backward pass repeats."""
    kind, _, index = unit.partition(".")
    return s.recompute_of(int(index)) if kind == "blocks" else "none"
