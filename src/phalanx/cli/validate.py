"""`phalanx validate`: predictions beside published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.terminal import Json, console, mistakes, print_json

if TYPE_CHECKING:
    from phalanx.validate.records import Row


def validate(
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="FILE.csv", help="Measured runs in the columns of the files that ship here."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="FAMILY", help="Row by row of a source family: published and predicted."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict every published run that is specified enough, and say how far off the predictions are."""
    with mistakes():
        from phalanx.validate.collectives import link_scores
        from phalanx.validate.prediction_error import compare, scores
        from phalanx.validate.records import COLLECTIVES, RUNS, SMALL_RUNS, load

        given = load(runs) if runs is not None else load(RUNS) + load(SMALL_RUNS)
        if rows is not None:
            given = _of(given, rows)
        found = compare(given)
        told = scores(found)
        if runs is None and rows is None:
            told["collectives"] = link_scores(load(COLLECTIVES, ("hardware", "collective")))
        if as_json:
            print_json(told)
            return

        from phalanx.report.validate import families, overall, reasons, side_by_side

        out = console()
        if rows is not None:
            out.print(side_by_side(found))
        out.print(families(told))
        out.print(overall(told), highlight=False)
        out.print(reasons(told))


def _of(given: list[Row], family: str) -> list[Row]:
    """Those of a source family. Raises InputError."""
    from phalanx.spec.errors import InputError, nearest

    found = [row for row in given if row.family == family]
    if not found:
        raise InputError("--rows", family, "is not a source family", nearest(family, {row.family for row in given}))
    return found
