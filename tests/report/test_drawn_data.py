"""What a drawing shows is its data: every word, each length and place; its numbers read back as what they were."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import combinations, pairwise
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.report import style
from phalanx.report.pictures import files
from phalanx.report.pictures.figure import (
    Arrow,
    Bar,
    Bars,
    Box,
    Diagram,
    Label,
    Lane,
    LaneBlock,
    Lines,
    Mark,
    Picture,
    PlotAxis,
    RuleLine,
    Series,
    Timeline,
    Unit,
)
from phalanx.report.pictures.numbers import short, ticks
from phalanx.report.pictures.scene import area_of
from phalanx.textbook.answers import PICTURES, picture

UNSAID = {"kind", "unit", "about", "dash", "axis", "palette", "column", "sends", "ticks"}
"""Fields of panels that no drawing writes, or not always."""
NAMES = tuple(name for name in PICTURES if name != "scaling")  # which takes seconds
OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hierarchy", {"cluster": "pcie-a100"}),
    ("hierarchy", {"cluster": "dgx-h100", "gpus": 8}),
    ("hierarchy", {"cluster": "gb200-nvl72"}),
    ("switches", {"cluster": "dgx-1v"}),
)


@cache
def _picture(name: str) -> Picture:
    return picture(name)


def _words(value: Any) -> Iterator[str]:
    """Yield what a panel says, field by field."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _words(inner)
    elif is_dataclass(value):
        for field in fields(value):
            inner = getattr(value, field.name)
            unused = field.name in UNSAID and not (field.name == "unit" and isinstance(value, Bars | Timeline))
            unused |= isinstance(value, LaneBlock) or (field.name == "parts")  # where they have room; in the legend
            yield from () if unused else _words(inner)


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("name", NAMES)
def test_all_words_of_a_picture_stand_in_its_drawing_and_its_text(name: str) -> None:
    p = _picture(name)
    drawn = _squeezed("".join(e.text or "" for e in ElementTree.fromstring(files.svg(p)).iter()))
    text = _squeezed("".join(files.text(p)))
    for panel in p.panels:
        for words in set(_words(panel)):
            assert _squeezed(words)[-30:] in drawn, words
            if not isinstance(panel, Lines):  # whose marks may lie outside its axes
                assert any(_squeezed(words)[-n:] in text for n in (30, 9)), words


def _boxes(p: Picture) -> Iterator[list[Box]]:
    for panel in p.panels:
        if isinstance(panel, Diagram):
            yield [item for item in panel.items if isinstance(item, Box)]


def test_boxes_stand_apart_or_in_each_other() -> None:
    """And a frame ends with what it holds."""
    pictures = [*map(_picture, NAMES), *(picture(name, given) for name, given in OTHERS)]
    for boxes in (boxes for p in pictures for boxes in _boxes(p)):
        for a in boxes:
            assert a.x >= 0
            assert a.y >= 0
            held = []
            for b in boxes:
                inside = a.x <= b.x and b.x + b.w <= a.x + a.w and a.y <= b.y and b.y + b.h <= a.y + a.h
                around = b.x <= a.x and a.x + a.w <= b.x + b.w and b.y <= a.y and a.y + a.h <= b.y + b.h
                apart = a.x + a.w <= b.x or b.x + b.w <= a.x or a.y + a.h <= b.y or b.y + b.h <= a.y
                assert inside or around or apart, (a, b)
                held += [b] if inside and b is not a else []
            if held and not a.lines:
                assert a.y + a.h - max(b.y + b.h for b in held) <= 3, a


