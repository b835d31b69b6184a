"""Fit constants of stacks and chips on step times of published runs, in log space.

The residuals are log(predicted / measured), and every family has the same weight. Constants move on a log scale
(shares on a logit scale) with a prior that pulls each to its parent, and a root to its default. The cost

    sum_i w_i |r_i| + PRIOR/2 sum_j (x_j / spread_j)^2

is minimised by iteratively reweighted Gauss-Newton steps. A constant that no row depends on stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from phalanx.cost.analytic.chips import _DEFAULTS as HARDWARE
from phalanx.cost.analytic.chips import chain, system
from phalanx.cost.analytic.profile import Profile, profile
from phalanx.cost.analytic.step import step
from phalanx.cost.hardware.columns import gather, take
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.model_shape import gather_shapes
from phalanx.frameworks.registry import STACKS
from phalanx.spec.cluster.chips import CHIPS
from phalanx.validate.from_row import Case
from phalanx.validate.systems import benchmarks_of, corrected_system, description

Floats = npt.NDArray[np.float64]
GENERATIONS = frozenset(chip.generation for chip in CHIPS.values())
SHARES = (
    "gemm",
    "gemm8",
    "gemm4",
    "attention",
    "portable_attention",
    "memory",
    "nvlink",
    "nic",
    "tp_overlap",
    "dp_overlap",
    "gather_overlap",
    "pp_overlap",
    "ep_overlap",
)


@dataclass(frozen=True)
class Free:
    """A constant to fit: `owner.field`, with the prior's spread around the parent's value, on the log scale."""

    owner: str
    field: str
    spread: float

    @property
    def key(self) -> str:
        return f"{self.owner}.{self.field}"

    @property
    def hardware(self) -> bool:
        return self.field == "clock" or self.owner in ("nvidia", *GENERATIONS)

    @property
    def share(self) -> bool:
        return self.field in SHARES and (self.hardware or self.field.endswith("overlap"))

    def parent(self, constants: Mapping[str, float]) -> float:
        """Return the value inherited from the nearest ancestor that has one in `constants`, or the default."""
        if self.field == "clock":
            return CHIPS[self.owner].clock
        for owner in (chain(self.owner) if self.hardware else chain_of(self.owner))[1:]:
            if (key := f"{owner}.{self.field}") in constants:
                return constants[key]
        return HARDWARE[self.field] if self.hardware else _default(self.owner, self.field)


@cache
def _default(stack: str, field: str) -> float:
    """Return a stack's value of a field before any fit."""
    return float(getattr(profile(stack, {}), field))


@cache
def chain_of(stack: str) -> tuple[str, ...]:
    """Return a stack and its ancestors, nearest first."""
    return STACKS[stack].lineage


def up(x: float, share: bool) -> float:
    """Map a constant to the scale that it is fitted on: logit for a share, else log."""
    x = min(max(x, 0.02), 0.98) if share else max(x, 1e-9)
    return math.log(x / (1 - x)) if share else math.log(x)


def down(u: float, share: bool) -> float:
    """Map back from the scale of `up`."""
    u = min(max(u, -12.0), 12.0) if share else u
    return 1 / (1 + math.exp(-u)) if share else math.exp(min(u, 50))


def order(free: Sequence[Free]) -> list[Free]:
    """Sort constants so that parents come before children."""

    def depth(f: Free) -> int:
        if f.hardware:
            return 0 if f.owner == "nvidia" else len(chain(f.owner)) if f.owner in GENERATIONS else 1
        return len(chain_of(f.owner))

    return sorted(free, key=depth)


def constants_of(free: Sequence[Free], x: Floats, fixed: Mapping[str, float]) -> dict[str, float]:
    """Return all constants for the offsets x from each parent's value, on the scale of `up`."""
    constants = dict(fixed)
    for f, offset in zip(free, x, strict=True):
        value = down(up(f.parent(constants), f.share) + float(offset), f.share)
        constants[f.key] = max(value, 1.0) if f.field == "contention" else value
    return constants


def offsets_of(free: Sequence[Free], constants: Mapping[str, float]) -> Floats:
    """Return the offsets that give these constants: the inverse of `constants_of`."""
    return np.array(
        [up(constants.get(f.key, f.parent(constants)), f.share) - up(f.parent(constants), f.share) for f in free]
    )


