"""`phalanx serve verify`: prove that generation does what is predicted."""

from __future__ import annotations

import typer

from phalanx.cli.command import command
from phalanx.cli.output import show_view
from phalanx.cli.terminal import FAILED, announce, print_json, require_torch


@command
def verify(
    model: str,
    strategy: str | None = None,
    requests: int = 16,
    context: int | None = None,
    precision: str | None = None,
    json: bool = False,
) -> None:
    """Run the real prefill and decode of each class of ranks on fake tensors, and compare them with the predicted
    steps.

    requests --batch: Requests of a replica.
    context --seq: Sequence length in tokens.
    """
    require_torch()
    from phalanx.serving.proof.proof import as_json as to_json
    from phalanx.serving.proof.proof import prove
    from phalanx.serving.proof.report import view

    result = prove(model, strategy, requests, context, precision, announce)
    if json:
        print_json(to_json(result))
    else:
        show_view(view(result))
    if not result.proved:
        raise typer.Exit(FAILED)
