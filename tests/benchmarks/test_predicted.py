"""The benchmarks of predicted strategies: all are legal and differ, and what is compared is compared rightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.memory import strategy_of
from benchmarks.predicted import DENSE, SLOWED, TRUTH, quiet, rank_correlation, slowed, truth
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.files import job_file
from phalanx.spec.strategy.legality import require_runnable


def test_every_family_is_trained_on_one_two_and_four_ranks() -> None:
    assert sum(map(len, TRUTH.values())) >= 24
    for (job, ranks), lines in TRUTH.items():
        file = job_file.load(Path(job), ["job.global_batch=16"])
        assert len(set(lines)) == len(lines)
        for line in lines:
            s = strategy_of(line)
            assert s.world == ranks, line
            check(s, file.model, file.job, None)
            require_runnable(s, file.job)
    for line, (rank, _) in SLOWED.items():
        assert rank < strategy_of(line).world == 2


def _found(measured: float, predicted: float, stolen: float = 0.0) -> dict[str, Any]:
    return {"seconds": [measured] * 9, "stolen": [stolen] * 9, "predicted": predicted}


def test_what_was_predicted_is_judged() -> None:
    def right(_: str, ranks: int, **given: Any) -> dict[str, Any]:
        return {line: _found(1.5 + i, 1.5 + i) for i, line in enumerate(given["cases"])}

    def reversed_(_: str, ranks: int, **given: Any) -> dict[str, Any]:
        return {line: _found(1.5 + i, 99.0 - i) for i, line in enumerate(given["cases"])}

    judged = {r.name: r.kept for r in truth(right) if r.limit and "load" not in r.name}
    assert judged
    assert all(judged.values())
    assert not any(r.kept for r in truth(reversed_) if r.limit and "load" not in r.name)
    assert all(r.kept for r in slowed(right) if "load" not in r.name)
    assert not all(r.kept for r in slowed(reversed_) if "load" not in r.name)


def test_a_busy_machine_is_not_judged() -> None:
    assert quiet(_found(1.0, 1.0, stolen=0.9)) is None
    busy = [r for r in truth(lambda _, ranks, cases, **rest: {line: _found(1.0, 1.0, 0.9) for line in cases})]
    assert not any(r.kept for r in busy if DENSE in r.name)


def test_rank_correlation() -> None:
    a = np.array([3.0, 1.0, 2.0])
    assert rank_correlation(a, a**3) == pytest.approx(1)
    assert rank_correlation(a, -a) == pytest.approx(-1)
