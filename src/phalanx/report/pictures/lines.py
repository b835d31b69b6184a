"""The drawing of curves over an axis, with marked points and rules; labels cover neither each other nor a curve."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from phalanx.report.pictures.figure import Lines, Mark, PlotAxis, RuleLine, Series
from phalanx.report.pictures.numbers import position, short, ticks
from phalanx.report.pictures.scene import DASHES, EDGE, WIDE, Area, Scene, area_of, width, wrap

_COLUMNS, _ROWS = 64, 15
_NEAR = 12
"""Units between a point and its label up to which no line joins them."""
_LETTERS, _MARKS = "abcdefghijklmnpqrstuvwxyz", "123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _range(panel: Lines, axis: PlotAxis, index: int) -> tuple[float, float]:
    """Return (low, high) of an axis: as given, else wide enough for points, marks and rules. `index`: 0 for x."""
    points = [p for s in panel.series for p in s.points] + [(m.x, m.y) for m in panel.marks]
    values = [p[index] for p in points if not axis.log or p[index] > 0]
    values += [r.value for r in panel.rules if r.axis == "xy"[index]]
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if axis.low is None and not axis.log:
        low = min(low, 0.0)
    if high <= low:
        high = low * 2 if low > 0 else low + 1
    if axis.high is None:
        high = high * (high / low) ** 0.04 if axis.log else high + 0.05 * (high - low)
    return low, high


def _inside(panel: Lines, xs: tuple[float, float], ys: tuple[float, float]) -> tuple[list[Mark], list[RuleLine]]:
    """Return the marks and rules that lie within the axes."""
    marks = [m for m in panel.marks if _within(m.x, panel.x, xs) and _within(m.y, panel.y, ys)]
    along = {"x": (panel.x, xs), "y": (panel.y, ys)}
    return marks, [r for r in panel.rules if _within(r.value, *along[r.axis])]


def draw(scene: Scene, panel: Lines) -> None:
    """Draw the curves."""
    xs, ys = _range(panel, panel.x, 0), _range(panel, panel.y, 1)
    marks, rules = _inside(panel, xs, ys)
    marks_y = [(v, short(v, panel.y.unit)) for v in ticks(panel.y, *ys)]
    left = EDGE + 10 + max([width(text, 11) for _, text in marks_y] or [20])
    right, w = WIDE - EDGE - 20, WIDE - EDGE - 20 - left
    scene.text(EDGE, scene.y + 12, panel.y.label, "m", 11)
    top, h = scene.y + 24, panel.height
    bottom = top + h

    def at(x: float, y: float) -> tuple[float, float]:
        return left + w * position(panel.x, *xs, x), bottom - h * position(panel.y, *ys, y)

    last = bottom + 100.0
    for value, text in marks_y:
        y = at(xs[0], value)[1]
        scene.path([(left, y), (right, y)], "g")
        if last - y > 14:
            scene.text(left - 6, y + 4, text, "m", 11, "end")
            last = y
    end = EDGE + 0.0
    for value in ticks(panel.x, *xs):
        x, text = at(value, ys[0])[0], short(value, panel.x.unit)
        scene.path([(x, top), (x, bottom)], "g")
        if x - width(text, 11) / 2 > end and x + width(text, 11) / 2 < WIDE - 4:
            end = scene.text(x, bottom + 15, text, "m", 11, "middle").right + 6
    scene.rect(left, top, w, h, "o")
    plot = Area(left + 2, top + 2, right - 2, bottom - 2)
    drawn: list[tuple[float, float]] = []
    for i, s in enumerate(panel.series):
        colour = i % 8 if s.colour is None else s.colour
        shown = [at(x, y) for x, y in _stairs(s) if _within(x, panel.x, xs) and _within(y, panel.y, ys)]
        if s.line and len(shown) > 1:
            scene.path(shown, f"l{colour}", 2, DASHES[1] if s.dashed else "")
        for a, b in pairwise(shown) if s.line else ():
            steps = max(1, round((abs(a[0] - b[0]) + abs(a[1] - b[1])) / 4))
            drawn += [(a[0] + (b[0] - a[0]) * k / steps, a[1] + (b[1] - a[1]) * k / steps) for k in range(steps + 1)]
        for k, point in enumerate(s.points if s.dots else ()):
            if _within(point[0], panel.x, xs) and _within(point[1], panel.y, ys):
                about = s.about[k] if s.about else ""
                scene.dot(*at(*point), f"d{colour}", 3 if s.line else 4.5, about)
    unplaced = [f"outside, {_mark_title(mark, panel)}" for mark in panel.marks if mark not in marks]
    for rule in rules:
        x, y = at(rule.value, ys[0])[0], at(xs[0], rule.value)[1]
        ends = [(x, top + 0.0), (x, bottom + 0.0)] if rule.axis == "x" else [(left, y), (right, y)]
        scene.path(ends, "o", 1, DASHES[4])
        drawn += [(x, top + k) for k in range(0, h, 4)] if rule.axis == "x" else []
        drawn += [(left + k, y) for k in range(0, int(w), 4)] if rule.axis == "y" else []
    labels = _Labels(plot, drawn, [], [])
    for mark in marks:
        px, py = at(mark.x, mark.y)
        labels.taken.append(Area(px - 4, py - 4, px + 4, py + 4))
    for rule in rules:
        x, y = at(rule.value, ys[0])[0], at(xs[0], rule.value)[1]
        if rule.axis == "x":
            spots = [(x + s, top + 13 + 15 * k, a) for k in range(h // 16) for s, a in ((5, "start"), (-5, "end"))]
        else:
            spots = [(right - 6 - k * 40, y + down, "end") for down in (-4, 13) for k in range(14)]
        if not labels.place(rule.label, "m halo", spots):
            unplaced.append(f"dashed: {rule.label}")
    for mark in marks:
        point = at(mark.x, mark.y)
        if not labels.place(mark.label, "t halo", list(_around(*point)), point):
            unplaced.append(f"the dot at {_mark_title(mark, panel)}")
    labels.draw(scene)
    for mark in marks:
        scene.dot(*at(mark.x, mark.y), f"d{mark.colour}", 4.5)
    scene.text(left + w / 2, bottom + 33, panel.x.label, "m", 11, "middle")
    scene.y = bottom + 40
    if len(panel.series) > 1 or panel.series[0].name:
        colours = (i % 8 if s.colour is None else s.colour for i, s in enumerate(panel.series))
        named = ((colour, s) for colour, s in zip(colours, panel.series, strict=True) if s.name)
        scene.legend([(f"{'l' if s.line else 'd'}{c}", DASHES[1] if s.dashed else "", s.name) for c, s in named])
    for line in wrap("Without room above: " + "; ".join(unplaced), WIDE - 2 * EDGE, 11) if unplaced else ():
        scene.text(EDGE, scene.y + 12, line, "m", 11)
        scene.y += 15


def _stairs(s: Series) -> list[tuple[float, float]]:
    if not s.stairs:
        return list(s.points)
    points = [s.points[0]]
    for x, y in s.points[1:]:
        points += [(x, points[-1][1]), (x, y)]
    return points


def _within(value: float, axis: PlotAxis, ends: tuple[float, float]) -> bool:
    return ends[0] * (1 - 1e-9) <= value <= ends[1] * (1 + 1e-9) and (value > 0 or not axis.log)


def _around(x: float, y: float) -> Iterator[tuple[float, float, str]]:
    """Yield (x, y, anchor) of places for a point's label, the nearest first."""
    for far in (0, 14, 28, 44, 62, 82):
        yield x + 8, y + 4 + far, "start"
        yield x - 8, y + 4 + far, "end"
        yield x + 8, y + 4 - far, "start"
        yield x - 8, y + 4 - far, "end"
        yield x, y - 10 - far, "middle"
        yield x, y + 18 + far, "middle"


