"""Stale pipelines: the emulation is SGD with a flush, PipeDream's recursion without, and turns where theory says."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.report.pictures.figure import Lines
from phalanx.spec.errors import InputError
from phalanx.textbook.gallery.stale_pipelines import largest_rate, losses, staleness

_TARGETS = np.array([0.5, 1.25])


def _seen(stages: int, steps: int, rate: float, age: int) -> list[float]:
    """Narayanan et al. 2019, section 3.3: every stage r takes the gradient at weights that are `age` (P-1-r) old."""
    history = [[np.ones(2)] * stages]
    seen = []
    for t in range(steps):
        old = [history[max(0, t - age * (stages - 1 - r))][r] for r in range(stages)]
        error = np.prod(old, axis=0) - _TARGETS
        seen.append(float((error**2).mean() / 2))
        gradients = [error * np.prod([*old[:r], *old[r + 1 :]], axis=0) for r in range(stages)]
        history.append([w - rate * g for w, g in zip(history[-1], gradients, strict=True)])
    return seen


@pytest.mark.parametrize("flush", [True, False])
def test_a_pipeline_sees_the_losses_of_its_recursion(flush: bool) -> None:
    seen = losses(4, 30, 0.1, _TARGETS, stash=True, flush=flush)
    assert seen == pytest.approx(_seen(4, 30, 0.1, age=not flush), abs=1e-15)


def test_the_newest_weights_give_another_gradient_than_stashed_ones() -> None:
    stashed, newest = (losses(4, 30, 0.1, _TARGETS, stash) for stash in (True, False))
    assert stashed[:4] == newest[:4]
    assert max(abs(a - b) for a, b in zip(stashed, newest, strict=True)) > 1e-4


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("stages", [2, 4, 7])
def test_beyond_the_largest_rate_weights_leave_their_target(stages: int, flush: bool) -> None:
    near, steps = np.array([1 + 1e-9]), 60 * stages
    for times, falls in ((0.97, True), (1.03, False)):
        seen = losses(stages, steps, times * largest_rate(stages, flush), near, stash=True, flush=flush)
        half = max(seen[steps // 2 - 4 * stages : steps // 2])
        assert (max(seen[-4 * stages :]) < half) == falls


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_a_picture_shows_stashed_weights_that_reach_their_target(ranks: int) -> None:
    """Slower than one process: its rate is within what they bear."""
    panel = staleness(ranks).panels[0]
    assert isinstance(panel, Lines)
    flushed, stashed, _ = ([loss for _, loss in s.points] for s in panel.series)
    assert flushed[-1] < flushed[0] / 2
    assert max(stashed[-2 * ranks :]) < stashed[0] / 2


def test_one_stage_or_thousands_are_refused() -> None:
    for ranks in (1, 17, 10**6):
        with pytest.raises(InputError, match="2 to 16"):
            staleness(ranks)
