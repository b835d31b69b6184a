"""Fit the constants of serving engines on measured runs: `python -m calibration.serving`. With `--likely`, write how
far measured figures lie from predicted ones instead, by kind of load.

Every engine's constant is the common one times a factor, which a prior pulls to 1. With r = log(predicted / measured)
of time per token and of time to first token, and x the logarithms of constants and factors,

    sum_i w_i |r_i| + 1/2 sum_j (x_j / spread_j)^2

is minimised by reweighted Gauss-Newton steps. A (model, GPU, engine) of n runs weighs n^0.5, so that no sweep rules.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.quantiles import Ratio
from calibration.quantiles import fitted as interval_of
from calibration.robust import minimise
from calibration.write import rounded, save
from phalanx.serving.cost import engines
from phalanx.serving.cost.engines import FIELDS, EngineConstants
from phalanx.serving.likely import FILE as LIKELY
from phalanx.serving.validation import bursts
from phalanx.serving.validation.bursts import Burst
from phalanx.serving.validation.predictions import (
    LEFT_OUT,
    Columns,
    ServingCase,
    cases,
    columns,
    load_runs,
    scorable,
    times,
)
from phalanx.serving.validation.scores import ScoredPair, compare

Floats = npt.NDArray[np.float64]
ENGINES = ("vllm", "sglang", "trtllm", "trtllm 1.0")
FIXED = frozenset(
    {"accept_s", "overlap_steps", "eager_decode_s", "uncaptured_s", "index_layer_s", "net_hop_s", "balanced"}
    | {"two_batches"}
)
HARDWARE = (
    *("memory", "cache", "gemm", "gemm8", "gemm4", "inner_half", "attention", "link", "hop_s", "expert_memory"),
)
"""What chips and clients set more than the engine: kernels measured alone, and one protocol, give the start."""
COMMON_SPREAD, ENGINE_SPREAD = {True: 0.25, False: 0.7}, {True: 0.08, False: 0.35}
"""Of logarithms of common constants and of engines' factors, where hardware sets them and elsewhere."""
FIRST_TOKEN = 0.6
"""Weight of times to first token, which clients' waves blur."""
_START = asdict(EngineConstants())


class Problem:
    """Cases as columns, with what was measured and how much each weighs."""

    def __init__(self, use: Sequence[ServingCase], fields: Sequence[str]) -> None:
        self.fields = tuple(fields)
        self.cases = use
        self.parts: list[tuple[Columns, Floats, Floats, Floats, Floats]] = []
        names, counts = np.unique([str(c.group) for c in use], return_counts=True)
        count = dict(zip(names, counts, strict=True))
        for apart in (False, True):
            some = [c for c in use if c.apart == apart]
            if not some:
                continue
            weight = np.array([count[str(c.group)] ** -0.5 for c in some])
            tpot = np.array([c.row.number("tpot_ms") for c in some], float) / 1e3
            ttft = np.array([c.row.number("ttft_ms") or 1.0 for c in some], float) / 1e3
            first = np.array([scorable(c.row)[1] for c in some], float)
            self.parts.append((columns(some), np.log(tpot), np.log(ttft), weight, weight * first * FIRST_TOKEN))
        self.weights = np.concatenate([np.concatenate((p[3], p[4])) for p in self.parts])
        names = np.concatenate([np.array(p[0].engines * 2) for p in self.parts])
        self.of_engine = [names == name for name in ENGINES]
        self.spread = np.array(
            [COMMON_SPREAD[f in HARDWARE] for f in fields]
            + [ENGINE_SPREAD[f in HARDWARE] for f in fields] * len(ENGINES)
        )

    def fitted(self, x: Floats) -> dict[str, dict[str, float]]:
        """Return the constants that x stands for."""
        n = len(self.fields)
        return {
            name: {f: float(_START[f] * np.exp(x[i] + x[n * (k + 1) + i])) for i, f in enumerate(self.fields)}
            for k, name in enumerate(ENGINES)
        }

    def residuals(self, x: Floats) -> Floats:
        """log(predicted / measured) of times per token, then of times to first token, by mode."""
        fitted = self.fitted(x)
        out = []
        for c, tpot, ttft, _, _ in self.parts:
            p, f = times(c, fitted)
            out += [np.log(p) - tpot, np.log(f) - ttft]
        return np.concatenate(out)

    def jacobian(self, x: Floats, r: Floats) -> Floats:
        """Derivatives of residuals. A constant is its common value times a factor, so both have one derivative."""
        n = len(self.fields)
        columns = np.stack([(self.residuals(x + 1e-4 * e) - r) / 1e-4 for e in np.eye(len(x))[:n]], 1)
        return np.concatenate([columns, *(columns * own[:, None] for own in self.of_engine)], 1)

    def fit(self, x: Floats, steps: int = 25, near: float = 0.04) -> Floats:
        """Return x after at most so many Gauss-Newton steps from it."""
        return minimise(self.residuals, self.jacobian, x, self.spread, self.weights, steps, near)


