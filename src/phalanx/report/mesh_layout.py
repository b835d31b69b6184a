"""How the ranks of a mesh are laid out in a drawing: a node's coordinates, and a cube of the three largest axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.planning.placement import Placement
from phalanx.spec.cluster.topology import Ints

CUBE_AXES = 3


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
