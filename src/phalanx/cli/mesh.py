"""`phalanx mesh`: which rank is where, and over which links each of its groups talks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.options import Cluster, Json, Plot, StrategyLine
from phalanx.cli.terminal import console, exit_on_error, print_json, require_drawing
from phalanx.cli.unread import require_only

if TYPE_CHECKING:
    from phalanx.planning.placement import Placement


def mesh(
    line: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="PLAN.json|JOB.toml", help="A plan, a run's folder or a job file; without one, give --strategy."
        ),
    ] = None,
    strategy: StrategyLine = None,
    cluster: Cluster = None,
    rank: Annotated[int | None, typer.Option(help="Show where this rank is, and its groups.")] = None,
    groups: Annotated[
        str | None, typer.Option(metavar="AXIS", help="List all groups of an axis, such as tp, ep or dp_shard+cp.")
    ] = None,
    axis: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS",
            help="Colour the groups of this axis; by default the innermost, or in a --plot those of --groups.",
        ),
    ] = None,
    cube: Annotated[
        bool, typer.Option("--cube", help="Draw the three largest axes as a cube: in the terminal, its slices.")
    ] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Show which rank is on which GPU, the groups of every axis, and over which links each group talks.

    phalanx mesh --strategy tp=8,pp=2,dp=2 --cluster dgx-h100
    """
    with exit_on_error():
        from phalanx.answers.mesh import placement
        from phalanx.planning.placement import axis_names, groups_of

        _require_read(line, groups, rank, cube, plot is not None, as_json)
        require_drawing(plot)
        p = placement(source, strategy, cluster)
        _require_rank(rank, p)
        names = axis_names(p.mesh)
        coloured = axis or groups or p.coloured_axis
        groups_of(p, coloured)  # raises for an axis that this mesh does not have
        members, tiers = groups_of(p, groups) if groups else (None, [])
        own = _own_groups(p, rank, names) if rank is not None else []
        if plot:
            from phalanx.report.gallery import mesh as pictures
            from phalanx.report.pictures.files import write

            write([pictures.slices(p, coloured) if cube else pictures.nodes(p, coloured, rank)], plot)
        if as_json:
            print_json(_as_json(p, rank, own, None if members is None else (groups, members, tiers)))
            return

        from phalanx.report import mesh as drawing
        from phalanx.report.style import counted

        out = console()
        if members is not None:
            for ranks, tier in zip(members, tiers, strict=True):
                print(f"{tier}: {' '.join(map(str, ranks))}")
            return
        if rank is not None:
            out.print(drawing.of_rank(p, rank, own))
            return
        out.print(
            f"{p.strategy}: {counted(p.world, 'rank')} on {counted(len(list(p.ranks_by_host())), 'node')} of "
            f"{p.cluster.name}, axes {p.strategy.order} from the outermost to the innermost\n",
            highlight=False,
            soft_wrap=True,
        )
        if cube:
            for text in drawing.slices(p):
                out.print(text, highlight=False, soft_wrap=True)
        else:
            out.print(drawing.nodes(p, coloured, out.width))
        if names:
            out.print(drawing.axes(p))


def _require_read(
    line: typer.Context, groups: str | None, rank: int | None, cube: bool, plotted: bool, as_json: bool
) -> None:
    """Require that a form of the command gives no options but those that it reads. Raises InputError."""
    question = ("source", "strategy", "cluster")
    of_plot = ("axis", "cube") if plotted else ()
    if groups is not None:
        require_only(line, *question, "groups", *of_plot, reason="does not go with --groups, which lists one axis")
    elif rank is not None:
        require_only(line, *question, "rank", *of_plot, reason="does not go with --rank, which draws no nodes")
    elif as_json:
        require_only(line, *question, *of_plot, reason="is about a drawing, and --json is none")
    elif cube and not plotted:
        require_only(
            line, *question, "cube", reason="colours nodes or a --plot, not slices of a cube in the terminal"
        )


def _require_rank(rank: int | None, p: Placement) -> None:
    from phalanx.spec.errors import InputError

    if rank is not None and not 0 <= rank < p.world:
        raise InputError("--rank", rank, f"{p.strategy} has ranks 0 to {p.world - 1}")


def _own_groups(p: Placement, rank: int, names: list[str]) -> list[tuple[str, tuple[int, ...], str]]:
    """(axis, ranks, tier) of each group that a rank is in."""
    import numpy as np

    rows = []
    for name in names:
        ranks = p.mesh.group_of(rank, name)
        if len(ranks) > 1:
            tier = p.cluster.tiers[int(p.tiers(np.array([ranks]))[0])].name
            rows.append((name, ranks, tier))
    return rows


def _as_json(
    p: Placement,
    rank: int | None,
    own: list[tuple[str, tuple[int, ...], str]],
    groups: tuple[str | None, Any, list[str]] | None,
) -> dict[str, Any]:
    from phalanx.planning.placement import axis_groups

    hosts = p.topology.hosts
    if rank is not None:
        return {
            "rank": rank,
            "node": hosts[int(p.topology.host[p.gpu[rank]])],
            "gpu": int(p.topology.index[p.gpu[rank]]),
            "coordinates": p.mesh.coordinates(rank),
            "groups": {axis: {"ranks": list(ranks), "links": tier} for axis, ranks, tier in own},
        }
    if groups is not None:
        axis, members, tiers = groups
        rows = [{"ranks": r.tolist(), "links": tier} for r, tier in zip(members, tiers, strict=True)]
        return {"axis": axis, "groups": rows}
    return {
        "strategy": str(p.strategy),
        "world": p.world,
        "cluster": p.cluster.name,
        "nodes": [{"name": hosts[host], "ranks": ranks.tolist()} for host, ranks in p.ranks_by_host()],
        "axes": [asdict(row) for row in axis_groups(p)],
    }
