"""A tree by indentation, its branches joined by lines, with one path marked."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from phalanx.report.pictures.figure import Node, Tree
from phalanx.report.pictures.scene import EDGE, WIDE, Scene, width, wrap

_INDENT = 30


def draw(scene: Scene, panel: Tree) -> None:
    """Draw every node as a box."""
    scene.heading(panel.head)
    scene.y += 4
    _draw(scene, panel.root, 0)


def _draw(scene: Scene, node: Node, depth: int) -> float:
    """Draw a node and what is below it; return the height of its middle."""
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
        stem = x - 12 + _INDENT / 2 + 2
        scene.path(
            [(stem, top + high), (stem, at), (x + _INDENT - 3, at)], *(("hot", 2.2) if below.taken else ("o", 1))
        )
    return middle


def text(panel: Tree) -> list[str]:
    """Return the tree in lines of at most 80 characters; the marked path has arrows."""
    return [*([panel.head] if panel.head else []), *_text(panel.root, 0)]


def _text(node: Node, depth: int) -> Iterator[str]:
    mark = "=> " if node.taken and node.leaf else "-> " if node.taken else ""
    edge = f"{node.edge}: " if node.edge else ""
    indent = "   " * depth
    yield from textwrap.wrap(
        f"{edge}{mark}{node.text}", 80, initial_indent=indent, subsequent_indent=indent + "     "
    )
    for below in node.below:
        yield from _text(below, depth + 1)
