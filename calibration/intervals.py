"""How far measured times lie from predictions, by kind: quantiles of r = measured / predicted.

The 10 % and 90 % quantiles q bound a prediction's interval [q10 s, q90 s]. Rows of one source err alike, so that a
family of n rows weighs sqrt(n). What an interval holds is examined on families that it has not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.analytic.fitted_constants import fitted_constants
from phalanx.spec.cluster.chips import CHIPS
from phalanx.validate.from_row import Case
from phalanx.validate.intervals import DATASHEET, GENERIC, SHARE, is_trainer_stack, kinds_of_step
from phalanx.validate.prediction_error import launch_shares, left_out_predictions, predicted_columns
from phalanx.validate.records import RUNS, RUNS_2026, RUNS_OWN, Row, load
from phalanx.validate.stacks import PricingStack, generic_stack

HELD = 0.75
"""Share of the runs of a family that the interval of the others must hold."""


def _kinds(c: Case, launches: float) -> tuple[str, ...]:
    narrow = not c.row["precision"].startswith(("bf16", "fp16", "fp32"))
    return kinds_of_step(c.model, launches, "lora" in c.row["task"], narrow, trainer=is_trainer_stack(c.profile))


def rows() -> list[Row]:
    """Return the runs that intervals are of."""
    sound = [row for row in load(RUNS_2026) + load(RUNS_OWN) if row["quality"] in ("A", "B")]
    return load(RUNS) + sound


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
    without = left_out_predictions(known)
    seconds = dict(zip(map(id, known), map(float, predicted_columns(known)[0]), strict=True))
    result = [
        Ratio(kind, c.row.family, float(c.measured_s or 0) / without.get(id(c.row), seconds[id(c)]))
        for c, launches in zip(known, launch_shares(known), strict=True)
        for kind in _kinds(c, launches)
    ]
    # The same runs under a generic stack, and on rates that all chips share.
    as_generic = [replace(c, stack=PricingStack(generic_stack(c.row), generic=True)) for c in timed]
    rates = {f"{chip.generation}." for chip in CHIPS.values()}
    shared = {k: v for k, v in fitted_constants().items() if not k.startswith(tuple(rates))}
    for kind, those, constants in ((GENERIC, as_generic, None), (DATASHEET, known, shared)):
        times = predicted_columns(those, constants)[0]
        result += [
            Ratio(kind, c.row.family, float(c.measured_s or 0) / float(s)) for c, s in zip(those, times, strict=True)
        ]
    return result


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
    shares = np.arange(SHARE, 1.0, 0.005)
    holds = [held(of, share) for share in shares]
    enough = [i for i, h in enumerate(holds) if h >= HELD]
    best = enough[0] if enough else int(np.argmax(holds))
    return *quantiles(of, float(shares[best])), holds[best]
