"""`phalanx read`: what another framework's configuration says, key by key, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Gpus, Json
from phalanx.cli.show import show_notes
from phalanx.cli.terminal import console, exit_on_error, print_json


def read(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="A script, command line, YAML, TOML or JSON; or TrainingArguments and their DeepSpeed JSON.",
            show_default=False,
        ),
    ],
    gpus: Gpus = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            help="Framework, where the content does not tell: megatron, nemo, torchtitan, deepspeed, accelerate, hf, "
            "nanotron or maxtext.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read another framework's configuration: its layout, what became of every key, and its mistakes.

    `predict`, `explain`, `lint`, `comm`, `roofline` and `memory` take such a file too, with --cluster. Nothing in it
    is run.
    """
    with exit_on_error():
        from phalanx.commands.read import read as run

        reading = run(paths, kind, gpus)
        if as_json:
            print_json(reading.as_json())
            return

        from phalanx.report.read import keys, layout

        show_notes(reading.notes)
        out = console()
        out.print(layout(reading.configuration, " ".join(map(str, paths))))
        out.print(keys(reading.configuration))
        for m in reading.mistakes:
            out.print(f"{m.name}: {m.key} {m.problem}; {m.mend} ({m.source})", highlight=False, soft_wrap=True)
