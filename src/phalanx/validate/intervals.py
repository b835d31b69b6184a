"""The interval of a predicted step time, which held four of five published runs of its kind.

Each run is predicted with constants fitted without its family, where such constants exist; families that were never
fitted are predicted with all. `python -m calibration --intervals` writes quantiles of measured / predicted times by
kind (calibration/intervals.py), which bound a prediction.
"""

import json
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
"""Share of a kind's runs that an interval holds."""
DENSE, EXPERTS, MIXED, ADAPTERS = "dense models", "experts", "layers of several kinds", "adapters"
TRAINERS = "people's own, of transformers' models"
_TRAINERS = {"accelerate", "deepspeed"}
"""Stacks on whose runs no constant is fitted: people posted them (records.RUNS_OWN)."""
NARROW, GENERIC, DATASHEET = "8 bits or less", "priced as a generic stack", "priced from a datasheet"
_SHARED = {"any", "eager", "compiled", "nvidia"}
"""Owners of constants that stacks, or chips, without runs of their own inherit."""
WAITING, WAITS = "steps that wait for launches", 0.15
"""The kind of steps in which the GPU waits for the host, whose speed no datasheet states, and its least share."""


@dataclass(frozen=True)
class Interval:
    """Factors of a predicted time between which `SHARE` of the measured ones of its kind lie."""

    kind: str
    low: float
    high: float
    runs: int
    families: int

    def __str__(self) -> str:
        return f"{SHARE:.0%} of {self.runs:,} published runs ({self.kind})"


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
    layers = ADAPTERS if adapters else MIXED if mixed else EXPERTS if model.experts else DENSE
    each = ((NARROW, narrow), (GENERIC, generic and not trainer), (DATASHEET, datasheet))
    first = WAITING if launches > WAITS else TRAINERS if trainer else layers
    return (first, *(name for name, holds in each if holds))


def is_trainer_stack(stack: str) -> bool:
    """Whether a stack is one of `_TRAINERS`."""
    return not _TRAINERS.isdisjoint(priced_stack(stack).lineage)


@cache
def _table() -> dict[str, Interval]:
    return {kind: Interval(kind, **fields) for kind, fields in json.loads(FILE.read_text()).items()}


def widest_interval(of: Iterable[str]) -> Interval:
    """Return the widest interval of a prediction's kinds."""
    return max((_table()[kind] for kind in of), key=lambda i: i.high / i.low)


def interval_of(
    model: ModelSpec, terms: Mapping[str, float], adapters: bool, products: str, stack: str, device: str
) -> Interval:
    """Return the interval of a predicted step. `terms`: its parts in seconds; `products`: the number format of its
    matrix products. Raises InputError for an unknown device."""
    launches = terms.get("launch", 0.0) / sum(terms.values())
    generic = not _with_runs().intersection(priced_stack(stack).lineage)
    narrow = NUMBER_FORMATS[products].narrow
    datasheet, trainer = not has_runs(device), is_trainer_stack(stack)
    return widest_interval(kinds_of_step(model, launches, adapters, narrow, generic, datasheet, trainer))


def has_runs(device: str) -> bool:
    """Whether published runs determine the rates of a device's generation. Raises InputError for an unknown one."""
    return CHIPS[chip_name(device)].generation in _with_runs()


@cache
def _with_runs() -> frozenset[str]:
    """Owners of fitted constants: stacks and generations of chips with published runs of their own."""
    return frozenset(key.partition(".")[0] for key in fitted_constants()) - _SHARED