@pytest.mark.parametrize("cluster", ["dgx-h100", "pcie-a100", "dgx-1v", "gb200-nvl72"])
def test_what_a_node_has_is_drawn_in_its_frame(cluster: str) -> None:
    """GPUs, ports, the links inside and the node's name; frames end where the name does. Levels between nodes are
    joined, each with the next."""
    (panel,) = picture("hierarchy", {"cluster": cluster}).panels
    assert isinstance(panel, Diagram)
    boxes = [item for item in panel.items if isinstance(item, Box)]
    frames = [b for b in boxes if not b.lines]
    names = [item for item in panel.items if isinstance(item, Label) and item.strong]
    assert len(frames) == len(names) > 0
    for frame, name in zip(frames, names, strict=True):
        assert frame.y < name.y == frame.y + frame.h - 2
    arrows = [item for item in panel.items if isinstance(item, Arrow)]
    levels = [b for b in boxes if b.y + b.h <= frames[0].y]
    ends = [(b.y + b.h, after.y) for b, after in pairwise([*levels, frames[0]])]
    for above, below in ends[:-1]:
        assert sum((a.points[0][1], a.points[-1][1]) == (above, below) for a in arrows) == 1
    assert all(a.points[0][1] >= frames[0].y - 1 or (a.points[0][1], a.points[-1][1]) in ends[:-1] for a in arrows)
    for box in boxes:
        if box.lines and re.match(r"GPU|port|a port|\.\.\.|.*: \d+ GPUs$", box.lines[0]):
            assert any(f.x < box.x and f.y < box.y and box.y + box.h < f.y + f.h for f in frames), box


@pytest.mark.parametrize(
    ("cluster", "gpus"),
    [("dgx-h100", 256), ("dgx-h100", 32), ("dgx-h100", 40), ("dgx-1v", 256), ("gb200-nvl72", 256)],
)
def test_levels_of_switches_end_with_gpus(cluster: str, gpus: int) -> None:
    """GPUs are coloured, blocks are not; every level but the innermost is led into. Dots say that some are left
    out."""
    (panel,) = picture("switches", {"cluster": cluster, "gpus": gpus}).panels
    assert isinstance(panel, Diagram)
    parts = [b for b in panel.items if isinstance(b, Box) and re.search(r"(GPU|block) \d+$", b.lines[0])]
    assert {(b.colour is not None, "GPU" in b.lines[0]) for b in parts} == {(True, True), (False, False)}
    for y in {b.y for b in parts}:  # each level hangs in the middle under its switches
        places = [b.x + b.w / 2 for b in parts if b.y == y]
        assert abs(sum(places) / len(places) - 39.5) <= 1
    shown = [(b.y, int(b.lines[0].split()[-1]), "..." in b.lines[0]) for b in parts]
    for (y, before, _), (below, number, dots) in pairwise(shown):
        assert dots == (y == below and number > before + 1)
    levels = sum(isinstance(b, Box) and b.lines[0].endswith("switches") for b in panel.items)
    assert sum(isinstance(n, Label) and n.text.startswith("inside each") for n in panel.items) == levels - 1 > 0


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_drawn_has_a_style(name: str) -> None:
    drawn = files.svg(_picture(name))
    style = re.search(r"<style>(.*?)</style>", drawn, re.DOTALL)
    assert style is not None
    styled = set(re.findall(r"\.([a-z]+\d*)", style[1]))
    used = {
        word for names in re.findall(r'class="([^"]+)"', drawn.partition("</style>")[2]) for word in names.split()
    }
    assert used <= styled


def test_arrows_lead_from_a_box_to_a_box() -> None:
    for name in NAMES:
        for panel in _picture(name).panels:
            if isinstance(panel, Diagram):
                boxes = [item for item in panel.items if isinstance(item, Box)]
                for arrow in (item for item in panel.items if isinstance(item, Arrow)):
                    for x, y in (arrow.points[0], arrow.points[-1]):
                        near = [b for b in boxes if b.x - 2 <= x <= b.x + b.w + 1 and b.y - 2 <= y <= b.y + b.h + 1]
                        assert near, (name, arrow)


def test_words_stand_beside_what_they_are_about() -> None:
    """No diagram has more than two empty rows between its words and boxes; a frame has its words at its top."""
    diagrams = [panel for name in NAMES for panel in _picture(name).panels if isinstance(panel, Diagram)]
    assert len(diagrams) > 8
    for panel in diagrams:
        labels = [item for item in panel.items if isinstance(item, Label)]
        assert all(label.x >= 0 and label.y >= 0 for label in labels)
        boxes = [item for item in panel.items if isinstance(item, Box)]
        for label in labels:
            around = [b for b in boxes if b.x <= label.x < b.x + b.w and b.y <= label.y < b.y + b.h]
            boxes = [b for b in boxes if b is not min(around, key=lambda b: b.w * b.h, default=None)]
        assert all(box.lines for box in boxes)
        rows = "".join("x" if line.strip() else " " for line in files.panel_text(panel))
        assert "   " not in rows, rows
        assert rows.endswith("x")


