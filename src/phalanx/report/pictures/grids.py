"""Named grids of cells, side by side as far as there is room."""

from __future__ import annotations

from itertools import pairwise

from phalanx.report.pictures.figure import Cell, Grid, Grids
from phalanx.report.pictures.scene import EDGE, WIDE, Scene, width, wrap

_CELL, _GAP, _APART = 32, 3, 12


def draw(scene: Scene, panel: Grids) -> None:
    """Draw the grids, then the lines below them."""
    scene.heading(panel.head)
    columns = max(len(row) for grid in panel.grids for row in grid.rows)
    wide = columns * (_CELL + _GAP) + 3 * _GAP
    high = max(len(grid.rows) for grid in panel.grids) * (_CELL + _GAP) + 24
    per_row = max(1, int((WIDE - 2 * EDGE + _APART) // (wide + _APART)))
    top = scene.y
    for i, grid in enumerate(panel.grids):
        _grid(scene, grid, EDGE + i % per_row * (wide + _APART), top + i // per_row * (high + _APART), wide, high)
    scene.y = top + -(-len(panel.grids) // per_row) * (high + _APART)
    for line in panel.foot:
        for part in wrap(line, WIDE - 2 * EDGE):
            scene.text(EDGE, scene.y + 12, part)
            scene.y += 16


def _grid(scene: Scene, grid: Grid, left: float, top: float, wide: float, high: float) -> None:
    scene.rect(left, top, wide, high, "paper", grid.name, 5)
    name = grid.name
    while width(name, 11) > wide - 10:
        name = name[:-1]
    scene.text(left + 5, top + 14, name, size=11)
    for j, row in enumerate(grid.rows):
        for k, cell in enumerate(row):
            _cell(scene, cell, left + 2 * _GAP + k * (_CELL + _GAP), top + 20 + j * (_CELL + _GAP))


def _cell(scene: Scene, cell: Cell, x: float, y: float) -> None:
    scene.rect(x, y, _CELL, _CELL, "paper" if cell.colour is None else f"f{cell.colour % 8} b", cell.about, 3)
    if cell.outlined:
        corners = ((x, y), (x + _CELL, y), (x + _CELL, y + _CELL), (x, y + _CELL), (x, y))
        scene.path(corners, "a", 5 if cell.bold else 3, cell.dash)
    scene.text(x + _CELL / 2, y + _CELL / 2 + 4, cell.text, "t" if cell.colour is None else "on", 11, "middle")


def text(panel: Grids) -> list[str]:
    """Return the grids in characters, one below the other; a bar stands where the colour changes."""
    wide = max(len(cell.text) for grid in panel.grids for row in grid.rows for cell in row)
    lines = [panel.head] if panel.head else []
    for grid in panel.grids:
        lines.append(grid.name)
        for row in grid.rows:
            colours = [row[0].colour, *(cell.colour for cell in row)]
            bars = ["|" if a != b else " " for a, b in pairwise(colours)]
            lines.append("  " + "".join(f"{bar}{cell.text:>{wide}}" for bar, cell in zip(bars, row, strict=True)))
    return [*lines, *panel.foot]