def free_fields() -> list[str]:
    """The constants that are fitted."""
    return [f for f in FIELDS if f not in FIXED]


def fit_all(use: Sequence[ServingCase]) -> tuple[Problem, Floats]:
    """Fit on all cases."""
    problem = Problem(use, free_fields())
    return problem, problem.fit(np.zeros(len(problem.spread)))


def left_out(use: Sequence[ServingCase], x: Floats, steps: int = 3) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the constants fitted without each (model, GPU, engine), from x on."""
    out: dict[tuple[str, str, str], dict[str, Any]] = {}
    for group in sorted({c.group for c in use}):
        problem = Problem([c for c in use if c.group != group], free_fields())
        out[group] = problem.fitted(problem.fit(x, steps))
    return out


def write(fitted: dict[str, dict[str, float]], without: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """Write the constants that ship, and those fitted without each group."""
    save(engines.FITTED_FILE, rounded(fitted))
    rows = {
        " | ".join(g): {name: rounded(each) for name, each in of.items() if name.startswith(g[2])}
        for g, of in without.items()
    }
    LEFT_OUT.write_text(json.dumps(rows, indent=0) + "\n")


FAMILIES, HOLDS = 2, 0.6
"""Families of runs that a range takes at least, as one says nothing of another, and the share of those left out in
turn that it holds: else it is not shipped."""


def ratios(of: Sequence[Burst], steady: Sequence[ScoredPair]) -> dict[tuple[str, str], list[Ratio]]:
    """Return the slowness of engines by figures of benchmarks, and of closed loops predicted by constants fitted
    without them, by (engine and kind of load, figure)."""
    result: dict[tuple[str, str], list[Ratio]] = {}
    for burst in of:
        for figure in burst.measured:
            slow = Ratio(burst.kind, burst.row["family"], burst.slowness(figure))
            result.setdefault((burst.kind, figure), []).append(slow)
    for pair in steady:
        kind = f"{pair.case.engine}, {pair.case.row['mode']}"
        for figure, both in (("ttft_s", pair.ttft), ("tpot_s", pair.tpot)):
            if both is not None:
                family = " | ".join(pair.case.group)
                result.setdefault((kind, figure), []).append(Ratio(kind, family, both[1] / both[0]))
    return {key: some for key, some in result.items() if len({r.family for r in some}) >= FAMILIES}


def likely() -> None:
    """Show the range of each kind of load, with what it holds of families left out, and write them."""
    content: dict[str, dict[str, Any]] = {}
    for (kind, figure), some in sorted(ratios(bursts.published()[0], compare(load_runs())[1]).items()):
        (low, high, holds), families = interval_of(some), len({r.family for r in some})
        middle = float(np.median([r.value for r in some]))
        print(
            f"{kind:28s} {figure:11s} {len(some):5d} runs of {families:3d} families"
            f"  {low:.2f} to {high:.2f}, median {middle:.2f}  holds {holds:.0%}"
        )
        if holds < HOLDS:
            continue
        counts = {"runs": len(some), "families": families}
        content.setdefault(kind, {})[figure] = rounded({"low": low, "high": high}) | counts
    save(LIKELY, content)


def main() -> None:
    """Fit, leave out in turn, write, and say what was fitted."""
    if "--likely" in sys.argv:
        return likely()
    use = [c for c in cases(load_runs())[0] if scorable(c.row)[0]]
    problem, x = fit_all(use)
    fitted = problem.fitted(x)
    for f in problem.fields:
        print(f"{f:18} {_START[f]:10.3g}", *(f"{fitted[e][f]:10.3g}" for e in ENGINES), flush=True)
    if "--dry" not in sys.argv:
        write(fitted, left_out(use, x))


if __name__ == "__main__":
    main()
