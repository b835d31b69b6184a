"""Fit the constants of predictions on published runs, and print how far off predictions then are.

python -m calibration                          links, step times and memory, from the defaults: some minutes
python -m calibration --further                step times and memory, starting from the current constants
python -m calibration --further OWNER ...      step times alone, moving only these owners or constants, such as
                                               `ampere` or `nvidia.misaligned`
python -m calibration --leave-out [FAMILY ...] for every family (or these), fit without its rows, predict them, and
                                               write the constants to src/phalanx/validate/data/left_out.json
python -m calibration --intervals              the intervals of predicted times, with the constants of --leave-out,
                                               to src/phalanx/validate/data/intervals.json
... --write                                    also write src/phalanx/cost/analytic/fitted_constants.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from calibration import links as link_constants
from calibration import memory
from calibration.fit import Data, Free, descend, fit, offsets_of
from calibration.free_constants import LAUNCHES, LEFT_OUT, MEASURED, family, fitted, free, timed
from calibration.intervals import coverage, coverage_by_group, first_predictions, held, runs
from calibration.intervals import intervals as intervals_of
from calibration.intervals import rows as rows_of_intervals
from calibration.write import rounded, save, write, write_left_out
from phalanx.cost.analytic.fitted_constants import fitted_constants
from phalanx.spec.errors import InputError, nearest
from phalanx.validate.from_row import Case, cases
from phalanx.validate.intervals import FILE as INTERVALS
from phalanx.validate.prediction_error import kinds_of
from phalanx.validate.records import RUNS, load
from phalanx.validate.scores import errors


def times(
    rows: Sequence[Case],
    links: Mapping[str, float],
    without: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> dict[str, float]:
    """Fit the constants of step times from the defaults, first one by one, then all together."""
    data = fitted(rows, without)
    moved: list[Free] = free()
    x, _ = descend(data, moved, links, sweeps=6, say=say)
    x, _ = fit(data, moved, links, start=x, rounds=14, say=say)
    _, constants = descend(data, moved, links, start=x, sweeps=1, say=say)
    return constants


def further(
    rows: Sequence[Case], current: Mapping[str, float], only: Sequence[str], say: Callable[[str], None] = print
) -> dict[str, float]:
    """Fit constants of step times further, from their current values: all, or `only` some. Links stay as they are."""
    every = free()
    moved = [f for f in every if not only or f.owner in only or f.key in only]
    links = {key: current[key] for key in link_constants.KEYS} | MEASURED
    fixed = links | {f.key: current[f.key] for f in every if f not in moved and f.key in current}
    reached = fit(fitted(rows), moved, fixed, start=offsets_of(moved, current), rounds=10, say=say)[1]
    return links | {f.key: reached[f.key] for f in every if f.key in reached}


def _announce(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def without_family(rows: Sequence[Case], current: Mapping[str, float], left_out: Sequence[str]) -> dict[str, float]:
    """Fit constants of step times without the rows of some families, from the current values.

    Constants that only those rows determine get their parents' values, and so do those of a stack's launches where
    hardly any other of its own runs waits for them.
    """
    data, moved = fitted(rows, left_out), free()
    stacks = {c.profile for c in rows if family(c) in left_out}
    x = offsets_of(moved, current)
    for j, f in enumerate(moved):
        if not data.rows(f):
            x[j] = 0.0
        elif f.owner in stacks and f.field in LAUNCHES and _seldom_waits(data, f, current):
            x[j], moved[j] = 0.0, replace(f, spread=1e-3)
    links = {key: current[key] for key in link_constants.KEYS} | MEASURED
    return fit(data, moved, links, start=x, rounds=3)[1]


def _seldom_waits(data: Data, f: Free, current: Mapping[str, float]) -> bool:
    """Whether fewer than a tenth of a stack's runs wait for its launches: would be slower if these were."""
    of_stack = data.of(f)
    if of_stack is None:
        return False
    value = current.get(f.key, f.parent(current))
    slower = of_stack.predict({**current, f.key: 1.1 * value}) / of_stack.predict(current)
    return float(np.mean(slower > 1 + 1e-3)) < 0.1


