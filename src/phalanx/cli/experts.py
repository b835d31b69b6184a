"""`phalanx experts`: how a run's tokens were spread over its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.terminal import Json, console, mistakes, print_json

experts = typer.Typer(no_args_is_help=True, help="Mixtures of experts: how a run's tokens were spread over them.")


@experts.command()
def show(run: Annotated[Path, typer.Argument(help="A run's folder, runs/NAME.")], as_json: Json = False) -> None:
    """The busiest expert's load over the mean, layer by layer, in the course of a run."""
    from phalanx.report.experts import balance, busiest, stretches
    from phalanx.runs.folder import metrics
    from phalanx.spec.errors import InputError

    with mistakes():
        found = stretches(metrics(run))
        if not found:
            raise InputError("run", str(run), "its metrics tell nothing of experts", "name a run of such a model")
        if as_json:
            parts = [
                {
                    "first_step": part.first,
                    "last_step": part.last,
                    "dropped": part.dropped,
                    "busiest": {block: busiest(chosen) for block, chosen in part.chosen.items()},
                    "chosen": dict(part.chosen),
                }
                for part in found
            ]
            print_json({"stretches": parts})
        else:
            console().print(balance(found))
