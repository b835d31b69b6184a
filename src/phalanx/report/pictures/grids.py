"""The drawing of grids of cells side by side, of the chunks of each rank round by round, and of shares over time as
darkness.
"""

from itertools import pairwise

import numpy as np

from phalanx.report.pictures.figure import Cell, Grid, Grids, Heat, Rounds, RoundState
from phalanx.report.pictures.scene import DASHES, EDGE, WIDE, Scene, width, wrap

_CELL, _GAP, _GROUP_GAP = 32, 3, 12


def draw(scene: Scene, panel: Grids) -> None:
    """Draw the grids, then the lines below them."""
    columns = max(len(row) for grid in panel.grids for row in grid.rows)
    wide = columns * (_CELL + _GAP) + 3 * _GAP
    high = max(len(grid.rows) for grid in panel.grids) * (_CELL + _GAP) + 24
    per_row = max(1, int((WIDE - 2 * EDGE + _GROUP_GAP) // (wide + _GROUP_GAP)))
    top = scene.y
    for i, grid in enumerate(panel.grids):
        _grid(
            scene,
            grid,
            EDGE + i % per_row * (wide + _GROUP_GAP),
            top + i // per_row * (high + _GROUP_GAP),
            wide,
            high,
        )
    scene.y = top + -(-len(panel.grids) // per_row) * (high + _GROUP_GAP)
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
    """Return the grids in characters, one below the other, with a bar where the colour changes."""
    wide = max(len(cell.text) for grid in panel.grids for row in grid.rows for cell in row)
    lines: list[str] = []
    for grid in panel.grids:
        lines.append(grid.name)
        for row in grid.rows:
            colours = [row[0].colour, *(cell.colour for cell in row)]
            bars = ["|" if a != b else " " for a, b in pairwise(colours)]
            lines.append("  " + "".join(f"{bar}{cell.text:>{wide}}" for bar, cell in zip(bars, row, strict=True)))
    return [*lines, *panel.foot]


_HIGH, _SMALL = 22, 11


def draw_rounds(scene: Scene, panel: Rounds) -> None:
    """Draw the tables, as many side by side as there is room for."""
    cell = max([18.0, *(width(c, _SMALL) + 6 for r in panel.rounds for row in r.cells for c in row)])
    ranks, chunks = len(panel.rounds[0].cells), len(panel.rounds[0].cells[0])
    arcs = 12 + 6 * min(ranks - 1, 8)
    name = width(f"rank {ranks - 1}", _SMALL) + 8
    wide = name + cell * chunks + arcs
    wide = max(wide, *(width(r.head, _SMALL) + 16 for r in panel.rounds))
    across = min(panel.across, max(1, int((WIDE - 2 * EDGE) // wide)))
    node = panel.node or ranks
    high = 40 + _HIGH * ranks + _BETWEEN * ((ranks - 1) // node) + 14
    for i, held in enumerate(panel.rounds):
        if i and i % across == 0:
            scene.y += high
        with scene.appearing(i / len(panel.rounds)):
            _draw(scene, held, EDGE + i % across * wide, scene.y, name, cell, node)
    scene.y += high
    scene.legend([("f6", "", "nothing yet"), ("f4", "", "some contributions"), ("f2", "", "complete")])


_BETWEEN = 12
"""Pixels between the ranks of two nodes."""


def _draw(scene: Scene, held: RoundState, left: float, top: float, name: float, cell: float, node: int) -> None:
    scene.text(left, top + 14, held.head, size=_SMALL, bold=False)
    chunks = len(held.cells[0])
    if chunks > 1:
        for chunk in range(chunks):
            scene.text(left + name + cell * (chunk + 0.5), top + 32, str(chunk), "m", 10, "middle")
    top += 38

    def at(rank: float) -> float:
        return top + _HIGH * rank + _BETWEEN * (rank // node)

    for rank, row in enumerate(held.cells):
        y = at(rank)
        if rank and rank % node == 0:
            line = y - _BETWEEN / 2 - 1
            scene.path([(left, line), (left + name + cell * chunks, line)], "o", 1, DASHES[4])
        scene.text(left + name - 6, y + 15, f"rank {rank}", "m", _SMALL, "end")
        for chunk, word in enumerate(row):
            share = held.full[rank][chunk]
            x = left + name + cell * chunk
            fill = "f2" if share >= 1 else "f4" if share > 0 else "f6"
            scene.rect(x, y, cell - 1, _HIGH - 2, f"{fill} b")
            if held.changed[rank][chunk]:
                scene.rect(x + 1, y + 1, cell - 3, _HIGH - 4, "new")
            scene.text(x + cell / 2, y + 15, word, "on", _SMALL, "middle")
    edge = left + name + cell * chunks + 2
    pairs = list(dict.fromkeys((source, to) for source, to, _ in held.sends))
    for source, to in pairs:
        y0, y1 = (
            at(r) + _HIGH / 2 - 1 + (3 if r == source else -3) * (1 if to > source else -1) for r in (source, to)
        )
        slow = source // node != to // node
        bend = 8 + 6.0 * min(abs(to - source), 8)
        scene.curve(
            f"M{edge:.1f} {y0:.1f}C{edge + bend:.1f} {y0:.1f} {edge + bend:.1f} {y1:.1f} {edge + 4:.1f} {y1:.1f}",
            "hot" if slow else "a",
        )
        scene.head(edge + 1, y1, -1, 0, "hoth" if slow else "h", size=5)


def rounds_text(panel: Rounds) -> list[str]:
    """Return the rounds as tables in characters, each with its messages above."""
    lines: list[str] = []
    for held in panel.rounds:
        lines.append(held.head)
        sent = [f"{source}->{to}: {what}" for source, to, what in held.sends]
        wide = max([len(s) for s in sent] or [1]) + 3
        per = max(1, 76 // wide)
        lines += [
            "  " + "".join(f"{s:<{wide}}" for s in sent[i : i + per]).rstrip() for i in range(0, len(sent), per)
        ]
        cell = max(len(c) for row in held.cells for c in row)
        for rank, row in enumerate(held.cells):
            lines.append(f"  rank {rank:>2} | " + " ".join(f"{c:^{cell}}" for c in row).rstrip())
    return lines


_LEVELS = " ▁▂▃▄▅▆▇█"
_STRIPE = 6


def draw_heat(scene: Scene, panel: Heat) -> None:
    """Draw the rows, with as many of their names as there is room for."""
    left = EDGE + 8 + max(width(name, 11) for name, _ in panel.rows)
    room = WIDE - EDGE - left
    named = scene.y - 14
    for name, shares in panel.rows:
        level = np.round(np.clip(shares, 0, 1) * 10).astype(int)
        step = room / len(level)
        for a, b in pairwise(np.flatnonzero(np.diff(level, prepend=-1, append=-1)).tolist()):
            if level[a]:
                scene.rect(left + a * step, scene.y, (b - a) * step, _STRIPE - 1, "f0", opacity=level[a] / 10)
        if scene.y - named >= 14:
            scene.text(left - 8, scene.y + 6, name, "m", 11, "end")
            named = scene.y
        scene.y += _STRIPE
    scene.text(left, scene.y + 14, panel.span, "m", 11)
    scene.y += 20


def heat_text(panel: Heat, columns: int = 80) -> list[str]:
    """Return the rows in characters; a bar of full height is a share of 1."""
    label = max(len(name) for name, _ in panel.rows) + 1
    room = max(10, columns - label - 1)
    lines: list[str] = []
    for name, shares in panel.rows:
        parts = np.array_split(np.asarray(shares, dtype=float), min(room, len(shares)))
        level = np.clip(np.round([8 * part.mean() for part in parts]), 0, 8).astype(int)
        lines.append(name.ljust(label) + "".join(_LEVELS[i] for i in level))
    return [*lines, " " * label + f"{panel.span}; full height: all of it"]
