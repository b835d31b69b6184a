"""`phalanx serve verify`: prove that generation does what is predicted."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.options import Json, Precision, Seq, StrategyLine
from phalanx.cli.output import show_view
from phalanx.cli.terminal import FAILED, announce, exit_on_error, print_json, require_torch
from phalanx.serving.cli.options import Model


def verify(
    model: Model,
    strategy: StrategyLine = None,
    requests: Annotated[int, typer.Option("--batch", help="Requests of a replica.")] = 16,
    context: Seq = None,
    precision: Precision = None,
    as_json: Json = False,
) -> None:
    """Run the real prefill and decode of each class of ranks on fake tensors, and compare them with the predicted
    steps."""
    with exit_on_error():
        require_torch()
        from phalanx.serving.proof.proof import as_json as to_json
        from phalanx.serving.proof.proof import prove
        from phalanx.serving.proof.report import view

        result = prove(model, strategy, requests, context, precision, announce)
        if as_json:
            print_json(to_json(result))
        else:
            show_view(view(result))
        if not result.proved:
            raise typer.Exit(FAILED)
