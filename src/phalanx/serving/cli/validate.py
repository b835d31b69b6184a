"""`phalanx serve validate`: compare predicted times of serving engines with measured ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import console, exit_on_error, print_json


def validate(
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            metavar="FILE.csv",
            help="Your own measured runs, in the columns of the published ones that ship with Phalanx.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict every measured run of an engine: seconds per output token (TPOT) and to the first token (TTFT)."""
    with exit_on_error():
        from phalanx.serving.validation.predictions import loaded
        from phalanx.serving.validation.scores import compare, scores

        summary = scores(*compare(loaded(runs)))
        if as_json:
            print_json(summary)
            return

        from phalanx.serving.validation import large_ep, report

        out = console()
        out.print(report.parts(summary, "model", "by model: absolute error in percent, mean / median"))
        out.print(report.parts(summary, "gpu", "by GPU: absolute error in percent, mean / median"))
        out.print(report.engines(summary))
        out.print(report.large_ep(large_ep.runs()))
        out.print(report.notes(summary), highlight=False)
