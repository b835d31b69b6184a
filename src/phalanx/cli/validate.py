"""`phalanx validate`: compare predictions with published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import console, exit_on_error, print_json

if TYPE_CHECKING:
    from phalanx.validate.records import Row


def validate(
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            metavar="FILE.csv",
            help="Your own measured runs, in the columns of the published ones that ship with Phalanx.",
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            "--rows", metavar="FAMILY", help="Show this source family only, row by row, published beside predicted."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict every published run that is fully specified, and show how far off the predictions are."""
    with exit_on_error():
        from phalanx.validate.collectives import link_scores
        from phalanx.validate.prediction_error import compare, scores
        from phalanx.validate.records import COLLECTIVES, RUNS, SMALL_RUNS, load

        measured = load(runs) if runs is not None else load(RUNS) + load(SMALL_RUNS)
        if rows is not None:
            measured = _of_family(measured, rows)
        compared = compare(measured)
        summary = scores(compared)
        if runs is None and rows is None:
            summary["collectives"] = link_scores(load(COLLECTIVES, ("hardware", "collective")))
        if as_json:
            print_json(summary)
            return

        from phalanx.report.validate import families, overall, reasons, side_by_side

        out = console()
        if rows is not None:
            out.print(side_by_side(compared))
        out.print(families(summary))
        out.print(overall(summary), highlight=False)
        out.print(reasons(summary))


def _of_family(measured: list[Row], family: str) -> list[Row]:
    """Return the rows of one source family. Raises InputError."""
    from phalanx.spec.errors import InputError, nearest

    chosen = [row for row in measured if row.family == family]
    if not chosen:
        raise InputError(
            "--rows", family, "is not a source family", nearest(family, {row.family for row in measured})
        )
    return chosen