def test_axes_fit_their_data() -> None:
    """Numbers have the units of axes; what spans decades is logarithmic; curves and dots lie between the ends."""
    panels = [panel for name in NAMES for panel in _picture(name).panels if isinstance(panel, Lines)]
    assert len(panels) > 10
    for panel in panels:
        assert any(len(s.points) > 1 for s in panel.series) or panel.marks
        for axis, of in ((panel.x, 0), (panel.y, 1)):
            assert axis.unit in get_args(Unit)
            values = [p[of] for s in panel.series for p in s.points] + [(m.x, m.y)[of] for m in panel.marks]
            low = min(values) if axis.low is None else axis.low
            high = max(values) if axis.high is None else axis.high
            assert low < high, axis
            assert axis.log or not 0 < low < high / 1000, axis
            assert not axis.log or low > 0, axis
            assert sum(low * 0.999 <= v <= high * 1.001 for v in values) >= 0.8 * len(values), axis


def test_a_mark_is_a_point_of_its_curve() -> None:
    """Of the curve in its colour, between two of its points; a grey mark is on any of them."""
    panels = [panel for name in NAMES for panel in _picture(name).panels if isinstance(panel, Lines)]
    held = 0
    for panel in (panel for panel in panels if any(len(s.points) > 1 for s in panel.series)):
        for m in panel.marks:
            of = [s for i, s in enumerate(panel.series) if m.colour == 7 or m.colour in (s.colour, i)]
            ends = [(*sorted((a[0], b[0])), *sorted((a[1], b[1]))) for s in of for a, b in pairwise(s.points)]
            near = 1 + 1e-9
            held += 1
            assert any(x <= m.x <= x1 and y / near <= m.y <= y1 * near for x, x1, y, y1 in ends), m
    assert held > 20


def test_blocks_of_a_lane_follow_each_other() -> None:
    panels = [panel for name in NAMES for panel in _picture(name).panels if isinstance(panel, Timeline)]
    assert panels
    for panel in panels:
        for lane in panel.lanes:
            blocks = sorted(lane.blocks, key=lambda block: block.start)
            assert all(0 <= block.start < block.end for block in blocks), lane.name
            assert all(a.end <= b.start * (1 + 1e-9) for a, b in pairwise(blocks)), lane.name
            assert panel.end is None or not blocks or blocks[-1].end <= panel.end * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_labels_of_a_plot_cover_no_dot(name: str) -> None:
    p = _picture(name)
    names = {m.label for panel in p.panels if isinstance(panel, Lines) for m in panel.marks}
    for panel in (panel for panel in p.panels if isinstance(panel, Lines)):
        dots = [_number(d, "cx", "cy") for d in _shapes(panel, "circle") if d["r"] == "4.5"]
        for t in _shapes(panel, "text"):
            if t["said"] in names and "halo" in t["class"]:
                area = area_of(*_number(t, "x", "y"), t["said"], 11, t.get("text-anchor", "start"))
                assert not area.count(dots), t
    assert len(p.panels) > 0


# Geometry: rectangles, paths and dots of panels whose data are known.


def _shapes(panel: Any, tag: str) -> list[dict[str, str]]:
    drawn = files.svg(Picture("t", (panel,), "s"))
    group = next(e for e in ElementTree.fromstring(drawn).iter() if e.tag.endswith("}g"))
    return [dict(e.attrib) | {"said": e.text or ""} for e in group.iter() if e.tag.endswith(f"}}{tag}")]


def _number(shape: dict[str, str], *names: str) -> tuple[float, ...]:
    return tuple(float(shape[name]) for name in names)


