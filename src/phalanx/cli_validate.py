"""`phalanx validate`: predictions beside published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.terminal import Json, console, mistakes, print_json


def validate(
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="FILE.csv", help="Measured runs in the columns of the files that ship here."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict every published run that is specified enough, and say how far off the predictions are."""
    with mistakes():
        from phalanx.validate.compare import compare, scores
        from phalanx.validate.links import link_scores
        from phalanx.validate.records import COLLECTIVES, RUNS, SMALL_RUNS, load

        rows = load(runs) if runs is not None else load(RUNS) + load(SMALL_RUNS)
        found = compare(rows)
        told = scores(found)
        if runs is None:
            told["collectives"] = link_scores(load(COLLECTIVES, ("hardware", "collective")))
        if as_json:
            print_json(told)
            return

        from phalanx.report.validated import families, overall, reasons

        out = console()
        out.print(families(told))
        out.print(overall(told), highlight=False)
        out.print(reasons(told))
