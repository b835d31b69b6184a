"""How far measured times lie from predictions, by kind: a predictive interval for a run of a further publication.

A kind's runs are log ratios x = log(measured / predicted). Those of one publication err alike, so that n of them have
the weight w = min(1, n / `ENOUGH`) together, as in the fit, and they count as K publications of one weight (Kish):

    K = (sum w)^2 / sum w^2

The quantiles of x that hold a share lie h to either side of their middle m. A further publication is one more draw
beside K, so that Student's distribution bounds it, not the normal one:

    m +- h sqrt(1 + 1/K) t[(1 + share) / 2, K - 1] / z[(1 + share) / 2]

What intervals hold is examined on each publication in turn, by those that the others give. Formulas were written with
most of them in view: `FIRST` are runs that were predicted before any of their publication had been seen.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np

from calibration.free_constants import UNFITTED
from phalanx.cost.analytic.fitted_constants import fitted_constants
from phalanx.spec.cluster.chips import CHIPS
from phalanx.validate.from_row import Case
from phalanx.validate.intervals import (
    DATASHEET,
    GENERIC,
    NARROW,
    SHARE,
    TRAINED_EXPERTS,
    TRAINERS,
    Interval,
    combined,
    has_runs,
    is_trainer_stack,
    kinds_of_step,
)
from phalanx.validate.prediction_error import kinds_of, launch_shares, left_out_constants, predicted_columns
from phalanx.validate.records import FIRST, RUNS, RUNS_2026, RUNS_OWN, Row, load
from phalanx.validate.stacks import PricingStack, generic_stack
from phalanx.validate.systems import description

ENOUGH = 10
"""Runs from which on a publication has the whole weight of one (calibration.free_constants.fitted)."""
GROUP = 15
"""Least runs of a group whose coverage is shown."""


def rows() -> list[Row]:
    """Return the runs that intervals are of: none of a family that constants are fitted on with no fit without it."""
    without = {kind for kinds, _ in left_out_constants() for kind in kinds}
    unseen = [row for row in load(RUNS) if kinds_of(row) in without or row.family in UNFITTED]
    return unseen + [row for row in load(RUNS_2026) + load(RUNS_OWN) if row["quality"] in ("A", "B")]


def publication(row: Row) -> str:
    """Return what a row's error is shared with: the repository that published it, else the paper."""
    source = row["source"]
    return source.split()[0] if source.startswith("github:") else row.family


def first_predictions() -> list[Run]:
    """Return the runs of `FIRST`, with their predictions of that day."""
    rows = load(FIRST, ("id", "source", "kinds", "measured_s", "predicted_s"))
    return [
        Run(
            publication(row),
            tuple(row["kinds"].split("; ")),
            tuple(row["groups"].split("; ")),
            math.log(float(row["measured_s"]) / float(row["predicted_s"])),
            {},
        )
        for row in rows
    ]


@dataclass(frozen=True)
class Run:
    """A timed run and its log ratios of measured over predicted seconds."""

    publication: str
    kinds: tuple[str, ...]
    """Kinds of its prediction."""
    groups: tuple[str, ...]
    """Groups of runs by which coverage is shown."""
    error: float
    as_if: Mapping[str, float]
    """`GENERIC`: as if its stack were not known; `DATASHEET`: as if the rates of its chip were not."""

    def samples(self) -> Iterator[tuple[str, float]]:
        """Yield the kinds that the run says something about, each with its log ratio."""
        own = (GENERIC,) if GENERIC in self.kinds else self.kinds
        yield from ((kind, self.as_if.get(kind, self.error)) for kind in own)
        if TRAINERS in own:
            yield TRAINED_EXPERTS, self.error
        if GENERIC not in self.kinds:
            yield from ((kind, error) for kind, error in self.as_if.items() if kind not in self.kinds)


def _seconds(timed: Sequence[Case], shared: bool = False) -> list[float]:
    """Predict cases by constants fitted without their family, where constants of it are fitted at all; `shared`: on
    rates that all chips share."""
    owners = tuple(f"{chip.generation}." for chip in CHIPS.values()) if shared else ()
    seconds = [0.0] * len(timed)
    rest = set(range(len(timed)))
    for kinds, constants in (*left_out_constants(), (frozenset[str](), fitted_constants())):
        members = sorted(i for i in rest if not kinds or kinds_of(timed[i].row) in kinds)
        rest -= set(members)
        if members:
            kept = {key: v for key, v in constants.items() if not key.startswith(owners)}
            times = predicted_columns([timed[i] for i in members], kept)[0]
            for i, s in zip(members, times, strict=True):
                seconds[i] = float(s)
    return seconds


