"""A Term: all events of one template in one step; and strategies as NumPy columns (Columns)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phalanx.cost.compute.unit_work import NO_WORK, Column, Work
from phalanx.schedule.event import Event
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, as_seen_by, units
from phalanx.spec.strategy.spec import Recompute, Strategy

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """Strategies that differ only in micro-batch and bucket size, given as columns; all else is as in `like`."""

    like: Strategy
    micro_batch: Column
    bucket_bytes: Column

    def accumulation(self, job: Job) -> Column:
        """Return micro-batches per step and rank."""
        return job.global_batch // (self.micro_batch * self.like.dp)


def columns(strategies: Sequence[Strategy]) -> list[tuple[Columns, Indices]]:
    """Group strategies into Columns; return each group with the indices of its strategies."""
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
    """`count` events like `event` in one step of one rank.

    `bytes` and `work` are totals over all of them; `alloc` and `free` are bytes of each. `before`: bytes freed before
    each, by passes whose own terms do not count them. `masked`: `alloc` until the masks are no longer needed."""

    event: Event
    count: Column
    bytes: Column = 0
    work: Work = NO_WORK
    alloc: Column = 0
    free: Column = 0
    before: Column = 0
    masked: Column = 0
    recomputed: Work = NO_WORK
    """The part of `work` that repeats forward passes (recomputation)."""
    overlapping: Work = NO_WORK
    """Compute of the same passes that overlaps this communication."""
    coding: Work = NO_WORK
    """The work of compressing what is sent, with the compressor `code`."""
    code: str = ""


def highest(term: Term, masks: Column) -> Column:
    """Return the peak of a pass that is the last to need `masks` bytes of masks."""
    return np.maximum(term.masked, term.alloc - masks)


def unit_classes(spec: ModelSpec, s: Strategy) -> dict[str, tuple[str, ...]]:
    """Return units with equal passes, in forward order, by the name of their terms: `embed`, `head`, and classes of
    `blocks` that differ in what they recompute and in whether they have experts."""
    return _classes(spec, Strategy(recompute=s.recompute))


@functools.cache
def _classes(spec: ModelSpec, s: Strategy) -> dict[str, tuple[str, ...]]:
    classes: dict[str, tuple[str, ...]] = {}
    for unit in units(spec):
        name = unit_class(spec, s, unit)
        classes[name] = (*classes.get(name, ()), unit)
    return classes


def unit_class(spec: ModelSpec, s: Strategy, unit: str) -> str:
    """Return the class of a unit, which names its terms."""
    kind, repeat = unit.split(".")[0], repeat_of(s, unit)
    dense = ", dense" if spec.experts is not None and as_seen_by(spec, unit).experts is None else ""
    return kind + dense if repeat == "none" else f"{kind}{dense}, {repeat}"


def repeat_of(s: Strategy, unit: str) -> Recompute:
    """Return what a unit's backward pass recomputes of its forward pass."""
    kind, _, index = unit.partition(".")
    return s.recompute_of(int(index)) if kind == "blocks" else "none"
