"""`python -m calibration [--further [OWNER ...]] [--leave-out [FAMILY ...]] [--write]`: fit all constants,
and print how well.

Without options: links, step times, memory, in some minutes. --further: step times and memory alone, from the
constants as they stand; with names (`ampere`, `nvidia.misaligned`) step times by these alone. --leave-out: fits once
more for every family (or those named) without its rows, and prints what is then predicted of them. --write:
src/phalanx/cost/constants.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from calibration import links as link_constants
from calibration import memory
from calibration.fit import Data, Free, descend, fit, offsets_of
from calibration.free_constants import LEFT_OUT, family, fitted, free, timed
from calibration.write import write
from phalanx.cost.analytic.fitted_constants import CONSTANTS
from phalanx.spec.errors import InputError, nearest
from phalanx.validate.from_row import Case, cases
from phalanx.validate.records import RUNS, load
from phalanx.validate.scores import errors

LEFT = Path(__file__).parent / "left_out.json"


def times(
    found: Sequence[Case],
    links: Mapping[str, float],
    without: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> dict[str, float]:
    """Constants of step times, from the defaults: one by one, then all together."""
    data = fitted(found, without)
    moved: list[Free] = free()
    x, _ = descend(data, moved, links, sweeps=6, say=say)
    x, _ = fit(data, moved, links, start=x, rounds=14, say=say)
    _, constants = descend(data, moved, links, start=x, sweeps=1, say=say)
    return constants


def further(
    found: Sequence[Case], whole: Mapping[str, float], only: Sequence[str], say: Callable[[str], None] = print
) -> dict[str, float]:
    """Constants of step times and of links, the former moved on from where they stand: all, or `only` some."""
    every = free()
    moved = [f for f in every if not only or f.owner in only or f.key in only]
    links = {key: whole[key] for key in link_constants.KEYS}
    fixed = links | {f.key: whole[f.key] for f in every if f not in moved and f.key in whole}
    reached = fit(fitted(found), moved, fixed, start=offsets_of(moved, whole), rounds=10, say=say)[1]
    return links | {f.key: reached[f.key] for f in every if f.key in reached}


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def without_family(found: Sequence[Case], whole: Mapping[str, float], left: Sequence[str]) -> dict[str, float]:
    """Constants of step times without some families' rows: of what they alone inform, the parents' values; all
    others move from where all rows have put them to where the rest does."""
    data, moved = fitted(found, left), free()
    x = offsets_of(moved, whole)
    for j, f in enumerate(moved):
        if not data.rows(f):
            x[j] = 0.0
    links = {key: whole[key] for key in link_constants.KEYS}
    return fit(data, moved, links, start=x, rounds=3)[1]


def table(
    found: Sequence[Case], constants: Mapping[str, float], only: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """Errors by family, over all rows."""
    names = np.array([family(c) for c in found])
    kept = [i for i, name in enumerate(names) if not only or name in only]
    of = [found[i] for i in kept]
    measured = np.array([c.measured_s for c in of])
    predicted = Data(of, measured, np.ones(len(of))).predict(constants)
    own = names[kept]
    return {name: errors(predicted[own == name], measured[own == name]) for name in sorted(set(own))}


def show(of: Mapping[str, Mapping[str, float]], note: str = "") -> None:
    for name, e in of.items():
        rho = f"{e['spearman']:6.3f}" if e["spearman"] is not None else "     -"
        print(
            f"{name:34s} {e['n']:4d} rows  mean {e['mape']:5.1f}  median {e['median']:5.1f}  bias {e['bias']:+6.1f}"
            f"  rank {rho}{note}",
            flush=True,
        )


def _names(arguments: Sequence[str]) -> list[str]:
    """The families or owners that are named."""
    given = [a for a in arguments if not a.startswith("--")]
    known: set[str] = set()
    if "--leave-out" in arguments:
        known = set(LEFT_OUT)
    elif "--further" in arguments:
        known = {name for f in free() for name in (f.owner, f.key)}
    for name in given:
        if name not in known:
            hint = nearest(name, sorted(known)) if known else "names go with --further or --leave-out"
            sys.exit(f"error: {InputError('calibration', name, 'is nothing to calibrate', hint)}")
    return given


def main(arguments: Sequence[str]) -> None:
    """Fit what the arguments ask for, show the errors of predictions, and write the constants with `--write`."""
    found = timed(cases(load(RUNS))[0])
    named = _names(arguments)
    if "--leave-out" in arguments:
        named = named or list(LEFT_OUT)
        told = json.loads(LEFT.read_text()) if LEFT.exists() else {}
        for name in named:
            left = LEFT_OUT[name]
            of = table(found, without_family(found, CONSTANTS, left), left)
            show(of, f"  without {name}")
            told |= of
            LEFT.write_text(json.dumps(told, indent=1) + "\n")
        return
    if "--further" in arguments:
        constants = further(found, CONSTANTS, named, say=_tell)
    else:
        links = link_constants.fitted()
        constants = {**links, **times(found, links, say=_tell)}
    if named:
        constants |= {key: value for key, value in CONSTANTS.items() if key not in constants}
    else:
        constants |= memory.fitted(constants)
    show(table(found, constants))
    if "--write" in arguments:
        write(constants)


if __name__ == "__main__":
    main(sys.argv[1:])