@dataclass
class Data:
    """Published runs as columns; their systems and stacks are rebuilt for each set of constants."""

    cases: list[Case]
    measured: Floats
    weight: Floats

    def __post_init__(self) -> None:
        self.shape = gather_shapes([c.shape for c in self.cases])
        self.layout = gather([c.layout for c in self.cases])
        self.benched = gather([benchmarks_of(c.row) for c in self.cases])
        self.kinds = sorted({description(c.row) for c in self.cases})
        self.which = np.array([self.kinds.index(description(c.row)) for c in self.cases])
        self.names = sorted({c.profile for c in self.cases})
        self.stack = np.array([self.names.index(c.profile) for c in self.cases])

    def systems(self, constants: Mapping[str, float]) -> System:
        return corrected_system(
            take([system(*kind, constants=constants) for kind in self.kinds], self.which), self.benched
        )

    def stacks(self, constants: Mapping[str, float]) -> Profile:
        return take([profile(name, constants) for name in self.names], self.stack)

    def rows(self, free: Free) -> list[int]:
        """Return the indices of the cases that depend on a constant."""
        keep = []
        for i, c in enumerate(self.cases):
            chip = description(c.row)[0]
            owners = (chip, *chain(CHIPS[chip].generation)) if free.hardware else chain_of(c.profile)
            if free.owner in owners:
                keep.append(i)
        return keep

    def of(self, free: Free) -> Data | None:
        """Return the cases that depend on a constant, or None if there are none."""
        keep = self.rows(free)
        if not keep:
            return None
        return Data([self.cases[i] for i in keep], self.measured[keep], self.weight[keep])

    def predict(self, constants: Mapping[str, float]) -> Floats:
        """Return step times in seconds, (cases,)."""
        return np.asarray(step(self.shape, self.layout, self.systems(constants), self.stacks(constants)).seconds)


def fit(
    data: Data,
    free: Sequence[Free],
    fixed: Mapping[str, float],
    start: Floats | None = None,
    rounds: int = 12,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Floats, dict[str, float]]:
    """Fit all constants at once by reweighted Gauss-Newton steps; return (offsets, constants).

    `fixed` are constants that stay; `start` are offsets to start from, by default zero.
    """
    free = list(free)
    x = np.zeros(len(free)) if start is None else start.copy()
    spread = np.array([f.spread for f in free])
    damping = 1e-2

    parts: dict[str, tuple[list[int], Data | None]] = {}

    def residual(x: Floats) -> Floats:
        return np.log(data.predict(constants_of(free, x, fixed)) / data.measured)

    def cost(r: Floats, x: Floats) -> float:
        return float((data.weight * np.abs(r)).sum() + 0.5 * PRIOR * ((x / spread) ** 2).sum())

    r = residual(x)
    best = cost(r, x)
    for n in range(rounds):
        jac = np.zeros((len(r), len(free)))
        for j, f in enumerate(free):
            rows, part = parts.setdefault(f.owner, (data.rows(f), data.of(f)))
            if part is None:
                continue
            y = x.copy()
            y[j] += 0.02
            moved = np.log(part.predict(constants_of(free, y, fixed)) / part.measured)
            jac[rows, j] = (moved - r[rows]) / 0.02
        w = data.weight / (np.abs(r) + 0.01)
        a = jac.T @ (w[:, None] * jac) + np.diag(PRIOR / spread**2)
        g = jac.T @ (w * r) + PRIOR * x / spread**2
        for _ in range(6):
            s = np.linalg.solve(a + damping * np.diag(np.diag(a)), -g)
            s = np.clip(s, -0.5, 0.5)
            tried = residual(x + s)
            value = cost(tried, x + s)
            if value < best:
                break
            damping *= 5
        else:
            break
        gained = best - value
        x, r, best = x + s, tried, value
        damping = max(damping / 4, 1e-4)
        say(f"round {n}: cost {best:.4f}")
        if gained < 1e-4 * best:
            break
    return x, constants_of(free, x, fixed)


def descend(
    data: Data,
    free: Sequence[Free],
    fixed: Mapping[str, float],
    start: Floats | None = None,
    sweeps: int = 10,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Floats, dict[str, float]]:
    """Fit constants one by one, with steps that grow on success and shrink on failure; return (offsets, constants).

    Without `start`, the first sweep also tries large steps.
    """
    x = np.zeros(len(free)) if start is None else start.copy()
    parts: dict[str, Data | None] = {}
    steps = np.array([0.4 * f.spread for f in free])
    for n in range(sweeps):
        moved = 0.0
        for j, f in enumerate(free):
            if abs(steps[j]) < 2e-3:
                continue
            part = parts.setdefault(f.owner, data.of(f))
            if part is None:
                steps[j] = 0.0
                continue

            def cost(at: float, j: int = j, f: Free = f, part: Data = part) -> float:
                y = x.copy()
                y[j] = at
                r = np.log(part.predict(constants_of(free, y, fixed)) / part.measured)
                return float((part.weight * np.abs(r)).sum() + 0.5 * PRIOR * (at / f.spread) ** 2)

            here = cost(x[j])
            if n == 0 and start is None:  # a lower bound that binds nowhere has no slope, so try far values
                for far in (-2 * f.spread, -f.spread, f.spread, 2 * f.spread):
                    there = cost(far)
                    if there < here - 1e-6:
                        x[j], moved, here = far, moved + here - there, there
            for sign in (1, -1):
                there = cost(x[j] + sign * steps[j])
                if there < here - 1e-6:
                    x[j] += sign * steps[j]
                    moved += here - there
                    steps[j] *= 1.6 * sign
                    break
            else:
                steps[j] *= 0.4
        say(f"sweep {n}: gained {moved:.4f}")
        if moved < 1e-3:
            break
    return x, constants_of(free, x, fixed)


PRIOR = 0.004
