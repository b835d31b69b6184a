"""`phalanx presets clusters`: the cluster presets, and the sources of their numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.options import Json, Plot
from phalanx.cli.terminal import announce, console, exit_on_error, print_json, require_drawing


def clusters(
    name: Annotated[
        str | None, typer.Argument(help="Show this preset alone, with its sources.", show_default=False)
    ] = None,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 32,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """List the cluster presets: devices, dense FLOP/s, bandwidth of links in one direction."""
    from dataclasses import asdict

    with exit_on_error():
        from phalanx.spec.cluster.presets import PRESETS, preset

        require_drawing(plot)
        specs = [preset(n, nodes) for n in ([name] if name else PRESETS)]
        if plot is not None:
            from phalanx.report.gallery.hardware import bandwidths, hierarchy, switch_levels
            from phalanx.report.pictures.files import write

            gpus = specs[0].ranks
            write([hierarchy(name, gpus), switch_levels(name, gpus)] if name else [bandwidths()], plot)
            announce(f"wrote {plot}")
        if as_json:
            from phalanx.planning.tables.switch_levels import sheet as levels

            print_json([{**asdict(spec), "levels": levels(spec).records()} for spec in specs])
            return

        from phalanx.report.clusters import sources, table

        out = console()
        out.print(table(specs))
        if name:
            from phalanx.planning.tables.switch_levels import sheet as levels
            from phalanx.report.sheets import drawn

            out.print(drawn(levels(specs[0])))
            for line in sources(specs[0]):
                out.print(line, highlight=False, soft_wrap=True)
