"""The drawing of bars, whose parts add up along an axis, with lines across for limits; and of lanes of blocks over
time.
"""

from phalanx.report.pictures.figure import Bars, PlotAxis, Timeline
from phalanx.report.pictures.numbers import short, ticks
from phalanx.report.pictures.scene import DASHES, EDGE, WIDE, Scene, width, wrap

_HIGH, _STEP, _LONGEST = 16, 22, 48


def places(panel: Bars) -> dict[str, int]:
    """Return part -> its colour's place in the palette, for parts that have a length. Places count all named parts,
    so that panels with the same parts have the same colours."""
    order = list(dict.fromkeys(name for bar in panel.bars for name, _ in bar.parts))
    shown = {name for bar in panel.bars for name, value in bar.parts if value}
    return {name: i for i, name in enumerate(order) if name in shown} or {"": 0}


def _longest(panel: Bars) -> float:
    sums = [bar.start + sum(value for _, value in bar.parts) for bar in panel.bars]
    return max([*sums, *(value for _, value in panel.limits), panel.end, 1e-30])


def _short(label: str) -> str:
    """Shorten a label to the room left of the bars."""
    return label if len(label) <= _LONGEST else f"...{label[3 - _LONGEST :]}"


def draw(scene: Scene, panel: Bars) -> None:
    """Draw the bars, their legend below."""
    names = places(panel)
    left = EDGE + 10 + max(width(_short(bar.label)) for bar in panel.bars)
    room = WIDE - EDGE - left - 10 - max(width(bar.text, 11) for bar in panel.bars)
    scale = room / _longest(panel)
    top = scene.y
    limits = sorted(panel.limits, key=lambda limit: limit[1])
    scene.y += 15 * len(limits) + (3 if limits else 0)
    ends: list[tuple[float, float, str]] = []
    headings: list[tuple[float, str]] = []
    for bar in panel.bars:
        for line in wrap(bar.heading, WIDE - 2 * EDGE) if bar.heading else []:
            headings.append((scene.y + 14, line))
            scene.y += 19
        scene.text(left - 8, scene.y + 13, _short(bar.label), anchor="end")
        x = left + bar.start * scale
        for name, value in bar.parts:
            if not value:
                continue
            about = f"{bar.label}: {name}, {short(value, 'count')}"
            scene.rect(x, scene.y + 1, value * scale, _HIGH, f"f{names[name] % 8} b", about)
            x += value * scale
        ends.append((x + 6, scene.y + 13, bar.text))
        scene.y += _STEP
    for row, (name, value) in enumerate(limits):
        x = left + value * scale
        y = top + 15 * row
        scene.path([(x, y + 16), (x, scene.y)], "a", 1, DASHES[4])
        wide = width(name, 11)
        scene.text(min(max(x - wide / 2, left), WIDE - EDGE - wide), y + 12, name, "t halo", 11)
    for x, y, written in ends:
        for _, value in limits:  # a number that a line would cross moves to the right of the line, if there is room
            across = left + value * scale
            if x - 3 < across < x + width(written, 11) + 3 and across + 6 + width(written, 11) < WIDE - EDGE:
                x = across + 6
        scene.text(x, y, written, "t halo", 11)
    scene.path([(left, top + 15 * len(limits)), (left, scene.y)], "o")
    scene.path([(left, scene.y), (left + room, scene.y)], "o")
    for y, line in headings:  # over the axis, which leaves room for them
        scene.text(EDGE, y, line, "m halo")
    end = 0.0
    named = panel.ticks or [(short(v, "count"), v) for v in ticks(PlotAxis(""), 0.0, _longest(panel))]
    for written, value in named:
        if value > _longest(panel):
            break
        x = left + value * scale
        scene.path([(x, scene.y), (x, scene.y + 4)], "o")
        if x - width(written, 11) / 2 > end:
            end = scene.text(x, scene.y + 16, written, "m", 11, "middle").right + 8
    scene.text(left + room / 2, scene.y + 33, panel.unit, "m", 11, "middle")
    scene.y += 38
    if list(names) != [""]:
        scene.legend([(f"f{i % 8}", "", name) for name, i in names.items()])