def table(
    rows: Sequence[Case], constants: Mapping[str, float], only: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """Return errors of predicted step times by family, all or `only` some."""
    names = np.array([family(c) for c in rows])
    kept = [i for i, name in enumerate(names) if not only or name in only]
    chosen = [rows[i] for i in kept]
    measured = np.array([c.measured_s for c in chosen])
    predicted = Data(chosen, measured, np.ones(len(chosen))).predict(constants)
    names = names[kept]
    return {name: errors(predicted[names == name], measured[names == name]) for name in sorted(set(names))}


def show(rows: Mapping[str, Mapping[str, float]], note: str = "") -> None:
    """Print a line of errors per family, in percent."""
    for name, e in rows.items():
        rho = f"{e['spearman']:6.3f}" if e["spearman"] is not None else "     -"
        print(
            f"{name:34s} {e['n']:4d} rows  mean {e['mape']:5.1f}  median {e['median']:5.1f}  bias {e['bias']:+6.1f}"
            f"  rank {rho}{note}",
            flush=True,
        )


def intervals() -> None:
    """Show what the intervals of predictions hold of publications left out, and each kind's; write them."""
    published = runs(cases(rows_of_intervals())[0]) + first_predictions()
    inside = held(published)
    weighed, alike = coverage(published, inside), np.mean(inside)
    print(f"publications left out in turn: {weighed:.0%} inside, {alike:.0%} of all runs")
    for group, (n, share) in coverage_by_group(published, inside).items():
        print(f"  {group:32s} {n:5d} runs  {share:.0%}")
    content = {}
    for kind, i in intervals_of(published).items():
        print(f"{kind:50s} {i.runs:5d} runs of {i.publications:2d} publications  {i.low:.3f} to {i.high:.3f}")
        content[kind] = rounded({"low": i.low, "high": i.high}) | {"runs": i.runs, "publications": i.publications}
    save(INTERVALS, content)


def _names(arguments: Sequence[str]) -> list[str]:
    """Return the families or owners named in the arguments; exit on an unknown one."""
    given = [a for a in arguments if not a.startswith("--")]
    known: set[str] = set()
    if "--leave-out" in arguments:
        known = set(LEFT_OUT)
    elif "--further" in arguments:
        known = {name for f in free() for name in (f.owner, f.key)}
    for name in given:
        if name not in known:
            hint = nearest(name, sorted(known)) if known else "names go with --further or --leave-out"
            sys.exit(f"error: {InputError('calibration', name, 'cannot be calibrated', hint)}")
    return given


def main(arguments: Sequence[str]) -> None:
    """Fit what the arguments ask for, show the errors of predictions, and write the constants with `--write`."""
    if "--intervals" in arguments:
        return intervals()
    rows = timed(cases(load(RUNS))[0])
    named = _names(arguments)
    if "--leave-out" in arguments:
        named, fitted_keys = named or list(LEFT_OUT), {f.key for f in free()}
        for name in named:
            left_out = LEFT_OUT[name]
            constants = without_family(rows, fitted_constants(), left_out)
            show(table(rows, constants, left_out), f"  without {name}")
            kinds = {kinds_of(c.row) for c in rows if family(c) in left_out}
            write_left_out(name, sorted(kinds), {k: v for k, v in constants.items() if k in fitted_keys})
        return
    if "--further" in arguments:
        constants = further(rows, fitted_constants(), named, say=_announce)
    else:
        links = link_constants.fitted() | MEASURED
        constants = {**links, **times(rows, links, say=_announce)}
    if named:
        constants |= {key: value for key, value in fitted_constants().items() if key not in constants}
    else:
        constants |= memory.fitted(constants)
    show(table(rows, constants))
    if "--write" in arguments:
        write(constants)


if __name__ == "__main__":
    main(sys.argv[1:])
