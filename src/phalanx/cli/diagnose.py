"""`phalanx diagnose`: a run's logs and traces compared with its plan, term by term."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from phalanx.answers.query import Query
from phalanx.cli.command import command
from phalanx.cli.options import OF_A_STRATEGY
from phalanx.cli.output import Display

_OF_A_PLAN = tuple(name for name in OF_A_STRATEGY if name != "source")


@command
def diagnose(
    files: list[str],
    query: Annotated[Query, _OF_A_PLAN],
    output: Annotated[Display, "json", "save"],
    plan: list[Path] | None = None,
) -> None:
    """Compare a run's step with its plan part by part, the largest gap first, and what to do about it.

    Every instant of a step is charged to one part: products, attention, memory-bound kernels, launches, each axis's
    exposed communication, the pipeline, data loading, the host, and waiting for other ranks.

    files FILE...: A run's folder, a step log, traces of torch.profiler (.json, .json.gz, a folder of them) or nsys
        (.sqlite), NCCL's log or inspector's dump, a CUDA memory snapshot, or 4.3s, 230TFLOP/s.
    --plan FILE: What was run: a plan.json, a launch script, a configuration; else --model and the rest.
    """
    from phalanx.answers.diagnose.diagnosis import diagnosis_of

    source = plan[0] if plan else None
    output.show(diagnosis_of(files, replace(query, source=source, files=tuple((plan or [])[1:]))))
