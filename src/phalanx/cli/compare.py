"""`phalanx compare`: two or three plans, strategies or observed programs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.answers.query import Query
from phalanx.cli.command import command
from phalanx.cli.output import Display
from phalanx.cli.terminal import FAILED

_SHARED = ("model", "cluster", "gpus", "batch", "seq", "stack", "precision", "options", "calibration", "changes")


@command
def compare(sides: list[str], query: Annotated[Query, _SHARED], output: Annotated[Display, "json", "save"]) -> None:
    """Compare plans, configurations or strategies: time by term, memory by part, and the settings that differ.

    A strategy is that of the first plan's question, or of --model, --cluster, --gpus, --batch and --seq. Of an
    observed program and a plan: where its step differs, in collectives, bytes, FLOPs and memory.

    sides A B [C]: Plans, runs' folders, configurations of other frameworks, or strategies such as tp=8,zero=1; or an
        observed.json and a plan.
    """
    from phalanx.answers import observed
    from phalanx.answers.compare import comparison_of
    from phalanx.spec.errors import InputError

    seen = [observed.observation_of(Query(name)) for name in sides]
    if not any(seen):
        output.show(comparison_of(sides, query))
        return
    if len(sides) != 2 or seen[0] is None or seen[1] is not None:
        reason = "an observed program is compared with one plan"
        raise InputError("compare", ", ".join(sides), reason, "phalanx compare observed.json plan.json")
    differences = observed.compare(seen[0], Path(sides[1]))
    output.show(differences)
    if differences:
        raise typer.Exit(FAILED)