def text(panel: Bars) -> list[str]:
    """Return the bars in characters: a letter for each part."""
    names = places(panel)
    letters = letters_of(list(names))
    wide = max(len(bar.label) for bar in panel.bars)
    room = max(10, 80 - wide - 3 - max(len(bar.text) for bar in panel.bars))
    scale = room / _longest(panel)
    lines: list[str] = []
    for bar in panel.bars:
        lines += [bar.heading] if bar.heading else []
        drawn, total = " " * round(bar.start * scale), bar.start
        for name, value in bar.parts:
            total += value
            drawn += letters.get(name, "") * (round(total * scale) - len(drawn))
        lines.append(f"{bar.label:>{wide}} |{drawn} {bar.text}")
    lines.append(f"{'':>{wide}}  {panel.unit}")
    if list(names) != [""]:
        lines += [f"{letters[name]}: {name}" for name in names]
    lines += [f"limit: {name}" for name, _ in panel.limits]
    return lines


def letters_of(names: list[str]) -> dict[str, str]:
    """Return name -> a letter, different ones where possible, from the name itself if it can be."""
    letters: dict[str, str] = {}
    for name in names:
        free = [c for c in f"{name.lower()}{name.upper()}0123456789=#" if c.isalnum() or c in "=#"]
        letters[name] = next((c for c in free if c not in letters.values()), "#") if name else "#"
    return letters


_LANE, _LANE_STEP = 22, 28


def _kinds(panel: Timeline) -> dict[str, int]:
    """Return kind of block -> its colour's place in the palette."""
    seen = dict.fromkeys(block.kind for lane in panel.lanes for block in lane.blocks)
    order = [*(kind for kind, _ in panel.palette), *seen]
    return {kind: order.index(kind) for kind in sorted(seen, key=order.index)}


def _end(panel: Timeline) -> float:
    return panel.end or max((block.end for lane in panel.lanes for block in lane.blocks), default=1.0)


def draw_timeline(scene: Scene, panel: Timeline) -> None:
    """Draw the lanes, with the axis and the legend below."""
    kinds, end = _kinds(panel), _end(panel)
    left = EDGE + 8 + max(width(lane.name) for lane in panel.lanes)
    remarks = max(width(lane.remark, 11) for lane in panel.lanes)
    room = WIDE - EDGE - left - (remarks + 10 if remarks else 6)
    scale, top = room / end, scene.y
    for lane in panel.lanes:
        scene.text(left - 8, scene.y + 16, lane.name, anchor="end")
        scene.path([(left, scene.y + _LANE + 1), (left + room, scene.y + _LANE + 1)], "g")
        for block in lane.blocks:
            x, w = left + block.start * scale, (block.end - block.start) * scale
            about = f"{block.about or f'{block.kind}: {block.label}'}, {block.start:.4g} to {block.end:.4g}"
            edge = " b" if w > 3 else ""  # a narrow block would be all edge
            with scene.appearing(block.start / end):
                scene.rect(x, scene.y, w, _LANE, f"f{kinds[block.kind] % 8}{edge}", about)
                if width(block.label, 10) <= w - 2:
                    scene.text(x + w / 2, scene.y + 15, block.label, "on", 10, "middle")
        if lane.remark:
            scene.text(left + room + 10, scene.y + 16, lane.remark, "t", 11)
        scene.y += _LANE_STEP
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


def timeline_text(panel: Timeline) -> list[str]:
    """Return the lanes in characters: a block shows its label where it has room, else its kind's letter."""
    kinds = _kinds(panel)
    letters = letters_of(list(kinds)) | dict(panel.palette)
    wide = max(len(lane.name) for lane in panel.lanes)
    remarks = max(len(lane.remark) for lane in panel.lanes)
    room = 80 - wide - 2 - (remarks + 1 if remarks else 0)
    scale = room / _end(panel)
    lines: list[str] = []
    for lane in panel.lanes:
        drawn = ["."] * room
        for block in lane.blocks:
            a, b = round(block.start * scale), round(block.end * scale)
            fill = letters[block.kind]
            word = block.label if len(block.label) < b - a else ""
            drawn[a:b] = f"{word:{fill}<{b - a}}" if b > a else ""
        lines.append(f"{lane.name:>{wide}} |{''.join(drawn)[:room]} {lane.remark}".rstrip())
    lines.append(f"{'':>{wide}}  0 to {_end(panel):.4g}: {panel.unit}")
    lines += [f"{letters[kind]}: {kind}" for kind in kinds]
    return lines