@pytest.mark.parametrize("start", [0.0, 2.0])
def test_bars_are_as_long_as_their_numbers(start: float) -> None:
    panel = Bars(
        "GiB",
        (
            Bar("first", (("a", 1.0), ("b", 3.0)), "4 GiB", start),
            Bar("second", (("b", 0.0), ("c", 2.0)), "2 GiB", heading="a group"),
        ),
        (("limit", 5.0),),
        end=8.0,
    )
    rects = [r for r in _shapes(panel, "rect") if float(r["height"]) == 16]
    (x0, w0), (x1, w1), (x2, w2) = (_number(r, "x", "width") for r in rects)
    one = w0  # units of a GiB
    assert (w1, w2) == pytest.approx((3 * one, 2 * one), abs=0.2)
    assert (x0 - x2, x1 - x0) == pytest.approx((start * one, one), abs=0.2)
    assert len({r["class"] for r in rects}) == 3  # colours of a, b and c
    rows = [float(r["y"]) for r in rects]
    assert rows[0] == rows[1] < rows[2]
    words = {t["said"]: _number(t, "x", "y") for t in _shapes(panel, "text")}
    assert words["4 GiB"][0] >= x1 + w1
    assert rows[0] < words["first"][1] < rows[0] + 16 < words["a group"][1] < words["second"][1]
    marks = {float(said): x for said, (x, _) in words.items() if re.fullmatch(r"\d+", said)}
    assert all(x - x2 == pytest.approx(value * one, abs=0.3) for value, x in marks.items())
    assert max(marks) == 8
    across = next(p for p in _shapes(panel, "path") if p["class"] == "a")
    assert float(across["d"][1:].split()[0]) - x2 == pytest.approx(5 * one, abs=0.3)
    text = files.panel_text(panel)
    first, second = (next(line for line in text if name in line).partition("|")[2] for name in ("first", "second"))
    ratio = (first.count("b") / first.count("a"), second.count("c") / first.count("a"))
    assert ratio == pytest.approx((3, 2), rel=0.2)
    assert len(first) - len(first.lstrip()) == pytest.approx(start * first.count("a"), abs=2)


def test_blocks_stand_where_their_times_are() -> None:
    blocks = [LaneBlock(0, 1, "one", "a"), LaneBlock(2, 6, "two", "b", "said"), LaneBlock(6, 6.0001, "thin", "a")]
    panel = Timeline("time, ms", (Lane("lane", blocks, "remark"), Lane("other", [])), "head", 8.0)
    drawn = _shapes(panel, "rect")
    rects = [r for r in drawn if float(r["height"]) == 22]
    (x0, w0), (x1, w1), (_, w2) = (_number(r, "x", "width") for r in rects)
    assert (x1 - x0, w1) == pytest.approx((2 * w0, 4 * w0), abs=0.2)
    assert w2 < 1
    assert rects[0]["class"].split()[0] == rects[2]["class"].split()[0] != rects[1]["class"].split()[0]
    assert [" b" in r["class"] for r in rects] == [True, True, False]
    assert sum(p["class"] == "g" for p in _shapes(panel, "path")) == 2  # below each lane
    words = {t["said"]: t for t in _shapes(panel, "text")}
    assert "thin" not in words
    for (x, w), word in (((x0, w0), "one"), ((x1, w1), "two")):
        inside = _number(words[word], "x", "y")
        assert inside[0] == pytest.approx(x + w / 2, abs=0.2)
        assert float(rects[0]["y"]) + 8 < inside[1] < float(rects[0]["y"]) + 22
    marks = {float(said): float(t["x"]) for said, t in words.items() if re.fullmatch(r"[\d.]+", said)}
    assert all(x - x0 == pytest.approx(value * w0, abs=0.2) for value, x in marks.items())
    assert max(marks) == 8
    titles = [e["said"] for e in _shapes(panel, "title")]
    assert titles == ["a: one, 0 to 1", "said, 2 to 6", "a: thin, 6 to 6"]
    line = next(text for text in files.panel_text(panel) if text.startswith(" lane"))
    shown = line.partition("|")[2]
    assert shown.endswith(" remark")
    at = [shown.index(c) for c in "o.t"]
    assert (at[1] / at[2], shown.count("two")) == (pytest.approx(0.5, abs=0.1), 1)


