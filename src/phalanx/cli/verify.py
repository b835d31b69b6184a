"""`phalanx verify`: prove that the program `train` runs does what the plan says, at any world size."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.answers.query import Query
from phalanx.cli.command import command_with_progress
from phalanx.cli.output import Display, show_notes
from phalanx.cli.terminal import FAILED, announce, require_torch


@command_with_progress
def verify(
    query: Annotated[Query, "source", "strategy", "model", "cluster", "gpus", "batch", "seq", "precision"],
    output: Annotated[Display, "json", "save", "assertions"],
    overrides: list[str] | None = None,
    device: str = "cpu",
) -> None:
    """Run one real training step of each class of ranks, on tensors without content, and compare it with the plan.

    Name a plan, a run's folder, a job file or another framework's configuration; or model, cluster and the rest.

    --device cpu|cuda: Tensors of the host, or of a fake GPU: then a wrong device, a wait of the host for the GPU, a
        missing kernel or a buffer in flight is named with its line. Needs no GPU.
    """
    require_torch()
    from phalanx.answers.verify import run, target
    from phalanx.spec.errors import InputError

    if device not in ("cpu", "cuda"):
        raise InputError("device", device, "is neither cpu nor cuda", "use cuda for a fake GPU")
    subject = target(query, overrides or (), announce)
    show_notes(subject.notes)
    result = run(subject, announce, device == "cuda")
    output.show(result)
    if not result.proved:
        raise typer.Exit(FAILED)
