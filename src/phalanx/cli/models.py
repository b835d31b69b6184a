"""`phalanx presets models`: the model presets, and the shape and parameters of one model."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import console, exit_on_error, print_json


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|PATH",
            help="Show this model alone: a preset, a Hugging Face config.json, or a folder that holds one.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the model presets, or show one model's shape and parameters."""
    from dataclasses import asdict
    from pathlib import Path

    from phalanx.cli.terminal import announce
    from phalanx.spec.files.job_file import make_model
    from phalanx.spec.model.presets import PRESETS

    with exit_on_error():
        if name is None:
            specs = {preset: make_model({"preset": preset}, Path())[0] for preset in PRESETS}
            if as_json:
                counts = {n: {"parameters": m.parameter_count, "active": m.active_count} for n, m in specs.items()}
                print_json({n: {**counts[n], **asdict(m)} for n, m in specs.items()})
                return

            from phalanx.report.models import presets

            console().print(presets(specs))
            return

        config = str(Path(name) / "config.json") if name not in PRESETS and Path(name).is_dir() else name
        model, notes = make_model({"config" if config.endswith(".json") else "preset": config}, Path())
        for note in notes:
            announce(f"note: {note}")

        from phalanx.report.models import by_role, parts, shape

        if as_json:
            totals = {"parameters": model.parameter_count, "active": model.active_count}
            print_json({"model": asdict(model), **totals, "roles": by_role(model)})
            return
        out = console()
        out.print(shape(name, model), highlight=False, soft_wrap=True)
        out.print(parts(model))
