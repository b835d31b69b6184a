"""Fit the kernel model on kernels that were measured alone: `python -m calibration.kernels`.

Logarithms of constants: a common one, a factor by generation, and those of libraries; priors pull factors to 1 and
the rest to their start. Then the same without each GPU in turn.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.robust import minimise
from calibration.write import rounded, save
from phalanx.cost.hardware.columns import take
from phalanx.cost.kernels import chip as shipped
from phalanx.cost.kernels.chip import COMMON
from phalanx.validate.kernel_rows import MeasuredKernels, shipped_rows
from phalanx.validate.kernels import KINDS, LEFT_OUT, chips_of

Floats = npt.NDArray[np.float64]
COMMON_SPREAD, GENERATION_SPREAD, LIBRARY_SPREAD = 0.7, 0.2, 0.8
MOST = 700
"""Rows of a kind and GPU that are fitted on, evenly taken; all are scored."""


class Problem:
    """Rows of one kind, and where each of its constants stands in x."""

    def __init__(self, rows: MeasuredKernels) -> None:
        self.kind = KINDS[rows.kind]
        self.rows = rows
        self.chip, self.generations = chips_of(rows)
        self.names = sorted(set(self.generations))
        self.tables: list[tuple[type[Any], list[str], npt.NDArray[Any], int]] = []
        self.fields = [f.name for f in fields(self.kind.constants)]
        self.start = asdict(self.kind.constants())
        n = len(self.fields)
        spread = [COMMON_SPREAD] * n + [GENERATION_SPREAD] * n * len(self.names)
        for _, cls, keys in self.kind.libraries:
            names, places = np.unique(np.array(keys(rows)), return_inverse=True)
            self.tables.append((cls, [str(x) for x in names], places, len(spread)))
            spread += [LIBRARY_SPREAD] * len(names) * len(fields(cls))
        self.spread = np.array(spread)
        self.of = [np.array([g == name for g in self.generations]) for name in self.names]
        where = np.array([self.names.index(g) for g in self.generations])
        self.places = where

    def constants(self, x: Floats) -> tuple[dict[str, dict[str, float]], list[dict[str, dict[str, float]]]]:
        """Return the constants that x stands for: by generation, and by library of each table."""
        n = len(self.fields)
        common = {f: self.start[f] * float(np.exp(x[i])) for i, f in enumerate(self.fields)}
        chips = {COMMON: common}
        for k, name in enumerate(self.names):
            factor = np.exp(x[n * (k + 1) : n * (k + 2)])
            chips[name] = {f: common[f] * float(factor[i]) for i, f in enumerate(self.fields)}
        libraries = []
        for cls, names, _, at in self.tables:
            own = [f.name for f in fields(cls)]
            default = list(asdict(cls()).values())
            values = np.exp(x[at : at + len(names) * len(own)]).reshape(len(names), len(own)) * default
            libraries.append(
                {m: dict(zip(own, map(float, row), strict=True)) for m, row in zip(names, values, strict=True)}
            )
        return chips, libraries

    def residuals(self, x: Floats) -> Floats:
        """log(predicted / measured)."""
        chips, libraries = self.constants(x)
        c = take([self.kind.constants(**chips[name]) for name in self.names], self.places)
        of = [
            take([cls(**table[m]) for m in names], places)
            for (cls, names, places, _), table in zip(self.tables, libraries, strict=True)
        ]
        seconds = np.asarray(self.kind.seconds(self.rows, self.chip, c, *of))
        return np.asarray(np.log(seconds) - np.log(self.rows.seconds))

    def jacobian(self, x: Floats, r: Floats) -> Floats:
        """Derivatives of residuals. A row has one generation and one library of each table, so that a step in a field
        of all of them at once gives the derivative of each."""
        out = np.zeros((len(r), len(x)))
        n = len(self.fields)
        for i in range(n):
            e = np.zeros(len(x))
            e[i] = 1e-4
            column = (self.residuals(x + e) - r) / 1e-4
            out[:, i] = column
            for k, mine in enumerate(self.of):
                out[mine, n * (k + 1) + i] = column[mine]
        for cls, names, places, at in self.tables:
            width = len(fields(cls))
            for j in range(width):
                e = np.zeros(len(x))
                e[at + j : at + len(names) * width : width] = 1e-4
                column = (self.residuals(x + e) - r) / 1e-4
                out[np.arange(len(r)), at + places * width + j] = column
        return out

    def fit(self, x: Floats | None = None, steps: int = 15) -> Floats:
        """Return x fitted, from x on."""
        start = np.zeros(len(self.spread)) if x is None else x
        return minimise(self.residuals, self.jacobian, start, self.spread, np.ones(len(self.rows)), steps, near=0.05)


def thinned(rows: MeasuredKernels) -> MeasuredKernels:
    """Return at most MOST rows of each GPU, evenly taken."""
    keep = []
    for gpu in np.unique(rows.gpus):
        mine = np.flatnonzero(rows.gpus == gpu)
        keep.append(mine[np.linspace(0, len(mine) - 1, min(MOST, len(mine))).astype(int)])
    return rows.only(np.sort(np.concatenate(keep)))


def main() -> None:
    """Fit each kind, then without each GPU, and write both."""
    by_kind = shipped_rows().by_kind
    chips: dict[str, Any] = {}
    libraries: dict[str, Any] = {}
    without: dict[str, Any] = {}
    for kind, all_rows in by_kind.items():
        rows = thinned(all_rows)
        problem = Problem(rows)
        x = problem.fit()
        parts = [part for part, _, _ in problem.kind.libraries]

        def put(where: tuple[dict[str, Any], dict[str, Any]], p: Problem, x: Floats) -> None:
            fitted, of = p.constants(x)
            where[0][p.rows.kind] = rounded(fitted)
            for part, table in zip(parts, of, strict=True):  # noqa: B023
                where[1][p.rows.kind + part] = rounded(table)

        put((chips, libraries), problem, x)
        percent = float(100 * np.median(np.abs(np.expm1(problem.residuals(x)))))
        print(f"{kind}: median {percent:.1f} %", flush=True)
        for gpu in np.unique(rows.gpus):
            other = Problem(rows.only(rows.gpus != gpu))
            put(without.setdefault(str(gpu), ({}, {})), other, other.fit(steps=12))
    if "--dry" in sys.argv:
        return
    save(shipped.FILE, {"chips": chips, "libraries": libraries})
    LEFT_OUT.write_text(json.dumps(without, indent=0) + "\n")


if __name__ == "__main__":
    main()
