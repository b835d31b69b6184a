"""Pictures of a mesh: nodes with their GPUs and ranks, or the slices of a cube of its three largest axes."""

from collections.abc import Sequence
from math import prod

import numpy as np

from phalanx.planning.placement import Placement, axis_groups
from phalanx.report.pictures.figure import Cell, Grid, Grids, Picture
from phalanx.spec.cluster.part import ranges
from phalanx.spec.cluster.topology import Ints
from phalanx.spec.errors import InputError

CUBE_AXES = 3
CUBE_DRAWN = 16_384
"""The most ranks of a cube."""


def coordinates_of(p: Placement, ranks: Ints) -> str:
    """Write the coordinates of ranks along every axis larger than 1, as `pp 0, tp 0-7`."""
    places = np.unravel_index(ranks, [size for _, size in p.mesh.axes])
    axes = ((name, along) for (name, size), along in zip(p.mesh.axes, places, strict=True) if size > 1)
    return ", ".join(f"{name} {ranges(sorted(set(along.tolist())))}" for name, along in axes)


def cube_axes(p: Placement) -> list[str]:
    """Return the names of the three largest axes of a mesh, outermost first; fewer if it has fewer."""
    largest = sorted((axis for axis in p.mesh.axes if axis[1] > 1), key=lambda axis: -axis[1])[:CUBE_AXES]
    return [name for name, _ in p.mesh.axes if name in dict(largest)]


def cube(p: Placement) -> tuple[list[str], Ints]:
    """Return the axes of a cube and its ranks, (depth, rows, columns): the three largest axes in the mesh's order,
    the others at 0. Missing axes have size 1 and the name "". Raises InputError for more than CUBE_DRAWN."""
    names = cube_axes(p)
    if (many := prod(size for name, size in p.mesh.axes if name in names)) > CUBE_DRAWN:
        reason = f"makes a cube of {many:,} ranks"
        raise InputError("strategy", str(p.strategy), reason, f"draw at most {CUBE_DRAWN:,}")
    ranks = np.arange(p.world).reshape([size for _, size in p.mesh.axes])
    for i, (name, _) in reversed(list(enumerate(p.mesh.axes))):
        if name not in names:
            ranks = np.take(ranks, 0, axis=i)
    missing = CUBE_AXES - len(names)
    return [""] * missing + names, ranks.reshape((1,) * missing + ranks.shape)


NODES_DRAWN = 128
_DASHES = {"cp": "6 2", "dp_shard": "4 3", "dp_replicate": "3 2", "pp": "1 3"}
_SOURCE = "the placement that `phalanx tables mesh` prints"


def nodes(p: Placement, axis: str, rank: int | None = None, hosts: Sequence[int] | None = None) -> Picture:
    """Draw nodes as grids of GPUs, coloured by the groups of `axis`; `rank` and its peers are outlined, with a stroke
    of its own for each axis. `hosts`: positions of the hosts to draw, by default the first 128."""
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
    grids = []
    for i, plane in enumerate(ranks.tolist()):
        cells = [[_cell(p, r, colours.get(r), None) for r in row] for row in plane]
        grids.append(Grid(f"{depth} {i}" if depth else "", cells))
    named = ((rows, "downwards", ranks.shape[1]), (columns, "to the right", ranks.shape[2]))
    foot = [f"{name} 0 ... {size - 1}, {way}" for name, way, size in named if size > 1]
    title = f"{p.strategy}: {' x '.join(str(n) for n in ranks.shape)} ranks, coloured by the groups of {axis}"
    return Picture(title, (Grids(tuple(grids), tuple(foot)),), _SOURCE)


def one_of_each_stage(p: Placement) -> list[int]:
    """Return positions of hosts, one for each set of pipeline ranks that share a host: the other hosts look alike."""
    first: dict[frozenset[int], int] = {}
    for i, (_, ranks) in enumerate(p.ranks_by_host()):
        first.setdefault(frozenset(p.mesh.coordinates(int(r)).get("pp", 0) for r in ranks), i)
    return list(first.values())


def _colours(p: Placement, axis: str) -> dict[int, int]:
    return {int(r): i for i, ranks in enumerate(p.mesh.groups(axis)) for r in ranks}


def _peers(p: Placement, rank: int | None) -> dict[int, str]:
    """Return rank -> the innermost axis along which it is a peer of `rank`; "itself" for `rank`."""
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