def runs(usable: Sequence[Case]) -> list[Run]:
    """Return the timed runs of some cases."""
    timed = [c for c in usable if c.measured_s and c.row.completed]
    as_generic = [replace(c, stack=PricingStack(generic_stack(c.row), generic=True)) for c in timed]
    predicted = zip(_seconds(timed), _seconds(as_generic), _seconds(timed, shared=True), strict=True)
    result = []
    for c, launches, seconds in zip(timed, launch_shares(timed), predicted, strict=True):
        chip = description(c.row)[0]
        narrow = not c.row["precision"].startswith(("bf16", "fp16", "fp32"))
        adapters, trainer = "lora" in c.row["task"], is_trainer_stack(c.profile)
        kinds = kinds_of_step(c.model, launches, adapters, narrow, c.generic, not has_runs(chip), trainer)
        tuned = any(word in c.row["task"] for word in ("lora", "sft", "finetune"))
        groups = (
            f"stack {c.row['framework']}",
            f"chips {CHIPS[chip].generation}",
            "with experts" if c.model.experts else "dense",
            *((NARROW,) if narrow else ()),
            *(("fine-tuning",) if tuned else ()),
        )
        error, as_if_generic, as_if_datasheet = (float(np.log(float(c.measured_s or 0) / s)) for s in seconds)
        as_if = {GENERIC: as_if_generic, DATASHEET: as_if_datasheet}
        result.append(Run(publication(c.row), kinds, groups, error, as_if))
    return result


@cache
def student(share: float, freedom: float) -> float:
    """Return the quantile of Student's t = sqrt(freedom) tan(angle): the density of the angle is
    cos(angle)^(freedom - 1)."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, 20001)[1:-1]
    density = np.cos(angle) ** (freedom - 1)
    below = np.cumsum(density) - density / 2
    return float(np.sqrt(freedom) * np.tan(np.interp(share, below / density.sum(), angle)))


def interval(kind: str, sample: Sequence[tuple[str, float]], share: float = SHARE) -> Interval:
    """Return the interval of a further publication from (publication, log ratio) of a kind's runs."""
    count = Counter(name for name, _ in sample)
    ordered = sorted(sample, key=lambda pair: pair[1])
    weight = {name: min(1.0, n / ENOUGH) for name, n in count.items()}
    weights = np.array([weight[name] / count[name] for name, _ in ordered])
    places = (np.cumsum(weights) - weights / 2) / weights.sum()
    upper = (1 + share) / 2
    low, high = np.interp([1 - upper, upper], places, [error for _, error in ordered])
    k = sum(weight.values()) ** 2 / sum(w**2 for w in weight.values())
    # One publication says nothing of how publications differ: it is widened as two are.
    wider = student(upper, max(k - 1, 1.0)) * np.sqrt(1 + 1 / k) / NormalDist().inv_cdf(upper)
    middle, half = (low + high) / 2, wider * (high - low) / 2
    return Interval(kind, math.exp(middle - half), math.exp(middle + half), len(ordered), len(count))


def intervals(of: Iterable[Run]) -> dict[str, Interval]:
    """Return the interval of every kind that some runs are of."""
    samples: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for run in of:
        for kind, error in run.samples():
            samples[kind].append((run.publication, error))
    return {kind: interval(kind, sample) for kind, sample in sorted(samples.items())}


def held(of: Sequence[Run]) -> list[bool]:
    """Return whether each run lies in the interval that the other publications give it."""
    inside: dict[int, bool] = {}
    for name in {run.publication for run in of}:
        others = intervals(run for run in of if run.publication != name)
        for i, run in enumerate(of):
            if run.publication == name:
                known = combined(others[kind] for kind in run.kinds if kind in others)
                inside[i] = known.low <= math.exp(run.error) <= known.high
    return [inside[i] for i in range(len(of))]


def coverage(of: Sequence[Run], inside: Sequence[bool]) -> float:
    """Return the share of runs inside, where publications weigh as in an interval."""
    by: dict[str, list[bool]] = defaultdict(list)
    for run, i in zip(of, inside, strict=True):
        by[run.publication].append(i)
    weights = [min(1.0, len(flags) / ENOUGH) for flags in by.values()]
    return float(np.average([np.mean(flags) for flags in by.values()], weights=weights))


def coverage_by_group(of: Sequence[Run], inside: Sequence[bool]) -> dict[str, tuple[int, float]]:
    """Return (runs, share of them inside) of each group of at least `GROUP` runs."""
    by: dict[str, list[bool]] = defaultdict(list)
    for run, i in zip(of, inside, strict=True):
        for group in run.groups:
            by[group].append(i)
    return {group: (len(flags), float(np.mean(flags))) for group, flags in sorted(by.items()) if len(flags) >= GROUP}
