"""`phalanx compare`: two or three plans, strategies or observed programs beside each other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.observed import observation_in, show_differences
from phalanx.cli.options import (
    Batch,
    Cluster,
    Gpus,
    Json,
    Model,
    OptionalStack,
    Precision,
    Report,
    Seq,
    StackOptionsLine,
)
from phalanx.cli.terminal import announce, console, exit_on_error, print_json, require_writable


def compare(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C]",
            help="Plans, runs' folders, configurations of other frameworks, or strategies such as tp=8,zero=1; or an "
            "observed.json and a plan.",
            show_default=False,
        ),
    ],
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    stack: OptionalStack = None,
    precision: Precision = None,
    options: StackOptionsLine = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Compare plans, configurations or strategies: time by term, memory by part, and the settings that differ.

    A strategy is that of the first plan's question, or of --model, --cluster, --gpus, --batch and --seq. Of an
    observed program and a plan: where its step differs, in collectives, bytes, FLOPs and memory.
    """
    with exit_on_error():
        from phalanx.spec.errors import InputError

        observed = [observation_in(Path(name)) for name in what]
        if any(o is not None for o in observed):
            if len(what) != 2 or observed[0] is None or observed[1] is not None:
                reason = "an observed program is compared with one plan"
                raise InputError("compare", ", ".join(what), reason, "phalanx compare observed.json plan.json")
            show_differences(observed[0], Path(what[1]), as_json)
            return
        from phalanx.answers.compare import differing, sides
        from phalanx.answers.question import Asked
        from phalanx.report import compare as tables

        require_writable("--report", report)
        asked = Asked(None, model, cluster, gpus, batch, seq, None, stack, precision, setting=options)
        compared = sides(what, asked)
        rows = differing([side.settings for side in compared])
        if as_json:
            print_json(
                {
                    "sides": [{**asdict(s), "strategy": str(s.strategy), "settings": None} for s in compared],
                    "settings_that_differ": {name: values for name, values in rows},
                }
            )
            return
        screen = console()
        if report is not None:
            from phalanx.report.html.comparison import report as page_of

            report.write_text(page_of(compared, rows))
            announce(f"report: {report}")
        for line in tables.legend(compared):
            screen.print(line, highlight=False, soft_wrap=True)
        for grid in (tables.figures(compared), tables.time(compared), tables.memory(compared)):
            screen.print(grid)
        screen.print(tables.settings(rows, len(compared)) if rows else "no setting differs")
