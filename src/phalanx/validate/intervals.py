"""How sure a predicted step time is: intervals that held four of five published runs of its kind.

Each run is predicted with constants fitted without its family, where such constants exist; families that were never
fitted are predicted with all. Of the ratios r = measured / predicted of a kind, the 10 % and 90 % quantiles q bound
a prediction's interval [q10 s, q90 s]. Rows of one source err alike, so that a family of n rows weighs sqrt(n).
`python -m calibration --intervals` writes the quantiles, and shows how many of each family's rows the others' hold.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from phalanx.cost.analytic.chips import chip_name
from phalanx.cost.analytic.fitted_constants import fitted_constants
from phalanx.frameworks.registry import priced_stack
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.validate.from_row import Case
from phalanx.validate.prediction_error import blind, launch_shares, priced
from phalanx.validate.stacks import PricingStack, generic_stack

FILE = Path(__file__).parent / "data" / "intervals.json"
SHARE, HELD = 0.8, 0.75
"""Share of a kind's runs that an interval holds, and of the runs of a family that the others' intervals must."""
DENSE, EXPERTS, MIXED, ADAPTERS = "dense models", "experts", "layers of several kinds", "adapters"
NARROW, GENERIC, DATASHEET = "8 bits or less", "a stack without runs of its own", "a chip without runs"
_SHARED = {"any", "eager", "compiled", "nvidia"}
"""Owners of constants that stacks, or chips, without runs of their own inherit."""
WAITING, WAITS = "steps that wait for launches", 0.15
"""Steps of which the GPU waits this share for the host, whose speed no datasheet states."""


@dataclass(frozen=True)
class Interval:
    """Factors of a predicted time between which `SHARE` of the measured ones of its kind lie."""

    kind: str
    low: float
    high: float
    runs: int
    families: int

    def __str__(self) -> str:
        return f"{SHARE:.0%} of {self.runs} published runs ({self.kind}), each predicted without its family"


def kinds(
    model: ModelSpec, launches: float, adapters: bool, narrow: bool, generic: bool = False, datasheet: bool = False
) -> tuple[str, ...]:
    """Return the kinds that a prediction belongs to; the widest of their intervals is its own. `launches`: the share
    of the step that waits for them."""
    mixed = bool(model.pattern) or (model.latent is not None and model.latent.index is not None)
    layers = ADAPTERS if adapters else MIXED if mixed else EXPERTS if model.experts else DENSE
    each = ((NARROW, narrow), (GENERIC, generic), (DATASHEET, datasheet))
    return (WAITING if launches > WAITS else layers, *(name for name, holds in each if holds))


@cache
def _table() -> dict[str, Interval]:
    return {kind: Interval(kind, **fields) for kind, fields in json.loads(FILE.read_text()).items()}


def interval(of: Iterable[str]) -> Interval:
    """Return the widest interval of a prediction's kinds."""
    return max((_table()[kind] for kind in of), key=lambda i: i.high / i.low)


def interval_of(
    model: ModelSpec, terms: Mapping[str, float], adapters: bool, products: str, stack: str, device: str
) -> Interval:
    """Return the interval of a predicted step: its `terms` in seconds, the format of its `products`, the names of its
    stack and its device."""
    launches = terms.get("launch", 0.0) / sum(terms.values())
    with_runs = {key.partition(".")[0] for key in fitted_constants()} - _SHARED
    return interval(
        kinds(
            model,
            launches,
            adapters,
            NUMBER_FORMATS[products].narrow,
            generic=not with_runs.intersection(priced_stack(stack).lineage),
            datasheet=CHIPS[chip_name(device)].generation not in with_runs,
        )
    )


def _kinds(c: Case, launches: float) -> tuple[str, ...]:
    narrow = not c.row["precision"].startswith(("bf16", "fp16", "fp32"))
    return kinds(c.model, launches, "lora" in c.row["task"], narrow)


@dataclass(frozen=True)
class Ratio:
    """Measured over predicted time of one run."""

    kind: str
    family: str
    value: float


def ratios(usable: Sequence[Case]) -> list[Ratio]:
    """Return the ratio of each timed run in each of its kinds, and as if its stack, or its chip, were not known."""
    timed = [c for c in usable if c.measured_s and c.row.completed]
    known = [c for c in timed if not c.generic]
    # Left out by family where constants were fitted without it.
    without = blind(known)
    seconds = dict(zip(map(id, known), map(float, priced(known)[0]), strict=True))
    found = [
        Ratio(kind, c.row.family, float(c.measured_s or 0) / without.get(id(c.row), seconds[id(c)]))
        for c, launches in zip(known, launch_shares(known), strict=True)
        for kind in _kinds(c, launches)
    ]
    # The same runs under a generic stack, and on rates that all chips share.
    as_generic = [replace(c, stack=PricingStack(generic_stack(c.row), generic=True)) for c in timed]
    rates = {f"{chip.generation}." for chip in CHIPS.values()}
    shared = {k: v for k, v in fitted_constants().items() if not k.startswith(tuple(rates))}
    for kind, those, constants in ((GENERIC, as_generic, None), (DATASHEET, known, shared)):
        times = priced(those, constants)[0]
        found += [
            Ratio(kind, c.row.family, float(c.measured_s or 0) / float(s)) for c, s in zip(those, times, strict=True)
        ]
    return found


def quantiles(of: Sequence[Ratio], share: float) -> tuple[float, float]:
    """Return the quantiles that bound a share of the ratios, each weighing 1 / sqrt(ratios of its family)."""
    count: dict[str, int] = defaultdict(int)
    for r in of:
        count[r.family] += 1
    ordered = sorted(of, key=lambda r: r.value)
    weights = np.array([count[r.family] ** -0.5 for r in ordered])
    places = (np.cumsum(weights) - weights / 2) / weights.sum()
    low, high = np.exp(np.interp([(1 - share) / 2, (1 + share) / 2], places, np.log([r.value for r in ordered])))
    return float(low), float(high)


def held(of: Sequence[Ratio], share: float) -> float:
    """Return the mean share of a family's ratios between the quantiles of the other families'."""
    families = sorted({r.family for r in of})
    shares = []
    for name in families:
        low, high = quantiles([r for r in of if r.family != name], share)
        shares.append(np.mean([low <= r.value <= high for r in of if r.family == name]))
    return float(np.mean(shares))


def fitted(of: Sequence[Ratio]) -> tuple[float, float, float]:
    """Return the quantiles of a kind's interval, and what they hold of families left out (nan of one family): those
    of `SHARE`, or of the least more that holds `HELD`. Few families say little about the next one."""
    if len({r.family for r in of}) == 1:
        return *quantiles(of, SHARE), float("nan")
    shares = np.arange(SHARE, 1.0, 0.02)
    holds = [held(of, share) for share in shares]
    enough = [i for i, h in enumerate(holds) if h >= HELD]
    best = enough[0] if enough else int(np.argmax(holds))
    return *quantiles(of, float(shares[best])), holds[best]