@dataclass
class _Labels:
    """Labels on a plot: their places, and what they must not cover."""

    plot: Area
    drawn: Sequence[tuple[float, float]]
    """Points along the curves."""
    taken: list[Area]
    """Dots and labels."""
    placed: list[tuple[str, str, tuple[float, float, str], tuple[float, float] | None]]
    """(text, kind, (x, y, anchor), the point that it names or None)."""

    def place(
        self, label: str, kind: str, spots: Sequence[tuple[float, float, str]], of: tuple[float, float] | None = None
    ) -> bool:
        """Place a label at the spot where it covers least of the curves and nothing else; return False if there is
        none. `of`: the point that it names, to which a line leads if it is not near."""
        best: tuple[float, tuple[float, float, str], Area] | None = None
        for place, spot in enumerate(spots):
            if best is not None and 0.4 * place >= best[0]:
                break
            area = area_of(spot[0], spot[1], label, 11, spot[2])
            if not area.inside(self.plot) or any(area.meets(other, 2) for other in self.taken):
                continue
            cost = 0.4 * place + area.count(self.drawn)
            if of is not None:
                line = [point for point in _between(of, area) if math.dist(of, point) > _NEAR / 2]
                cost += 20 * sum(other.count(line) for other in self.taken)
            if best is None or cost < best[0]:
                best = (cost, spot, area)
        if best is None:
            return False
        self.taken.append(best[2])
        self.placed.append((label, kind, best[1], of))
        return True

    def draw(self, scene: Scene) -> None:
        """Draw the lines to points, then the labels."""
        for label, _, (x, y, anchor), of in self.placed:
            line = _between(of, area_of(x, y, label, 11, anchor)) if of is not None else []
            if line and math.dist(line[0], line[-1]) > _NEAR:
                scene.path([line[0], line[-1]], "o", 0.7)
        for label, kind, (x, y, anchor), _ in self.placed:
            scene.text(x, y, label, kind, 11, anchor)


