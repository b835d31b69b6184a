"""`phalanx doctor`: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import FAILED, announce, console, exit_on_error, print_json, require_torch
from phalanx.spec.errors import InputError


def doctor(
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Examine the GPUs, in parts of at most minutes each: parity, rates and links, steps beside plain "
            "PyTorch. Without a GPU: the step on an imagined one.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for --gpu's report and gpu.json; what is there is not run again."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what this machine has, what is missing and how to get it; exit code 1 if something needed is missing."""
    from dataclasses import asdict

    with exit_on_error():
        if gpu or out is not None:
            _gpus(gpu, out, as_json)
            return
        from phalanx.answers.doctor import look_around

        checks = look_around()
        if as_json:
            print_json([asdict(f) for f in checks])
        else:
            from phalanx.report.style import table

            grid = table("this machine", "", "what", "state", left=("", "what", "state"))
            for f in checks:
                grid.add_row("ok" if f.good else "MISSING", f.what, f.state)
            screen = console()
            screen.print(grid)
            for f in checks:
                if f.mend and (not f.good or "optional" in f.state):
                    screen.print(f"{f.what}: {f.mend}", highlight=False, soft_wrap=True)
        if not all(f.good for f in checks):
            raise typer.Exit(FAILED)


def _gpus(gpu: bool, out: Path | None, as_json: bool) -> None:
    """Examine the GPUs, and print the report."""
    if not gpu:
        raise InputError("--out", str(out), "is where --gpu writes", "add --gpu, or leave it out")
    if out is None:
        raise InputError("--out", None, "is missing", "name the folder for the report, as in --gpu --out gpu")
    require_torch()
    from phalanx.answers.gpu_doctor import as_text, examine, failed

    content = examine(out.absolute(), announce)
    if as_json:
        print_json(content)
    else:
        print(as_text(content), end="")
    announce(f"wrote {out / 'gpu.md'} and {out / 'gpu.json'}")
    if failed(content):
        raise typer.Exit(FAILED)
