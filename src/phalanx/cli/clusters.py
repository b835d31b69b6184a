"""`phalanx clusters`: the clusters that are known by name, and where their numbers come from."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.terminal import Json, console, mistakes, print_json


def clusters(
    name: Annotated[str | None, typer.Argument(help="One cluster, with its sources.", show_default=False)] = None,
    nodes: Annotated[int, typer.Option(help="How many nodes of it.")] = 32,
    as_json: Json = False,
) -> None:
    """The clusters that `cluster.preset` can name: devices, dense FLOP/s, links in one direction, sources."""
    from dataclasses import asdict

    with mistakes():
        from phalanx.spec.cluster.presets import PRESETS, preset

        found = [preset(n, nodes) for n in ([name] if name else PRESETS)]
        if as_json:
            print_json([asdict(spec) for spec in found])
            return

        from phalanx.report.clusters import sources, table

        out = console()
        out.print(table(found))
        for line in sources(found[0]) if name else ():
            out.print(line, highlight=False, soft_wrap=True)