def _between(of: tuple[float, float], area: Area) -> list[tuple[float, float]]:
    """Return 21 points on the line from a point to the nearest point of a rectangle."""
    near = min(max(of[0], area.left), area.right), min(max(of[1], area.top), area.bottom)
    return [(of[0] + (near[0] - of[0]) * k / 20, of[1] + (near[1] - of[1]) * k / 20) for k in range(21)]


def text(panel: Lines) -> list[str]:
    """Return the curves in characters: a small letter for each curve, `o` for its points where these are drawn, a
    digit or capital for each marked point."""
    xs, ys = _range(panel, panel.x, 0), _range(panel, panel.y, 1)
    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]

    def cell(x: float, y: float) -> tuple[int, int]:
        across = round(position(panel.x, *xs, x) * (_COLUMNS - 1))
        return _ROWS - 1 - round(position(panel.y, *ys, y) * (_ROWS - 1)), across

    marks, rules = _inside(panel, xs, ys)
    for rule in rules:
        for k in range(_ROWS if rule.axis == "x" else _COLUMNS):
            row, column = cell(rule.value, ys[0]) if rule.axis == "x" else cell(xs[0], rule.value)
            if rule.axis == "x":
                grid[k][column] = "|"
            else:
                grid[row][k] = "-"
    for i, s in enumerate(panel.series):
        inside = [p for p in _stairs(s) if _within(p[0], panel.x, xs) and _within(p[1], panel.y, ys)]
        cells = [cell(*p) for p in inside]
        for (r0, c0), (r1, c1) in zip(cells, cells[1:] or cells, strict=False) if s.line else ():
            steps = max(abs(r1 - r0), abs(c1 - c0), 1)
            for k in range(steps + 1):
                grid[r0 + round((r1 - r0) * k / steps)][c0 + round((c1 - c0) * k / steps)] = _LETTERS[i]
    for x, y in (point for s in panel.series if s.dots for point in s.points):
        if _within(x, panel.x, xs) and _within(y, panel.y, ys):
            row, column = cell(x, y)
            grid[row][column] = "o"
    for i, mark in enumerate(marks):
        row, column = cell(mark.x, mark.y)
        grid[row][column] = _MARKS[i % len(_MARKS)]
    names = [""] * _ROWS
    for value in ticks(panel.y, *ys):
        names[cell(xs[0], value)[0]] = short(value, panel.y.unit)
    wide = max(len(name) for name in names)
    lines = [panel.y.label]
    lines += [f"{name:>{wide}} |{''.join(row)}".rstrip() for name, row in zip(names, grid, strict=True)]
    lines.append(" " * wide + " +" + "-" * _COLUMNS)
    under = [" "] * (_COLUMNS + 10)
    for value in ticks(panel.x, *xs):
        name = short(value, panel.x.unit)
        start = min(max(cell(value, ys[0])[1] - len(name) // 2, 0), _COLUMNS - len(name))
        if all(c == " " for c in under[max(start - 1, 0) : start + len(name) + 1]):
            under[start : start + len(name)] = name
    lines.append(" " * (wide + 2) + "".join(under).rstrip())
    lines.append(" " * (wide + 2) + panel.x.label)
    lines += [f"{_LETTERS[i]}: {s.name}" for i, s in enumerate(panel.series) if s.name]
    lines += [f"{_MARKS[i % len(_MARKS)]}: {_mark_title(mark, panel)}" for i, mark in enumerate(marks)]
    lines += [f"{'|' if rule.axis == 'x' else '-'}: {rule.label}" for rule in rules]
    return lines


def _mark_title(mark: Mark, panel: Lines) -> str:
    where = [short(mark.x, panel.x.unit), short(mark.y, panel.y.unit)]
    return f"{mark.label} ({'; '.join(words for words in where if words != mark.label)})"
