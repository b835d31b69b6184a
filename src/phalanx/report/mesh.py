"""Views of a mesh: a line of ranks for each node, the groups of every axis, one rank's groups, and slices of a
three-dimensional layout."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from rich.text import Text

from phalanx.answers.mesh import MeshGroups, RankMap, RankPlace, StageUnits
from phalanx.planning.placement import AxisGroups, Placement, axis_groups, axis_names
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.gallery import mesh as gallery
from phalanx.report.gallery.mesh import coordinates_of, cube, cube_axes
from phalanx.report.pictures.figure import Picture
from phalanx.report.pictures.scene import FILLS
from phalanx.report.style import count_words
from phalanx.report.view import View, ViewPart

NODES_SHOWN = 16


def view(a: RankMap | MeshGroups | RankPlace, cube: bool = False) -> View:
    """Show the ranks of every node and the axes, all groups of an axis, or one rank's groups."""
    p, axis = a.placement, a.axis
    rank = a.rank if isinstance(a, RankPlace) else None

    def pictures() -> list[Picture]:
        return [gallery.slices(p, axis) if cube else gallery.nodes(p, axis, rank)]

    if isinstance(a, MeshGroups):
        return View([f"{g.links}: {' '.join(map(str, g.ranks))}" for g in a.groups], "mesh", pictures)
    if isinstance(a, RankPlace):
        coordinates = ", ".join(f"{name} {i}" for name, i in a.coordinates.items()) or "the only rank"
        rows = [(name, len(g.ranks), g.links, rank_list(g.ranks)) for name, g in a.groups.items()]
        names = columns("axis | ranks [count] | links | group")
        return View([Sheet(f"rank {a.rank}: {p.where(a.rank)}; {coordinates}", names, rows)], "mesh", pictures)
    heading = (
        f"{p.strategy}: {count_words(p.world, 'rank')} on {count_words(len(list(p.ranks_by_host())), 'node')} of "
        f"{p.cluster.name}, axes {p.strategy.order} from the outermost to the innermost\n"
    )
    drawing: list[ViewPart] = list(slices(p)) if cube else [partial(nodes, p, axis)]
    layers = [stages(a.stages)] if a.stages else []
    return View([heading, *drawing, *([axes(p)] if axis_names(p) else []), *layers], "mesh", pictures)


def nodes(p: Placement, axis: str, width: int) -> Text:
    """Draw a line for each node: its ranks by GPU, coloured by the groups of `axis`, with a bar where the group
    changes; then the coordinates of its ranks. `width`: characters of a line."""
    group = np.full(p.world, -1)
    for i, ranks in enumerate(p.mesh.groups(axis)):
        group[ranks] = i
    hosts = list(p.ranks_by_host())
    cell = len(str(p.world - 1)) + 1
    label = max(len(p.topology.hosts[host]) for host, _ in hosts) + 1
    tail = min(max(len(coordinates_of(p, ranks)) for _, ranks in hosts[:NODES_SHOWN]) + 3, width - label - 4 * cell)
    per_line = max(1, min(max(len(ranks) for _, ranks in hosts), (width - label - tail) // cell))
    out = Text(no_wrap=True)
    for host, ranks in hosts[:NODES_SHOWN]:
        for start in range(0, len(ranks), per_line):
            part = ranks[start : start + per_line]
            out.append((p.topology.hosts[host] if start == 0 else "").ljust(label), "bold")
            for i, rank in enumerate(part):
                bar = i > 0 and group[rank] != group[part[i - 1]]
                out.append("|" if bar else " ", "dim")
                out.append(f"{rank:>{cell - 1}}", f"black on {FILLS[group[rank] % len(FILLS)]}")
            if start == 0:
                out.append(" " * (cell * (per_line - len(part)) + 2) + coordinates_of(p, ranks), "dim")
            out.append("\n")
    if len(hosts) > NODES_SHOWN:
        out.append(f"... and {len(hosts) - NODES_SHOWN:,} more nodes\n", "dim")
    out.append(f"colours and bars: groups of {axis}", "dim")
    return out


def axes(p: Placement) -> Sheet:
    """Tabulate the groups of every axis, and the links between their ranks."""
    rows = [(row.axis, row.size, row.groups, _links(row), rank_list(row.first)) for row in axis_groups(p)]
    names = columns("axis | ranks per group [count] | groups [count] | links | first group")
    return Sheet("", names, rows, charted=False)


def stages(rows: Sequence[StageUnits]) -> Sheet:
    """Tabulate the layers of each pipeline rank, and the nodes that it is on."""
    cells = [(row.pp, "; ".join(row.units), row.nodes[0], row.nodes[-1]) for row in rows]
    return Sheet("", columns("pp [count] | layers, by chunk | from node | to node"), cells, charted=False)


def _links(row: AxisGroups) -> str:
    if len(row.tiers) == 1:
        return row.tier
    return ", ".join(f"{name} ({count_words(n, 'group')})" for name, n in row.tiers.items())


def rank_list(ranks: Sequence[int]) -> str:
    """Write the ranks of a group; of more than twelve, the first six and the last."""
    if len(ranks) <= 12:
        return " ".join(map(str, ranks))
    return " ".join(map(str, ranks[:6])) + f" ... {ranks[-1]}"


def slices(p: Placement) -> Iterator[str]:
    """Yield the lines of a cube drawn as slices: one block of rows and columns for each coordinate in depth."""
    (depth, rows, columns), ranks = cube(p)
    cell = len(str(p.world - 1)) + 1
    for i, plane in enumerate(ranks):
        if depth:
            yield f"{depth} {i}"
        for j, line in enumerate(plane):
            head = f"{rows} {j}".ljust(len(rows) + 1 + len(str(len(plane)))) if rows else ""
            yield f"  {head} " + "".join(f"{rank:>{cell}}" for rank in line)
    names = cube_axes(p)
    others = (f"{name} = 0" for name, size in p.mesh.axes if size > 1 and name not in names)
    yield "; ".join(filter(None, (f"columns: {columns}", ", ".join(others))))
