"""How far off predictions, choices and the kernel model are from published measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.answers.answer import Answer
from phalanx.answers.choices import score
from phalanx.answers.encode import DRAWN, plain
from phalanx.spec.errors import InputError, nearest
from phalanx.validate.collectives import link_scores
from phalanx.validate.kernels import kernel_scores as score_kernels
from phalanx.validate.prediction_error import PredictionError, compare, scores
from phalanx.validate.records import COLLECTIVES, RUNS, SMALL_RUNS, Row, load


@dataclass(frozen=True)
class PredictionScores(Answer):
    """Errors of predicted step times and memory."""

    scores: dict[str, Any]
    """By quantity, in percent, and by source family."""
    runs: PredictionError | None = field(default=None, metadata=DRAWN)
    """Every run, where one family was asked for."""


@dataclass(frozen=True)
class ChoiceScores(Answer):
    """How good the choices are that predictions lead to."""

    scores: dict[str, Any]
    """Of sweeps and of recipes."""
    rows: int = field(default=0, metadata=DRAWN)
    each: bool = field(default=False, metadata=DRAWN)
    """Whether recipe by recipe is shown: one family was asked for."""


@dataclass(frozen=True)
class KernelScores(Answer):
    """Errors of the kernel model."""

    scores: dict[str, Any]
    """In percent, by kind of kernel and by chip."""


@plain.register
def _(value: PredictionScores | ChoiceScores | KernelScores) -> dict[str, Any]:
    return value.scores


def prediction_scores(runs: Path | None, family: str | None) -> PredictionScores:
    """Score predictions of published runs, or of a file of them, or of one source family. Raises InputError."""
    compared = compare(_rows(runs, family))
    summary = scores(compared)
    if runs is None and family is None:
        summary["collectives"] = link_scores(load(COLLECTIVES, ("hardware", "collective")))
    return PredictionScores(summary, compared if family is not None else None)


def choice_scores(runs: Path | None, family: str | None, announce: Callable[[str], None]) -> ChoiceScores:
    """Score the choices among published runs, or a file of them, or of one source family. Raises InputError."""
    rows = _rows(runs, family)
    return ChoiceScores(score(rows, announce), len(rows), family is not None)


def kernel_scores() -> KernelScores:
    """Score the kernel model on kernels that were measured alone."""
    return KernelScores(score_kernels())


def _rows(runs: Path | None, family: str | None) -> list[Row]:
    measured = load(runs) if runs is not None else load(RUNS) + load(SMALL_RUNS)
    if family is None:
        return measured
    chosen = [row for row in measured if row.family == family]
    if not chosen:
        raise InputError("rows", family, "is not a source family", nearest(family, {row.family for row in measured}))
    return chosen