@pytest.mark.parametrize("log", [False, True])
def test_curves_go_through_their_points(log: bool) -> None:
    """On both axes; dots, marks, rules and ticks stand at their values, and each label once."""
    low, high = (1.0, 1e6) if log else (0.0, 50.0)
    points = [(low, low), (10.0, 20.0), (high, high)]
    x, y = (PlotAxis(f"along {name}", "count", log=log, low=low, high=high) for name in "xy")
    stairs = Series("stairs", [(low, 10.0), (20.0, 30.0)], stairs=True)
    beyond = Series("beyond", [(10.0, 10.0), (2 * high, 10.0)], line=False, dots=True)
    piece = Series("one piece", [(5.0, 5.0), (20.0, 9.0)], dashed=True)
    panel = Lines(
        x,
        y,
        (Series("curve", points, dots=True, about=("p", "q", "r")), stairs, beyond, piece),
        (Mark(10.0, 40.0, "a mark"), Mark(3 * high, 5.0, "far away")),
        (RuleLine("x", 30.0, "a rule"), RuleLine("y", 7.0, "another"), RuleLine("y", 4 * high, "unseen")),
    )
    frame = next(r for r in _shapes(panel, "rect") if r["class"] == "o")
    left, top, wide, tall = _number(frame, "x", "y", "width", "height")

    def at(px: float, py: float) -> tuple[float, float]:
        across, up = (
            (v - low) / (high - low) if not log else math.log(v / low) / math.log(high / low) for v in (px, py)
        )
        return left + across * wide, top + tall - up * tall

    paths: dict[str, list[Any]] = {}
    for p in _shapes(panel, "path"):  # the first of each colour; then follow those of the legend
        paths.setdefault(p["class"], [tuple(map(float, xy.split())) for xy in p["d"][1:].split("L")])
    assert paths["l0"] == [pytest.approx(at(*p), abs=0.2) for p in points]
    steps = [(low, 10.0), (20.0, 10.0), (20.0, 30.0)]
    assert paths["l1"] == [pytest.approx(at(*p), abs=0.2) for p in steps]
    assert "l2" not in paths
    assert paths["l3"] == [pytest.approx(at(*p), abs=0.2) for p in piece.points]
    dashed = {p["class"] for p in _shapes(panel, "path") if p.get("stroke-dasharray") and p["class"][0] == "l"}
    assert dashed == {"l3"}
    dots = [(d["class"], _number(d, "cx", "cy")) for d in _shapes(panel, "circle")]
    shown = [*(("d0", p) for p in points), ("d2", (10.0, 10.0)), ("d1", (10.0, 40.0))]
    assert dots == [(kind, pytest.approx(at(*p), abs=0.2)) for kind, p in shown]
    words = Counter(t["said"] for t in _shapes(panel, "text"))
    assert all(words[label] == 1 for label in ("a mark", "a rule", "another", "along x", "along y", "curve"))
    assert words["unseen"] == 0
    outside = [word for word in words if word.startswith("Without room above: ")]
    assert outside == [f"Without room above: outside, far away ({short(3 * high, 'count')}; 5)"]
    rules = [p for p in _shapes(panel, "path") if p["class"] == "o"]
    assert {p["d"].split()[0] for p in rules} >= {f"M{at(30.0, low)[0]:.1f}"}
    assert any(f"L{left + wide:.1f} {at(low, 7.0)[1]:.1f}" in p["d"] for p in rules)
    for t in _shapes(panel, "text"):
        if (
            t["class"] == "m"
            and (value := {short(v, "count"): v for v in ticks(x, low, high)}.get(t["said"])) is not None
        ):
            place = _number(t, "x", "y")
            along = at(value, low)[0] == pytest.approx(place[0], abs=0.2)
            assert along or place[1] - 4 == pytest.approx(at(low, value)[1], abs=0.2), t
    lines = files.panel_text(panel)
    plot = [line.partition("|")[2].ljust(64) for line in lines if re.match(r"[\w., ]* \|", line)]
    assert len(plot) == 15
    row = next(i for i, line in enumerate(plot) if "1" in line)
    assert row == pytest.approx(14 * (at(10.0, 40.0)[1] - top) / tall, abs=0.51)
    assert plot[row].index("1") == pytest.approx(63 * (at(10.0, 40.0)[0] - left) / wide, abs=0.51)
    assert {line.index("|") for line in plot if "|" in line} == {round(63 * (at(30.0, low)[0] - left) / wide)}
    assert plot[-1][0] == plot[0][63] == "o"


_SCALES = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6}
_SCALES |= {"ns": 1e-9, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "GB/s": 1e9, "%": 0.01}
POSITIVE = st.floats(1e-3, 1e17).map(lambda x: float(f"{x:.6g}")) | st.floats(1.0, 1e6)


