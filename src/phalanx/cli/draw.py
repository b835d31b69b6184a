"""`phalanx draw`: the pictures of the textbook, by name."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.options import Batch, Cluster, Gpus, Json, Model, Plot, Seq
from phalanx.cli.terminal import announce, exit_on_error, print_json, require_drawing


def draw(
    name: Annotated[
        str | None, typer.Argument(help="The picture; without one, all are listed.", show_default=False)
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
        from phalanx.report.gallery.registry import PICTURES, options_of, picture
        from phalanx.report.pictures.files import text, write

        if name is None and as_json:
            rows = [(known, entry.what, options_of(known), entry.instead) for known, entry in PICTURES.items()]
            print_json([dict(zip(("name", "what", "takes", "of_yours"), row, strict=True)) for row in rows])
            return
        if name is None:
            for known, entry in PICTURES.items():
                print(f"{known:<24}{entry.what}")
                if options_of(known):
                    print(f"    takes {', '.join(options_of(known))}")
                if entry.instead:
                    print(f"    of yours: phalanx {entry.instead}")
            return
        require_drawing(plot)
        given = {
            "model": model,
            "cluster": cluster,
            "gpus": gpus,
            "batch": batch,
            "seq": seq,
            "ranks": ranks,
            "params": params,
        }
        drawn = picture(name, {key: value for key, value in given.items() if value is not None})
        if plot is not None:
            write([drawn], plot)
            announce(f"wrote {plot}")
        if as_json:
            panels = [{"kind": type(panel).__name__.lower(), **asdict(panel)} for panel in drawn.panels]
            print_json({"name": name, **asdict(drawn), "panels": panels})
            return
        print("\n".join(text(drawn)))
