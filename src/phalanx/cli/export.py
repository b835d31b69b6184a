"""`phalanx export`: a plan as the configuration of another framework, with what starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import exit_on_error, print_json


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan, or a run's folder.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FRAMEWORK",
            help="Framework, such as megatron or torchtitan; another word lists all that plans are written for.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; empty, or not there yet.")],
    launcher: Annotated[
        str,
        typer.Option(
            "--launcher",
            metavar="NAME",
            help="What starts the nodes: torchrun, slurm, pytorchjob, trainjob, jobset or skypilot.",
        ),
    ] = "torchrun",
    as_json: Json = False,
) -> None:
    """Write a plan as another framework's configuration, ready to run once its blanks are filled in.

    What the framework cannot express is an error that names the field; nothing is left out.
    """
    with exit_on_error():
        from phalanx.answers.export import export as run

        result = run(plan, to, launcher, out)
        paths = [out / name for name in result.files]
        p = result.program
        blanks = [b.name for b in p.blanks if b.default == "FILL-IN"]
        if as_json:
            print_json(
                {
                    "to": p.title,
                    "launcher": launcher,
                    "folder": str(out),
                    "files": [path.name for path in paths],
                    "blanks": blanks,
                    "settings": {s.key: s.value for g in p.groups for s in g.settings},
                    "environment": {v.name: v.value for v in p.variables},
                    "notes": list(p.notes),
                }
            )
            return
        print(f"{p.title}: {out}/ has {', '.join(path.name for path in paths)}")
        for note in p.notes:
            print(f"note: {note}")
        if blanks:
            print(f"to fill in: {', '.join(blanks)}")
