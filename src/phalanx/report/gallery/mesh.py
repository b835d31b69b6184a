"""Pictures of a mesh: nodes with their GPUs and ranks, or the slices of a cube of its three largest axes."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.planning.placement import Placement, axis_groups
from phalanx.report.mesh_layout import coordinates_of, cube
from phalanx.report.pictures.figure import Cell, Grid, Grids, Picture

NODES_DRAWN = 128
_DASHES = {"cp": "6 2", "dp_shard": "4 3", "dp_replicate": "3 2", "pp": "1 3"}
_SOURCE = "the placement that `phalanx mesh` prints"


def nodes(p: Placement, axis: str, rank: int | None = None, hosts: Sequence[int] | None = None) -> Picture:
    """Draw nodes as grids of GPUs, coloured by the groups of `axis`; `rank` and the peers of its groups are outlined,
    each axis by a stroke of its own. `hosts`: which are drawn, by their place; by default the first."""
    every = list(p.ranks_by_host())
    shown = every[:NODES_DRAWN] if hosts is None else [every[i] for i in hosts]
    colours, peers = _colours(p, axis), _peers(p, rank)
    grids = []
    for host, ranks in shown:
        cells = [_cell(p, r, colours.get(r), peers.get(r)) for r in ranks.tolist()]
        name = f"{p.topology.hosts[host]}: {coordinates_of(p, ranks)}"
        grids.append(Grid(name, [cells[i : i + 8] for i in range(0, len(cells), 8)]))
    foot = [f"... and {len(every) - len(shown):,} more nodes"] if len(every) > len(shown) else []
    foot += [f"{x.axis}: {x.groups:,} groups of {x.size:,}, over {', '.join(x.tiers)}" for x in axis_groups(p)]
    title = f"{p.strategy} on {p.cluster.name}: colours are groups of {axis}"
    if rank is not None:
        axes = ", ".join(name for name, size in p.mesh.axes if size > 1)
        title += f"; outlined: rank {rank} (thickest) and its groups of {axes}"
    return Picture(title, (Grids(tuple(grids), tuple(foot)),), _SOURCE)


def slices(p: Placement, axis: str) -> Picture:
    """Draw the three largest axes as a cube of ranks, slice by slice; coloured by the groups of `axis`."""
    (depth, rows, columns), ranks = cube(p)
    colours = _colours(p, axis)
    grids = [
        Grid(
            f"{depth} {i}" if depth else "",
            [[_cell(p, int(r), colours.get(int(r)), None) for r in row] for row in plane],
        )
        for i, plane in enumerate(ranks)
    ]
    named = ((rows, "downwards", ranks.shape[1]), (columns, "to the right", ranks.shape[2]))
    foot = [f"{name} 0 ... {size - 1}, {way}" for name, way, size in named if size > 1]
    title = f"{p.strategy}: {' x '.join(str(n) for n in ranks.shape)} ranks, coloured by the groups of {axis}"
    return Picture(title, (Grids(tuple(grids), tuple(foot)),), _SOURCE)


def one_of_each_stage(p: Placement) -> list[int]:
    """Return the places of hosts, one for each set of pipeline ranks that share a host: the others look alike."""
    first: dict[frozenset[int], int] = {}
    for i, (_, ranks) in enumerate(p.ranks_by_host()):
        first.setdefault(frozenset(p.mesh.coordinates(int(r)).get("pp", 0) for r in ranks), i)
    return list(first.values())


def _colours(p: Placement, axis: str) -> dict[int, int]:
    return {int(r): i for i, ranks in enumerate(p.mesh.groups(axis)) for r in ranks}


def _peers(p: Placement, rank: int | None) -> dict[int, str]:
    """Return the axis by which each rank is a peer of `rank`, the innermost first."""
    if rank is None:
        return {}
    peers = {rank: "itself"}
    for name, size in reversed(p.mesh.axes):
        if size > 1:
            for r in p.mesh.group_of(rank, name):
                peers.setdefault(r, name)
    return peers


def _cell(p: Placement, rank: int, colour: int | None, peer: str | None) -> Cell:
    coordinates = ", ".join(f"{name} {i}" for name, i in p.mesh.coordinates(rank).items())
    about = f"rank {rank}: {p.where(rank)}; {coordinates}"
    return Cell(str(rank), colour, about, _DASHES.get(peer or "", ""), peer is not None, peer == "itself")
