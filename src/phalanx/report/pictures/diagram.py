"""The drawing of boxes and arrows on a grid of characters, as text or as SVG with a cell for each character; and of
trees by indentation.
"""

import textwrap
from collections.abc import Iterator
from itertools import pairwise

from phalanx.report.pictures.figure import Arrow, Box, Diagram, Label, Node, Tree
from phalanx.report.pictures.scene import EDGE, WIDE, Scene, width, wrap

_ACROSS, _DOWN = 9.1, 17.0
"""Width and height of a character's cell: wider than its text."""


def draw(scene: Scene, panel: Diagram) -> None:
    """Draw the boxes, then arrows, then words."""
    top = scene.y + 4

    def at(x: float, y: float) -> tuple[float, float]:
        return EDGE + x * _ACROSS, top + y * _DOWN

    for item in panel.items:
        if isinstance(item, Box):
            x, y = at(item.x + 0.3, item.y + 0.2)
            fill = "o" if item.colour is None else f"f{item.colour} b"
            scene.rect(x, y, (item.w - 0.6) * _ACROSS, (item.h - 0.4) * _DOWN, fill, round_=4)
    for item in panel.items:
        if isinstance(item, Arrow):
            points = [at(x + 0.5, y + 0.5) for x, y in item.points]
            points[0], points[-1] = _longer(points[1], points[0]), _longer(points[-2], points[-1])
            scene.path(points, "hot" if item.hot else "a", 2.4 if item.hot else 1.3)
            ends = [(points[-2], points[-1])] if item.heads else []
            ends += [(points[1], points[0])] if item.heads == 2 else []
            for (x0, y0), (x1, y1) in ends:
                far = max(abs(x1 - x0), abs(y1 - y0), 1e-9)
                scene.head(x1, y1, (x1 - x0) / far, (y1 - y0) / far, "hoth" if item.hot else "h")
    for item in panel.items:
        if isinstance(item, Label):
            x, y = at(item.x, item.y)
            scene.text(x, y + 12.5, item.text, "t halo", 12, bold=item.strong)
        elif isinstance(item, Box):
            x, y = at(item.x + item.w / 2, item.y)
            first = 1 if item.top else (item.h - len(item.lines)) / 2
            for i, line in enumerate(item.lines):
                kind = "t" if item.colour is None else "on"
                size = 12 if width(line) <= (item.w - 1) * _ACROSS else 11
                scene.text(x, y + (first + i) * _DOWN + (12.5 if not item.top else 4), line, kind, size, "middle")
    scene.y = top + panel.size[1] * _DOWN + 6


def _longer(before: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    """Return the end of a line moved as far as the frame of the box in the next cell."""
    across, down = end[0] - before[0], end[1] - before[1]
    if abs(across) > abs(down):
        return end[0] + (0.75 if across > 0 else -0.75) * _ACROSS, end[1]
    return end[0], end[1] + (0.66 if down > 0 else -0.66) * _DOWN


def text(panel: Diagram) -> list[str]:
    """Return the diagram in characters."""
    wide, high = panel.size
    grid = [[" "] * wide for _ in range(high)]
    for item in panel.items:
        match item:
            case Box():
                _frame(grid, item)
            case Arrow():
                _arrow(grid, item)
            case Label():
                grid[item.y][item.x : item.x + len(item.text)] = item.text
    return ["".join(row).rstrip() for row in grid]


def _frame(grid: list[list[str]], box: Box) -> None:
    right, low = box.x + box.w - 1, box.y + box.h - 1
    if box.h == 1:
        grid[box.y][box.x : right + 1] = f"[{(box.lines or ('',))[0]:^{box.w - 2}}]"
        return
    for y in (box.y, low):
        grid[y][box.x : right + 1] = "+" + "-" * (box.w - 2) + "+"
    for y in range(box.y + 1, low):
        grid[y][box.x] = grid[y][right] = "|"
    first = box.y if box.top else box.y + (box.h - len(box.lines)) // 2
    for i, line in enumerate(box.lines):
        start = box.x + (box.w - len(line)) // 2
        grid[first + i][start : start + len(line)] = line


def _arrow(grid: list[list[str]], arrow: Arrow) -> None:
    points = arrow.points
    for (x0, y0), (x1, y1) in pairwise(points):
        steps = max(abs(x1 - x0), abs(y1 - y0))
        for k in range(steps + 1):
            x, y = x0 + (x1 - x0) * k // max(steps, 1), y0 + (y1 - y0) * k // max(steps, 1)
            if grid[y][x] in " -|":
                grid[y][x] = "-" if y0 == y1 else "|"
    for x, y in points[1:-1]:
        grid[y][x] = "+"
    for (x0, y0), (x1, y1) in [
        *([(points[-2], points[-1])] if arrow.heads else []),
        *([(points[1], points[0])] if arrow.heads == 2 else []),
    ]:
        grid[y1][x1] = ">" if x1 > x0 else "<" if x1 < x0 else "v" if y1 > y0 else "^"


_INDENT = 30


def draw_tree(scene: Scene, panel: Tree) -> None:
    """Draw every node as a box."""
    scene.y += 4
    _draw(scene, panel.root, 0)


def _draw(scene: Scene, node: Node, depth: int) -> float:
    """Draw a node and the nodes below it; return the y of its middle."""
    x = EDGE + depth * _INDENT
    edge = width(node.edge, 11) + 6 if node.edge else 0.0
    lines = wrap(node.text, WIDE - EDGE - x - edge - 22)
    top, high = scene.y, 15 * len(lines) + 8
    kind = "hotbox" if node.taken else "f7 b" if node.leaf else "paper"
    wide = max(width(line) for line in lines) + 14
    scene.rect(x + edge, top, wide, high, kind, round_=4 if not node.leaf else 9)
    if node.edge:
        scene.text(x, top + 16, node.edge, "t" if node.taken else "m", 11, bold=node.taken)
    for i, line in enumerate(lines):
        scene.text(x + edge + 7, top + 16 + 15 * i, line, "on" if node.leaf and not node.taken else "t")
    scene.y += high + 7
    middle = top + 12
    for below in node.below:
        at = _draw(scene, below, depth + 1)
        stem, style = x - 12 + _INDENT / 2 + 2, (("hot", 2.2) if below.taken else ("o", 1))
        scene.path([(stem, top + high), (stem, at), (x + _INDENT - 3, at)], *style)
    return middle


def tree_text(panel: Tree) -> list[str]:
    """Return the tree in lines of at most 80 characters; the marked path has arrows."""
    return list(_text(panel.root, 0))


def _text(node: Node, depth: int) -> Iterator[str]:
    mark = "=> " if node.taken and node.leaf else "-> " if node.taken else ""
    edge = f"{node.edge}: " if node.edge else ""
    indent = "   " * depth
    text = f"{edge}{mark}{node.text}"
    yield from textwrap.wrap(text, 80, initial_indent=indent, subsequent_indent=indent + "     ")
    for below in node.below:
        yield from _text(below, depth + 1)
