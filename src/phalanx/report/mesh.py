"""A mesh in the terminal: a line of ranks for each node, the groups of every axis, one rank's groups, and slices of a
three-dimensional layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from phalanx.planning.placement import AxisGroups, Placement, axis_groups
from phalanx.report.pictures.scene import FILLS
from phalanx.report.style import counted, table
from phalanx.spec.cluster.topology import Ints

NODES_SHOWN = 16
CUBE_AXES = 3


def nodes(p: Placement, axis: str, width: int) -> Text:
    """Draw the nodes, a line each: ranks by GPU, those of one group of `axis` in one colour, a bar where the group
    changes; then the coordinates that the node has."""
    group = np.full(p.world, -1)
    for i, ranks in enumerate(p.mesh.groups(axis)):
        group[ranks] = i
    hosts = list(p.ranks_by_host())
    cell = len(str(p.world - 1)) + 1
    label = max(len(p.topology.hosts[host]) for host, _ in hosts) + 1
    beside = min(max(len(coordinates_of(p, ranks)) for _, ranks in hosts[:NODES_SHOWN]) + 3, width - label - 4 * cell)
    per_line = max(1, min(max(len(ranks) for _, ranks in hosts), (width - label - beside) // cell))
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


def coordinates_of(p: Placement, ranks: Ints) -> str:
    """Write the coordinates that some ranks have along every axis larger than 1, as `pp 0, tp 0-7`."""
    places = np.unravel_index(ranks, [size for _, size in p.mesh.axes])
    parts = []
    for (name, size), along in zip(p.mesh.axes, places, strict=True):
        if size > 1:
            parts.append(f"{name} {ranges(sorted(set(along.tolist())))}")
    return ", ".join(parts)


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers with runs joined: 0-3,6; more than four runs as the first and last number."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1][-1:] = [n] if len(runs[-1]) > 1 else [runs[-1][0], n]
        else:
            runs.append([n])
    if len(runs) > 4:
        return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def axes(p: Placement) -> Table:
    """Tabulate the groups of every axis, and the links that they talk over."""
    grid = table(
        "", "axis", "ranks per group", "groups", "links", "first group", left=("axis", "links", "first group")
    )
    grid.title = None
    for row in axis_groups(p):
        grid.add_row(row.axis, f"{row.size:,}", f"{row.groups:,}", _links(row), listed(row.first))
    return grid


def _links(row: AxisGroups) -> str:
    if len(row.tiers) == 1:
        return row.tier
    return ", ".join(f"{name} ({counted(n, 'group')})" for name, n in row.tiers.items())


def listed(ranks: Sequence[int]) -> str:
    """Write the ranks of a group; of more than twelve the first six and the last."""
    if len(ranks) <= 12:
        return " ".join(map(str, ranks))
    return " ".join(map(str, ranks[:6])) + f" ... {ranks[-1]}"


def of_rank(p: Placement, rank: int, rows: Sequence[tuple[str, Sequence[int], str]]) -> Table:
    """Tabulate one rank's groups: (axis, ranks, tier)."""
    coordinates = ", ".join(f"{name} {i}" for name, i in p.mesh.coordinates(rank).items()) or "the only rank"
    grid = table(f"rank {rank}: {p.where(rank)}; {coordinates}", "axis", "ranks", "links", "group", left=_LEFT)
    for axis, ranks, tier in rows:
        grid.add_row(axis, f"{len(ranks):,}", tier, listed(ranks))
    return grid


_LEFT = ("axis", "links", "group")


def cube_axes(p: Placement) -> list[str]:
    """Name the three largest axes of a mesh in its order, the outermost first; fewer if it has fewer."""
    largest = sorted((axis for axis in p.mesh.axes if axis[1] > 1), key=lambda axis: -axis[1])[:CUBE_AXES]
    return [name for name, _ in p.mesh.axes if name in dict(largest)]


def cube(p: Placement) -> tuple[list[str], Ints]:
    """Return the axes of a cube and its ranks, (depth, rows, columns): the three largest axes in the mesh's order,
    the others at 0. Missing axes have size 1 and the name ""."""
    names = cube_axes(p)
    ranks = np.arange(p.world).reshape([size for _, size in p.mesh.axes])
    for i, (name, _) in reversed(list(enumerate(p.mesh.axes))):
        if name not in names:
            ranks = np.take(ranks, 0, axis=i)
    missing = CUBE_AXES - len(names)
    return [""] * missing + names, ranks.reshape((1,) * missing + ranks.shape)


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
    yield (
        f"columns: {columns}; " + ", ".join(f"{name} = 0" for name in _fixed(p))
        if _fixed(p)
        else (f"columns: {columns}")
    )


def _fixed(p: Placement) -> list[str]:
    names = cube_axes(p)
    return [name for name, size in p.mesh.axes if size > 1 and name not in names]
