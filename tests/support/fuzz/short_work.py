"""Valid work that is long is no hang: a training or a parity that is predicted to take longer than a case may is
examined up to the start of its ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.answers.plan import decide
from phalanx.runtime.process import launch as launching
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file, plan

_SECONDS = 5.0  # as predicted for an idle laptop; this machine may be slower, and busy


@contextmanager
def short_work() -> Iterator[None]:
    """Meanwhile no ranks are launched for a training or a parity that is predicted to take longer than 5 s."""
    real = launching.launch

    def launch(module: str, argument: str, *rest: Any) -> None:
        if (seconds := _predicted(module, json.loads(argument))) > _SECONDS:
            raise InputError("work", f"{seconds:.0f} s", "is longer than a case may take")
        real(module, argument, *rest)

    launching.launch = launch
    try:
        yield
    finally:
        launching.launch = real


def _predicted(module: str, argument: dict[str, Any]) -> float:
    """Predict how many seconds the steps of a worker take; 0 if it takes none."""
    if module == "phalanx.training.worker":
        saved = plan.read(Path(argument["folder"]) / "plan.json")
        return float(saved.prediction["step_time_s"] * saved.train.steps)
    if module == "phalanx.observation.parity.worker":
        decided = decide(job_file.from_tables(argument["tables"], Path()))
        # Under both optimizers, by all ranks together and by one process, whose steps take as long as all ranks'.
        world, step = decided.plan.strategy.world, decided.plan.prediction["step_time_s"]
        return float(2 * (1 + world) * step * argument["steps"])
    return 0.0
