"""Shares over time, a line for each row: darker where more."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from phalanx.report.pictures.figure import Heat
from phalanx.report.pictures.scene import EDGE, WIDE, Scene, width

_LEVELS = " ▁▂▃▄▅▆▇█"
_HIGH = 6


def draw(scene: Scene, panel: Heat) -> None:
    """Draw the rows; names stand where there is room between them."""
    scene.heading(panel.head)
    left = EDGE + 8 + max(width(name, 11) for name, _ in panel.rows)
    room = WIDE - EDGE - left
    named = scene.y - 14
    for name, shares in panel.rows:
        level = np.round(np.clip(shares, 0, 1) * 10).astype(int)
        step = room / len(level)
        for a, b in pairwise(np.flatnonzero(np.diff(level, prepend=-1, append=-1)).tolist()):
            if level[a]:
                scene.rect(left + a * step, scene.y, (b - a) * step, _HIGH - 1, "f0", opacity=level[a] / 10)
        if scene.y - named >= 14:
            scene.text(left - 8, scene.y + 6, name, "m", 11, "end")
            named = scene.y
        scene.y += _HIGH
    scene.text(left, scene.y + 14, panel.span, "m", 11)
    scene.y += 20


def text(panel: Heat, columns: int = 80) -> list[str]:
    """Return the rows in characters: full height is all of it."""
    label = max(len(name) for name, _ in panel.rows) + 1
    room = max(10, columns - label - 1)
    lines = [panel.head] if panel.head else []
    for name, shares in panel.rows:
        parts = np.array_split(np.asarray(shares, dtype=float), min(room, len(shares)))
        level = np.clip(np.round([8 * part.mean() for part in parts]), 0, 8).astype(int)
        lines.append(name.ljust(label) + "".join(_LEVELS[i] for i in level))
    return [*lines, " " * label + f"{panel.span}; full height: all of it"]
