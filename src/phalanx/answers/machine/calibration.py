"""Factors fitted to a few measured steps of a user's own machines: what `phalanx measure steps` answers.

A step is a configuration, or a line of a strategy, with its measured seconds or the log that has them. The factors
are kept in a file that every command takes with --calibration.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.answers.answer import Answer
from phalanx.answers.question.query import Query
from phalanx.answers.question.resolution import OWN_STACK, read
from phalanx.cost.analytic.chips import with_calibration
from phalanx.cost.analytic.estimate import Estimate
from phalanx.cost.analytic.step import step
from phalanx.cost.hardware.bent import scaled_cluster
from phalanx.cost.step.predict import predict
from phalanx.frameworks.step_logs import step_time
from phalanx.spec.cluster.calibration import PARTS, Calibration
from phalanx.spec.documents import csv_of, read_log, read_text
from phalanx.spec.errors import InputError
from phalanx.validate.calibrate import PRIORS, Fit, Floats, calibrate

_UNCONSTRAINED = 0.8
"""Share of its prior's spread above which the steps do not constrain a factor."""


@dataclass(frozen=True)
class MeasuredStep:
    """One measured configuration."""

    name: str
    gpus: int
    measured_s: float
    predicted_s: float
    """With the shipped constants."""
    calibrated_s: float
    left_out_error: float | None
    """Per cent by which a calibration with the other steps alone is off; None for a single step."""
    note: str = ""
    """Where the seconds are from."""

    @property
    def error(self) -> float:
        """Per cent by which the shipped prediction is off."""
        return 100 * (self.predicted_s / self.measured_s - 1)

    @property
    def calibrated_error(self) -> float:
        """Per cent that remain."""
        return 100 * (self.calibrated_s / self.measured_s - 1)


