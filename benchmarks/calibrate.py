"""How well a few steps of one's own calibrate the rest: each family of published runs as if it were a user's.

    python -m benchmarks.calibrate [--draws 10]

From 3, 5 and 10 drawn rows of a family the factors are fitted, and the family's other rows are predicted. Shipped
constants are those that were fitted on other families where such constants exist (validate/data/left_out.json).
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np

from phalanx.cost.analytic.chips import system, with_calibration
from phalanx.cost.analytic.profile import profile
from phalanx.cost.analytic.step import step
from phalanx.cost.hardware.columns import gather, take
from phalanx.cost.ledger.model_shape import gather_shapes
from phalanx.spec.cluster.calibration import Calibration
from phalanx.validate.calibrate import Floats, Price, calibrate
from phalanx.validate.from_row import Case, cases
from phalanx.validate.prediction_error import kinds_of, left_out_constants
from phalanx.validate.records import RUNS, load
from phalanx.validate.systems import benchmarks_of, corrected_system, description


def price_of(some: list[Case]) -> Price:
    """Return the seconds of some rows under a calibration."""
    constants = {id(c): _constants(c) for c in some}
    rows = np.arange(len(some))
    stacks = take([profile(c.profile, constants[id(c)]) for c in some], rows)
    systems = take([system(*description(c.row), constants=constants[id(c)]) for c in some], rows)
    systems = corrected_system(systems, gather([benchmarks_of(c.row) for c in some]))
    shapes, layouts = gather_shapes([c.shape for c in some]), gather([c.layout for c in some])

    def price(by: Calibration) -> Floats:
        return np.asarray(step(shapes, layouts, with_calibration(systems, by), stacks).seconds, dtype=float)

    return price


def _constants(c: Case) -> dict[str, float] | None:
    """Return the constants that were fitted without the row's family."""
    kinds = kinds_of(c.row)
    return next((constants for without, constants in left_out_constants() if kinds in without), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=10)
    draws = parser.parse_args().draws
    usable, _ = cases(load(RUNS))
    families: dict[str, list[Case]] = defaultdict(list)
    for c in usable:
        if c.measured_s and c.timed and c.row.completed and not c.generic:
            families[c.row.family].append(c)
    rng = np.random.default_rng(0)
    print(f"{'family':28} rows  shipped   3 rows   5 rows  10 rows   (median error of the rest, per cent)")
    for name, some in sorted(families.items()):
        if len(some) < 8:
            continue
        y = np.array([c.measured_s for c in some])
        line = f"{name:28} {len(some):4} {np.median(np.abs(price_of(some)(Calibration()) / y - 1)) * 100:8.1f}"
        for n in (3, 5, 10):
            if len(some) < n + 4:
                continue
            medians = []
            for _ in range(draws):
                seen = rng.permutation(len(some))
                chosen = [some[i] for i in seen[:n]]
                rest = [some[i] for i in seen[n:]]
                by = calibrate(price_of(chosen), y[seen[:n]], left_out=False).calibration
                medians.append(np.median(np.abs(price_of(rest)(by) / y[seen[n:]] - 1)) * 100)
            line += f" {np.median(medians):8.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
