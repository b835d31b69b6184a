"""`phalanx learn draw`: the pictures of the textbook, by name."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.options import Batch, Cluster, Gpus, Json, Model, Plot, Seq
from phalanx.cli.terminal import announce, exit_on_error, print_json, require_drawing


def draw(
    name: Annotated[
        str | None,
        typer.Argument(help="The picture; without one, all are listed, and drawn by --plot.", show_default=False),
    ] = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks.")] = None,
    params: Annotated[str | None, typer.Option("--params", metavar="7B", help="Number of parameters.")] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Draw a picture of the textbook: as text of 80 columns, and with --plot as SVG, page or PNG."""
    from dataclasses import asdict

    with exit_on_error():
        from phalanx.report.pictures.files import text, write
        from phalanx.spec.errors import InputError
        from phalanx.textbook.gallery.registry import PICTURES, options_of, picture

        require_drawing(plot)
        options = {
            "model": model,
            "cluster": cluster,
            "gpus": gpus,
            "batch": batch,
            "seq": seq,
            "ranks": ranks,
            "params": params,
        }
        chosen_options = {key: value for key, value in options.items() if value is not None}
        if name is None:
            for key, value in chosen_options.items():
                raise InputError(
                    f"--{key}", value, "is an option of a picture", "name one, from this list without it"
                )
            if plot is not None:
                write([picture(known) for known in PICTURES], plot)
                announce(f"wrote {plot}: all {len(PICTURES)} pictures")
            rows = [(known, entry.what, options_of(known), entry.instead) for known, entry in PICTURES.items()]
            if as_json:
                print_json([dict(zip(("name", "what", "takes", "of_yours"), row, strict=True)) for row in rows])
                return
            for known, what, takes, yours in rows:
                print(f"{known:<24}{what}")
                if takes:
                    print(f"    takes {', '.join(takes)}")
                if yours:
                    print(f"    of yours: phalanx {yours}")
            return
        drawn = picture(name, chosen_options)
        if plot is not None:
            write([drawn], plot)
            announce(f"wrote {plot}")
        if as_json:
            panels = [{"kind": type(panel).__name__.lower(), **asdict(panel)} for panel in drawn.panels]
            print_json({"name": name, **asdict(drawn), "panels": panels})
            return
        print("\n".join(text(drawn)))
