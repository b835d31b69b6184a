"""Lanes of blocks over one axis of time."""

from __future__ import annotations

from phalanx.report.pictures.bars import letters_of
from phalanx.report.pictures.figure import PlotAxis, Timeline
from phalanx.report.pictures.numbers import ticks
from phalanx.report.pictures.scene import EDGE, WIDE, Scene, width

_HIGH, _STEP = 22, 28


def _kinds(panel: Timeline) -> dict[str, int]:
    """Return the kinds of a panel with their places in the palette."""
    seen = dict.fromkeys(block.kind for lane in panel.lanes for block in lane.blocks)
    order = [*(kind for kind, _ in panel.palette), *seen]
    return {kind: order.index(kind) for kind in sorted(seen, key=order.index)}


def _end(panel: Timeline) -> float:
    return panel.end or max((block.end for lane in panel.lanes for block in lane.blocks), default=1.0)


def draw(scene: Scene, panel: Timeline) -> None:
    """Draw the lanes, with the axis and the legend below."""
    scene.heading(panel.head)
    kinds, end = _kinds(panel), _end(panel)
    left = EDGE + 8 + max(width(lane.name) for lane in panel.lanes)
    beside = max(width(lane.beside, 11) for lane in panel.lanes)
    room = WIDE - EDGE - left - (beside + 10 if beside else 6)
    scale, top = room / end, scene.y
    for lane in panel.lanes:
        scene.text(left - 8, scene.y + 16, lane.name, anchor="end")
        scene.path([(left, scene.y + _HIGH + 1), (left + room, scene.y + _HIGH + 1)], "g")
        for block in lane.blocks:
            x, w = left + block.start * scale, (block.end - block.start) * scale
            about = f"{block.about or f'{block.kind}: {block.label}'}, {block.start:.4g} to {block.end:.4g}"
            edge = " b" if w > 3 else ""  # a narrow block would be all edge
            scene.rect(x, scene.y, w, _HIGH, f"f{kinds[block.kind] % 8}{edge}", about)
            if width(block.label, 10) <= w - 2:
                scene.text(x + w / 2, scene.y + 15, block.label, "on", 10, "middle")
        if lane.beside:
            scene.text(left + room + 10, scene.y + 16, lane.beside, "t", 11)
        scene.y += _STEP
    scene.path([(left, top), (left, scene.y), (left + room, scene.y)], "o")
    last = 0.0
    for value in ticks(PlotAxis(""), 0.0, end):
        x, written = left + value * scale, f"{value:,.6g}"
        scene.path([(x, scene.y), (x, scene.y + 4)], "o")
        if x - width(written, 11) / 2 > last and x + width(written, 11) / 2 < WIDE - 4:
            last = scene.text(x, scene.y + 16, written, "m", 11, "middle").right + 8
    scene.text(left + room / 2, scene.y + 33, panel.unit, "m", 11, "middle")
    scene.y += 38
    scene.legend([(f"f{i % 8}", "", kind) for kind, i in kinds.items()])


def text(panel: Timeline) -> list[str]:
    """Return the lanes in characters: a block shows its label where it has room, else its kind's letter."""
    kinds = _kinds(panel)
    letters = letters_of(list(kinds)) | dict(panel.palette)
    wide = max(len(lane.name) for lane in panel.lanes)
    beside = max(len(lane.beside) for lane in panel.lanes)
    room = 80 - wide - 2 - (beside + 1 if beside else 0)
    scale = room / _end(panel)
    lines = [panel.head] if panel.head else []
    for lane in panel.lanes:
        drawn = ["."] * room
        for block in lane.blocks:
            a, b = round(block.start * scale), round(block.end * scale)
            fill = letters[block.kind]
            word = block.label if len(block.label) < b - a else ""
            drawn[a:b] = f"{word:{fill}<{b - a}}" if b > a else ""
        lines.append(f"{lane.name:>{wide}} |{''.join(drawn)[:room]} {lane.beside}".rstrip())
    lines.append(f"{'':>{wide}}  0 to {_end(panel):.4g}: {panel.unit}")
    lines += [f"{letters[kind]}: {kind}" for kind in kinds]
    return lines
