"""`phalanx read`: what another framework's configuration means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Gpus, Json
from phalanx.cli.terminal import exit_on_error, print_json


def read(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A configuration or launch script.", show_default=False)
    ],
    gpus: Gpus = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="What it is, if it is not recognised: megatron or deepspeed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read a Megatron-LM launch script or a DeepSpeed JSON: its layout, and an account of every key.

    Nothing in the file is run. Each key is understood, known not to matter, or named with the nearest known one.
    """
    with exit_on_error():
        from phalanx.formats.reader import as_json as to_json
        from phalanx.formats.reader import read as run

        result = run(file, gpus, kind)
        content = to_json(result)
        if as_json:
            print_json(content)
            return
        for title in ("strategy", "job"):
            fields = ", ".join(f"{n}={v}" for n, v in content[title].items() if v is not None)
            print(f"{title}: {fields or 'open'}")
        print(f"stack: {result.stack}")
        if result.facts.world is None:
            print("world: left open by the file; name --gpus")
        print(f"understood: {len(result.understood)} keys; without effect: {len(result.without_effect)}")
        for u in result.unknown:
            hint = f"; nearest: {u.nearest}" if u.nearest and u.nearest != u.key else ""
            print(f"unknown: {u.key} {u.reason}{hint}")
        for note in result.notes:
            print(f"note: {note}")
