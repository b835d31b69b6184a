"""What each rank holds of each chunk, round by round: a table for each round, with curves for what was sent."""

from __future__ import annotations

from phalanx.report.pictures.figure import Rounds, RoundState
from phalanx.report.pictures.scene import EDGE, WIDE, Scene, width

_HIGH, _SMALL = 22, 11


def draw(scene: Scene, panel: Rounds) -> None:
    """Draw the tables, as many side by side as there is room for."""
    scene.heading(panel.head)
    cell = max([18.0, *(width(c, _SMALL) + 8 for r in panel.rounds for row in r.cells for c in row)])
    ranks, chunks = len(panel.rounds[0].cells), len(panel.rounds[0].cells[0])
    arcs = 12 + 9 * min(ranks - 1, 8)
    name = width(f"rank {ranks - 1}", _SMALL) + 8
    wide = name + cell * chunks + arcs
    wide = max(wide, *(width(r.head, _SMALL) + 16 for r in panel.rounds))
    across = max(1, int((WIDE - 2 * EDGE) // wide))
    high = 40 + _HIGH * ranks + 14
    for i, held in enumerate(panel.rounds):
        if i and i % across == 0:
            scene.y += high
        _draw(scene, held, EDGE + i % across * wide, scene.y, name, cell)
    scene.y += high
    scene.legend([("f6", "", "nothing yet"), ("f4", "", "some contributions"), ("f2", "", "all that it shall hold")])


def _draw(scene: Scene, held: RoundState, left: float, top: float, name: float, cell: float) -> None:
    scene.text(left, top + 14, held.head, size=_SMALL, bold=False)
    chunks = len(held.cells[0])
    if chunks > 1:
        for chunk in range(chunks):
            scene.text(left + name + cell * (chunk + 0.5), top + 32, str(chunk), "m", 10, "middle")
    top += 38
    for rank, row in enumerate(held.cells):
        y = top + _HIGH * rank
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
            top + _HIGH * (r + 0.5) - 1 + (3 if r == source else -3) * (1 if to > source else -1)
            for r in (source, to)
        )
        bend = 8 + 9.0 * min(abs(to - source), 8)
        scene.curve(
            f"M{edge:.1f} {y0:.1f}C{edge + bend:.1f} {y0:.1f} {edge + bend:.1f} {y1:.1f} {edge + 4:.1f} {y1:.1f}", "a"
        )
        scene.head(edge + 1, y1, -1, 0, size=5)


def text(panel: Rounds) -> list[str]:
    """Return the rounds as tables in characters, with what was sent above each."""
    lines = [panel.head] if panel.head else []
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
