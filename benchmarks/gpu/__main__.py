"""Examine this machine's GPUs:  python -m benchmarks.gpu FOLDER [--json]   (`make gpu GPU=FOLDER`)"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu.examine import as_text, examine, failed
from phalanx.cli.terminal import FAILED, announce, exit_on_error, print_json


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the report; parts whose results it has are not rerun.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Examine the GPUs in parts of at most minutes each: rates, links, parity, steps next to plain PyTorch.

    Without a GPU: steps on a fake one. Exit code 1 if a part fails.
    """
    with exit_on_error():
        content = examine(folder.absolute(), announce)
        if as_json:
            print_json(content)
        else:
            print(as_text(content), end="")
        announce(f"wrote {folder / 'gpu.md'} and {folder / 'gpu.json'}")
        if failed(content):
            raise typer.Exit(FAILED)


APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(main)

if __name__ == "__main__":
    APP()
