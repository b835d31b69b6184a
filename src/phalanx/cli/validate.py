"""`phalanx validate`: compare predictions, and the choices that they lead to, with published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import announce, console, exit_on_error, print_json
from phalanx.cli.unread import require_only

if TYPE_CHECKING:
    from phalanx.validate.records import Row


def validate(
    line: typer.Context,
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
    choices: Annotated[
        bool,
        typer.Option(
            "--choices",
            help="Score choices instead of times: the order of strategies that were measured for one question, and "
            "the best predicted strategy beside those that experts tuned. Searches every recipe: some minutes.",
        ),
    ] = False,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Score the kernel model: products, attention, experts and all-reduces in a node that were measured "
            "alone on eight chips, also by constants fitted without the chip.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict every published run that is fully specified, and show how far off the predictions are."""
    with exit_on_error():
        if kernels:
            require_only(line, "kernels", reason="does not go with --kernels, which scores what ships")
            _score_kernels(as_json)
            return
        from phalanx.validate.collectives import link_scores
        from phalanx.validate.prediction_error import compare, scores
        from phalanx.validate.records import COLLECTIVES, RUNS, SMALL_RUNS, load

        measured = load(runs) if runs is not None else load(RUNS) + load(SMALL_RUNS)
        if rows is not None:
            measured = _of_family(measured, rows)
        if choices:
            _score_choices(measured, rows is not None, as_json)
            return
        compared = compare(measured)
        summary = scores(compared)
        if runs is None and rows is None:
            summary["collectives"] = link_scores(load(COLLECTIVES, ("hardware", "collective")))
        if as_json:
            print_json(summary)
            return

        from phalanx.report.validate import families, overall, reasons, replaced_stacks, side_by_side

        out = console()
        if rows is not None:
            out.print(side_by_side(compared))
        if compared.predicted:
            out.print(families(summary))
            out.print(overall(summary), highlight=False)
        else:
            out.print("none of these rows can be predicted", highlight=False)
        if summary["replaced_stacks"]:
            out.print(replaced_stacks(summary))
        out.print(reasons(summary))


def _score_kernels(as_json: bool) -> None:
    """Score the kernel model and print it."""
    from phalanx.validate.kernels import kernel_scores

    summary = kernel_scores()
    if as_json:
        print_json(summary)
        return

    from phalanx.report import validate_kernels as report

    out = console()
    out.print(report.kinds(summary))
    out.print(report.chips(summary))
    out.print(report.notes(summary), highlight=False)


def _score_choices(measured: list[Row], each: bool, as_json: bool) -> None:
    """Score the choices of some rows and print them; `each`: also recipe by recipe."""
    from phalanx.answers.choices import score

    summary = score(measured, announce)
    if as_json:
        print_json(summary)
        return

    from phalanx.report import choices

    out = console()
    if summary["sweeps"]["n"]:
        out.print(choices.sweeps(summary))
        out.print(choices.worst_sweeps(summary))
    if any(kind["n"] for kind in summary["recipes"].values()):
        if each:
            out.print(choices.each_recipe(summary))
        out.print(choices.recipes(summary))
        out.print(choices.options(summary))
    if not summary["sweeps"]["n"] and not any(kind["n"] for kind in summary["recipes"].values()):
        out.print(f"no recipe, and no question with enough strategies, among {len(measured)} rows")
    if summary["left_out"]:
        out.print(choices.left_out(summary))


def _of_family(measured: list[Row], family: str) -> list[Row]:
    """Return the rows of one source family. Raises InputError."""
    from phalanx.spec.errors import InputError, nearest

    chosen = [row for row in measured if row.family == family]
    if not chosen:
        raise InputError(
            "--rows", family, "is not a source family", nearest(family, {row.family for row in measured})
        )
    return chosen
