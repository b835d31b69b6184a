"""`phalanx doctor`: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import FAILED, console, exit_on_error, print_json


def doctor(as_json: Json = False) -> None:
    """Say what this machine has, what is missing and how to get it; exit code 1 if something needed is missing."""
    from dataclasses import asdict

    with exit_on_error():
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