@dataclass(frozen=True)
class Calibrated(Answer):
    """The factors of a user's machines, and the steps that they are fitted to."""

    steps: tuple[MeasuredStep, ...]
    factors: dict[str, float]
    """Measured over predicted seconds, by part of a step."""
    spreads: dict[str, float]
    """Relative uncertainty of each factor."""
    unconstrained: tuple[str, ...]
    """Parts that hardly occur in these steps."""
    stack: str
    cluster: str
    file: str = ""
    """Where the factors were written."""

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each step."""
        return [asdict(s) | {"error": s.error, "calibrated_error": s.calibrated_error} for s in self.steps]


def calibration_of(steps: Sequence[str], query: Query, out: Path | None = None) -> Calibrated:
    """Fit the factors to measured steps: each `FILE=SECONDS`, `FILE=LOG`, `LOG` that prints its own arguments, a
    run's folder, `STRATEGY=SECONDS` (with the model and the rest in `query`), or a CSV with the columns `step` and
    `measured`.

    Raises InputError for a step that cannot be read or priced, and for steps of different stacks."""
    words = [pair for word in steps for pair in _rows(word)]
    if not words:
        raise InputError("steps", None, "none are named", "name a log, FILE=LOG, FILE=SECONDS or a CSV")
    runs = [_run(name, measured, query) for name, measured in words]
    stacks = sorted({run.stack for run in runs})
    if len(stacks) > 1:
        reason = f"are of {len(stacks)} stacks ({', '.join(stacks)}), whose programs differ"
        raise InputError("steps", None, reason, "calibrate each by itself")

    def price(by: Calibration) -> Floats:
        return np.array([run.price(by) for run in runs])

    fit = calibrate(price, [run.seconds for run in runs], stacks[0])
    predicted, with_factors = price(Calibration()), price(fit.calibration)
    others = fit.left_out or [None] * len(runs)
    answer = Calibrated(
        steps=tuple(
            MeasuredStep(run.name, run.gpus, run.seconds, float(shipped), float(with_them), left_out, run.note)
            for run, shipped, with_them, left_out in zip(runs, predicted, with_factors, others, strict=True)
        ),
        factors={part: getattr(fit.calibration, part) for part in PARTS},
        spreads=fit.spread,
        unconstrained=tuple(part for part in PARTS if fit.spread[part] > _UNCONSTRAINED * PRIORS[part]),
        stack=stacks[0],
        cluster=runs[0].cluster,
    )
    if out is None:
        return answer
    out.write_text(_toml(answer, fit))
    return replace(answer, file=str(out))


def _rows(word: str) -> list[tuple[str, str]]:
    """Return (configuration or strategy, its seconds or log) of one word, or of each row of a CSV. Raises
    InputError."""
    if word.lower().endswith(".csv"):
        with csv_of(Path(word), "steps"):
            rows = list(csv.DictReader(read_text(Path(word), "steps").splitlines()))
        if not rows or not {"step", "measured"} <= set(rows[0]):
            has = ", ".join(rows[0]) if rows else "nothing"
            raise InputError("steps", word, f"has the columns {has}", "give it the columns step and measured")
        return [(str(row["step"]).strip(), str(row["measured"]).strip()) for row in rows]
    name, equals, measured = word.rpartition("=")
    return [(name, measured) if equals and name else (word, word)]


@dataclass(frozen=True)
class _Run:
    """A measured step with its price under any factors."""

    name: str
    stack: str
    cluster: str
    gpus: int
    seconds: float
    note: str
    price: Callable[[Calibration], float]


def _run(name: str, measured: str, query: Query) -> _Run:
    """Return a measured step of a configuration or strategy; `measured`: seconds, a log, or a run's folder. Raises
    InputError."""
    if (Path(measured) / "plan.json").is_file():
        measured = str(Path(measured) / "metrics.jsonl")
    try:
        seconds = float(measured.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0 <= seconds < inf or (not seconds and not Path(measured).is_file()):
        reason = "is not a number of seconds, and no log"
        raise InputError("steps", f"{name}={measured}", reason, "e.g. train.sh=4.31")
    source = Path(name)
    if not source.exists() and (query.model is None or "=" not in name):
        raise InputError("steps", name, "no such file", "name a configuration, or --model and the rest with tp=8,...")
    asked = replace(query, source=source) if source.exists() else replace(query, strategy=name)
    question = read(asked)
    exact, note = question.exact, ""
    if not seconds:
        job = exact.job if exact is not None else question.pricing.job
        timed = step_time(read_log(Path(measured), "log"), measured, job.global_batch, job.seq, question.gpus)
        seconds, note = timed.seconds, timed.note
    if exact is None:
        e, cluster = question.estimate, str(query.cluster or question.pricing.cluster.name)
        return _Run(name, e.profile.name, cluster, int(e.layout.world), seconds, note, _formula_price(e))
    if question.plan is not None and "calibrated" in question.plan.choices:
        reason = "was planned with a calibration, which would be counted twice"
        raise InputError("steps", name, reason, "name runs that were planned without")

    def priced(by: Calibration) -> float:
        return float(
            predict(exact.model, scaled_cluster(exact.cluster, by), exact.job, exact.chosen.strategy).step_time_s
        )

    return _Run(name, OWN_STACK, exact.cluster.name, exact.strategy.world, seconds, note, priced)


def _formula_price(e: Estimate) -> Callable[[Calibration], float]:
    """Return a function from a calibration to the seconds of a step by the formulas, times the ratio by which the
    unequal blocks of its pipeline lengthen the estimate."""

    def formula(by: Calibration) -> float:
        return float(step(e.shape, e.layout, with_calibration(e.system, by), e.profile).seconds)

    added = float(e.seconds) / formula(Calibration())
    return lambda by: added * formula(by)


def _toml(a: Calibrated, fit: Fit) -> str:
    lines = [f"# Seconds of {a.stack} on {a.cluster}, measured over predicted, from {len(a.steps)} steps:"]
    lines += [f"#   {s.name}: {s.measured_s:.4g} s, predicted {s.predicted_s:.4g}" for s in a.steps]
    others = [s.left_out_error for s in a.steps if s.left_out_error is not None]
    remains = others or [s.calibrated_error for s in a.steps]
    off, left = (float(np.median(np.abs(errors))) for errors in ([s.error for s in a.steps], remains))
    fields = asdict(replace(fit.calibration, off=round(off, 3), remains=round(left, 3)))
    body = [f"{k} = {v!r}" if not isinstance(v, str) else f'{k} = "{v}"' for k, v in fields.items()]
    return "\n".join([*lines, "", "[calibration]", *body]) + "\n"
