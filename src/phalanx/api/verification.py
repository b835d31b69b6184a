"""The real program against its plan: the function behind `phalanx verify`."""

from __future__ import annotations

from pathlib import Path

from phalanx.api.results import Verification


def verify(
    model: str | None = None,
    cluster: str | None = None,
    gpus: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    strategy: str | None = None,
    *,
    source: str | Path | None = None,
    precision: str | None = None,
) -> Verification:
    """Run the real step of each class of ranks on tensors without content and hold it against the plan.

    `source`: a plan.json, a job file or a run's folder. Needs torch. Raises InputError."""
    from phalanx.answers.question import Asked
    from phalanx.answers.verify import as_json, run, target

    path = None if source is None else Path(source)
    asked = Asked(path, model, cluster, gpus, batch, seq, strategy, None, precision)
    result = run(target(asked, (), lambda _: None), lambda _: None)
    return Verification(result.proved, tuple(as_json(result)["classes"]))