def _read(text: str, billions: bool = False) -> float:
    """Read a number with its unit back."""
    found = re.fullmatch(r"([-+]?[\d,.]+(?:e[-+]?\d+)?) ?([^\d]*)", text)
    assert found is not None, text
    unit = found[2].removesuffix("B/s" if found[2] != "GB/s" else "").removesuffix("FLOP/s").strip()
    scale = 1e9 if billions and unit == "B" else _SCALES.get(unit, 1.0 if not unit else math.nan)
    return float(found[1].replace(",", "")) * scale


@given(POSITIVE)
def test_numbers_of_axes_read_back(value: float) -> None:
    """In three digits, and no more characters than an axis has room for."""
    for unit in ("bytes", "s", "share", "parameters", "count", "B/s", "FLOP/s", "", "GB"):
        text = short(value, unit)
        assert _read(text, unit == "parameters") == pytest.approx(value, rel=6e-3), (unit, text)
        if value < 1e6 and unit in ("bytes", "s", "count", "B/s"):
            assert len(text) <= 12, (unit, text)
    assert short(0.0, "s") == short(0.0, "count") == "0"
    assert short(2024.7, "year") == "2024"


@given(POSITIVE)
def test_numbers_of_tables_read_back(value: float) -> None:
    """Two digits at least, where there is a unit small enough."""
    for unit, least in (("bytes", 10.0), ("s", 1e-5), ("GB", 0.1), ("count", 5.0), ("number", 0.0), ("share", 0.01)):
        if value >= least:
            assert _read(style.cell_text(value, unit)) == pytest.approx(value, rel=5.1e-2), unit
    assert _read(style.cell_text(value * 1e9, "rate")) == pytest.approx(value * 1e9, abs=0.051e9)
    for unit in ("signed_s", "signed_bytes"):
        plain = style.cell_text(value, unit.removeprefix("signed_"))
        assert (style.cell_text(value, unit), style.cell_text(-value, unit)) == (f"+{plain}", f"-{plain}")
    assert style.cell_text(0.125, "change") == "+12.5%"
    assert style.cell_text(-0.5, "change") == "-50.0%"
    assert (style.cell_text(None, "s"), style.cell_text(0, "s"), style.cell_text("x", "")) == ("", "0", "x")


@given(st.floats(1e-3, 1e6), st.floats(1.05, 1e6), st.booleans(), st.sampled_from([2, 10]))
def test_ticks_stand_evenly_between_the_ends(low: float, times: float, log: bool, base: int) -> None:
    high = low * times
    found = list(ticks(PlotAxis("", log=log, base=base), low, high))
    assert found == sorted(set(found))
    assert all(low * 0.999 <= value <= high * 1.001 for value in found)
    if not log:
        assert 2 <= len(found) <= 7
        steps = [b - a for a, b in pairwise(found)]
        assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-6)
        assert _leading(steps[0]) in (1, 2, 2.5, 5)
    elif base == 2 or times >= 300:
        assert all(b / a == pytest.approx(base) for a, b in pairwise(found))
        assert len(found) >= math.floor(math.log(times, base) - 1e-6)


def _leading(value: float) -> float:
    return round(value / 10 ** math.floor(math.log10(value) + 1e-9), 6)


@pytest.mark.parametrize("name", NAMES)
def test_boxes_of_a_diagram_nest_or_stand_apart(name: str) -> None:
    """In characters, of which a diagram has 80 columns: what is in a box is inside it, and no box is on its edge."""
    diagrams = [panel for panel in _picture(name).panels if isinstance(panel, Diagram)]
    for panel in diagrams:
        boxes = [item for item in panel.items if isinstance(item, Box)]
        for box in boxes:
            assert min(box.x, box.y) >= 0, box
            assert box.x + box.w <= 80, box
            assert all(len(line) <= box.w for line in box.lines), box
        for a, b in combinations(boxes, 2):
            apart = a.x + a.w <= b.x or b.x + b.w <= a.x or a.y + a.h <= b.y or b.y + b.h <= a.y
            inner, outer = sorted((a, b), key=lambda box: box.w * box.h)
            nested = (
                outer.x <= inner.x
                and inner.x + inner.w <= outer.x + outer.w
                and outer.y <= inner.y
                and inner.y + inner.h <= outer.y + outer.h
            )
            assert apart or nested, (a, b)
    assert all(panel.items for panel in diagrams)
