"""`phalanx clusters`: the cluster presets, and the sources of their numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import console, exit_on_error, print_json


def clusters(
    name: Annotated[
        str | None, typer.Argument(help="Show this preset alone, with its sources.", show_default=False)
    ] = None,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 32,
    as_json: Json = False,
) -> None:
    """List the cluster presets: devices, dense FLOP/s, bandwidth of links in one direction."""
    from dataclasses import asdict

    with exit_on_error():
        from phalanx.spec.cluster.presets import PRESETS, preset

        specs = [preset(n, nodes) for n in ([name] if name else PRESETS)]
        if as_json:
            from phalanx.plan.tables.switch_levels import sheet as levels

            print_json([{**asdict(spec), "levels": levels(spec).records()} for spec in specs])
            return

        from phalanx.report.clusters import sources, table

        out = console()
        out.print(table(specs))
        if name:
            from phalanx.plan.tables.switch_levels import sheet as levels
            from phalanx.report.sheets import drawn

            out.print(drawn(levels(specs[0])))
            for line in sources(specs[0]):
                out.print(line, highlight=False, soft_wrap=True)
