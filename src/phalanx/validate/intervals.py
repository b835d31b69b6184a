"""The interval of a predicted step time: where a run of a further publication lies, at 80 %.

Each published run is predicted with constants fitted without its family; families that were never fitted are
predicted with all. `python -m calibration --intervals` writes by kind what bounds measured / predicted times
(calibration/intervals.py): the fewer publications have runs of a kind, the wider it is.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from phalanx.cost.analytic.chips import chip_name
from phalanx.cost.analytic.fitted_constants import fitted_constants
from phalanx.frameworks.registry import priced_stack
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import NUMBER_FORMATS

FILE = Path(__file__).parent / "data" / "intervals.json"
SHARE = 0.8
"""Share of the runs of a further publication that an interval holds."""
DENSE, EXPERTS = "dense models", "experts, or layers of several kinds"
TRAINERS = "adapters, or people's own of transformers' models"
TRAINED_EXPERTS = "experts in adapters, or in people's own of transformers' models"
"""Taken from those without experts too: few publications time them."""
_TRAINERS = {"accelerate", "deepspeed"}
"""Stacks on whose runs no constant is fitted: people posted them (records.RUNS_OWN)."""
NARROW, GENERIC, DATASHEET = "8 bits or less", "priced as a generic stack", "priced from a datasheet"
_SHARED = {"any", "eager", "compiled", "nvidia"}
"""Owners of constants that stacks, or chips, without runs of their own inherit."""
WAITING, WAITS = "steps that wait for launches", 0.15
"""The kind of steps in which the GPU waits for the host, whose speed no datasheet states, and its least share."""


@dataclass(frozen=True)
class Interval:
    """Factors of a predicted time between which a measured one of its kind lies, at `SHARE`."""

    kind: str
    low: float
    high: float
    runs: int
    publications: int

    def __str__(self) -> str:
        sources = "one publication" if self.publications == 1 else f"{self.publications} publications"
        return f"{SHARE:.0%}, from {self.runs:,} runs of {sources} ({self.kind})"


def kinds_of_step(
    model: ModelSpec,
    launches: float,
    adapters: bool,
    narrow: bool,
    generic: bool = False,
    datasheet: bool = False,
    trainer: bool = False,
) -> tuple[str, ...]:
    """Return the kinds that a predicted step belongs to. `launches`: the share of the step in which the GPU waits for
    launches; `narrow`: products in 8 bits or less; `trainer`: whether one of `_TRAINERS` runs it."""
    mixed = bool(model.pattern) or (model.latent is not None and model.latent.index is not None)
    layers = EXPERTS if mixed or model.experts else DENSE
    tuned = TRAINED_EXPERTS if model.experts else TRAINERS
    each = ((NARROW, narrow), (GENERIC, generic and not trainer), (DATASHEET, datasheet))
    first = WAITING if launches > WAITS else tuned if trainer or adapters else layers
    return (first, *(name for name, holds in each if holds))


def is_trainer_stack(stack: str) -> bool:
    """Whether a stack is one of `_TRAINERS`."""
    return not _TRAINERS.isdisjoint(priced_stack(stack).lineage)


@cache
def _table() -> dict[str, Interval]:
    return {kind: Interval(kind, **fields) for kind, fields in json.loads(FILE.read_text()).items()}


def combined(of: Iterable[Interval]) -> Interval:
    """Return the interval of a prediction of several kinds: the widest of what is run, and added to it what is not
    known of the stack and the chip. These err for reasons of their own, so that deviations add as squares."""
    every = sorted(of, key=lambda i: i.low / i.high)
    run = next((i for i in every if i.kind not in (GENERIC, DATASHEET)), None)
    parts = [i for i in every if i is run or i.kind in (GENERIC, DATASHEET)]
    if len(parts) == 1:
        return parts[0]
    low = math.hypot(*(max(0.0, -math.log(i.low)) for i in parts))
    high = math.hypot(*(max(0.0, math.log(i.high)) for i in parts))
    kinds = "; ".join(i.kind for i in parts)
    return Interval(kinds, math.exp(-low), math.exp(high), parts[0].runs, parts[0].publications)


def interval_of(
    model: ModelSpec, terms: Mapping[str, float], adapters: bool, products: str, stack: str, device: str
) -> Interval:
    """Return the interval of a predicted step. `terms`: its parts in seconds; `products`: the number format of its
    matrix products. Raises InputError for an unknown device."""
    launches = terms.get("launch", 0.0) / sum(terms.values())
    generic = not _with_runs().intersection(priced_stack(stack).lineage)
    narrow = NUMBER_FORMATS[products].narrow
    datasheet, trainer = not has_runs(device), is_trainer_stack(stack)
    kinds = kinds_of_step(model, launches, adapters, narrow, generic, datasheet, trainer)
    return combined(_table()[kind] for kind in kinds)


def has_runs(device: str) -> bool:
    """Whether published runs determine the rates of a device's generation. Raises InputError for an unknown one."""
    return CHIPS[chip_name(device)].generation in _with_runs()


@cache
def _with_runs() -> frozenset[str]:
    """Owners of fitted constants: stacks and generations of chips with published runs of their own."""
    return frozenset(key.partition(".")[0] for key in fitted_constants()) - _SHARED
