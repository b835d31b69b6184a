"""Cells of grids, rounds and heat stand where their rows and columns are; arrows point along their lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.report.gallery import collectives
from phalanx.report.pictures import files
from phalanx.report.pictures.figure import (
    Arrow,
    Box,
    Cell,
    Diagram,
    Grid,
    Grids,
    Heat,
    Label,
    Node,
    Picture,
    Rounds,
    RoundState,
    Tree,
)
from phalanx.report.pictures.scene import Area, Scene, area_of, width, wrap
from phalanx.schedule.collectives.registry import ALGORITHMS, build


def _shapes(panel: Any, tag: str) -> list[dict[str, str]]:
    drawn = files.svg(Picture("t", (panel,), "s"))
    group = next(e for e in ElementTree.fromstring(drawn).iter() if e.tag.endswith("}g"))
    return [dict(e.attrib) | {"said": e.text or ""} for e in group.iter() if e.tag.endswith(f"}}{tag}")]


def _area(rect: dict[str, str]) -> Area:
    x, y, w, h = (float(rect[name]) for name in ("x", "y", "width", "height"))
    return Area(x, y, x + w, y + h)


def _within(word: dict[str, str], area: Area) -> bool:
    x, y, size = (float(word[name]) for name in ("x", "y", "font-size"))
    return area_of(x, y, word["said"], size, word.get("text-anchor", "start")).inside(area)


def _evenly(values: list[float]) -> float:
    steps = [b - a for a, b in pairwise(sorted(set(values)))]
    assert steps == pytest.approx([steps[0]] * len(steps), abs=0.2)
    return steps[0]


def test_cells_of_grids_stand_in_rows_and_columns_of_their_frame() -> None:
    def grid(i: int) -> Grid:
        rows = [
            [Cell(f"{i}{r}{c}", c % 3 if c else None, f"about {c}", outlined=c == 1) for c in range(4)]
            for r in range(2)
        ]
        return Grid(f"node {i}", rows)

    panel = Grids(tuple(grid(i) for i in range(9)), ("a line below",))
    rects, words = _shapes(panel, "rect"), {t["said"]: t for t in _shapes(panel, "text")}
    frames = [r for r in rects if float(r["height"]) > 32]
    cells = [r for r in rects if float(r["height"]) == 32]
    assert (len(frames), len(cells)) == (9, 72)
    for i, frame in enumerate(frames):
        own = cells[8 * i : 8 * i + 8]
        assert all(_area(cell).inside(_area(frame)) for cell in own)
        assert _within(words[f"node {i}"], _area(frame))
        assert _evenly([float(c["x"]) for c in own]) == _evenly([float(c["y"]) for c in own]) == 35
        for k, cell in enumerate(own):
            assert _within(words[f"{i}{k // 4}{k % 4}"], _area(cell))
            assert cell["class"] == ("paper" if k % 4 == 0 else f"f{k % 4 % 3} b")
            assert words[f"{i}{k // 4}{k % 4}"]["class"] == ("t" if k % 4 == 0 else "on")  # ink, or what a fill bears
    areas = [_area(frame) for frame in frames]
    assert not any(a.meets(b, 0) for i, a in enumerate(areas) for b in areas[i + 1 :])
    assert max(a.right for a in areas) < 760
    assert float(words["a line below"]["y"]) > max(a.bottom for a in areas)
    outlines = [p for p in _shapes(panel, "path") if p["class"] == "a"]
    assert len(outlines) == 18
    text = files.panel_text(panel)
    assert text[0] == "node 0"
    assert re.findall(r"\d{3}", text[1]) == ["000", "001", "002", "003"]
    assert text[1].count("|") == 3  # where the colour changes
    assert text[-1] == "a line below"


def _state(i: int, sends: list[tuple[int, int, str]]) -> RoundState:
    words = [[f"{i}{r}{c}" for c in range(2)] for r in range(4)]
    full = [[0.0, 0.5] if r < 2 else [1.0, 0.25] for r in range(4)]
    return RoundState(f"round {i}", sends, words, full, [[r == i, False] for r in range(4)])


def test_rounds_show_who_holds_and_sends_what() -> None:
    panel = Rounds((_state(0, [(0, 1, "a"), (1, 2, "b"), (1, 2, "c")]), _state(1, [])), node=2, across=1)
    rects, words = _shapes(panel, "rect"), {t["said"]: t for t in _shapes(panel, "text")}
    cells = [r for r in rects if r["class"] in ("f2 b", "f4 b", "f6 b")][:16]
    assert [c["class"][1] for c in cells[:8]] == list("64642424")
    for k, cell in enumerate(cells):
        assert _within(words[f"{k // 8}{k % 8 // 2}{k % 2}"], _area(cell))
    new = [r for r in rects if r["class"] == "new"]
    assert [_area(a).inside(_area(b)) for a, b in zip(new, (cells[0], cells[10]), strict=True)] == [True, True]
    tops = [float(c["y"]) for c in cells[:8:2]]
    inside, between = tops[1] - tops[0], tops[2] - tops[1]
    assert tops[3] - tops[2] == inside < between  # nodes stand apart
    curves = [p for p in _shapes(panel, "path") if "C" in p["d"]]
    assert [c["class"] for c in curves] == ["a", "hot"]  # the second one crosses nodes, once for both messages
    ends = [re.findall(r"[\d.]+", c["d"]) for c in curves]
    for (source, to), numbers in zip(((0, 1), (1, 2)), ends, strict=True):
        assert tops[source] < float(numbers[1]) < tops[source] + 20
        assert tops[to] < float(numbers[-1]) < tops[to] + 20
    text = files.panel_text(panel)
    assert text[:2] == ["round 0", "  0->1: a   1->2: b   1->2: c"]
    assert text[2] == "  rank  0 | 000 001"
    assert float(words["round 1"]["y"]) > max(_area(c).bottom for c in cells[:8])


def test_heat_is_as_dark_and_as_long_as_its_shares() -> None:
    panel = Heat([("one", [0.0, 0.5, 0.5, 1.0]), ("two", [0.2] * 4), ("three", [0.0] * 4)], "a day")
    rects = [r for r in _shapes(panel, "rect") if r["class"] == "f0"]
    darkness = [float(r.get("fill-opacity", 1)) for r in rects]
    assert darkness == [0.5, 1.0, 0.2]
    half, full, whole = (_area(r) for r in rects)
    assert half.right == pytest.approx(full.left, abs=0.2)
    assert (half.right - half.left) / 2 == pytest.approx(full.right - full.left, abs=0.2)
    assert whole.right - whole.left == pytest.approx(4 * (full.right - full.left), abs=0.3)
    assert (half.top, whole.top) == (full.top, full.top + 6)
    words = [t["said"] for t in _shapes(panel, "text")]
    assert words[0] == "one"
    assert words[-1] == "a day"
    lines = files.panel_text(panel)
    assert lines[0] == "one   " + " ▄▄█"
    assert [set(line[6:]) for line in lines[1:3]] == [{"▂"}, {" "}]
    assert lines[-1].strip() == "a day; full height: all of it"


@pytest.mark.parametrize("heads", [0, 1, 2])
@pytest.mark.parametrize("end", [(30, 2), (2, 2), (10, 9)])
def test_an_arrow_points_along_its_last_piece(heads: Any, end: tuple[int, int]) -> None:
    start = (10, 2)
    panel = Diagram((Arrow((start, end), heads), Box(40, 0, 8, 3), Label(0, 10, "below")))
    heads_drawn = [[tuple(map(float, p.split(","))) for p in h["points"].split()] for h in _shapes(panel, "polygon")]
    assert len(heads_drawn) == heads
    (path,) = (p for p in _shapes(panel, "path") if p["class"] == "a")
    first, last = (tuple(map(float, xy.split())) for xy in path["d"][1:].split("L"))
    for tip, *back in heads_drawn:
        at, away = (last, first) if math.dist(tip, last) < math.dist(tip, first) else (first, last)
        assert tip == pytest.approx(at, abs=0.1)
        middle = [(a + b) / 2 for a, b in zip(*back, strict=True)]
        assert math.dist(back[0], tip) == pytest.approx(math.dist(back[1], tip), abs=0.2)
        along = [(t - m) / math.dist(tip, middle) for t, m in zip(tip, middle, strict=True)]
        wanted = [(t - f) / math.dist(at, away) for t, f in zip(at, away, strict=True)]
        assert along == pytest.approx(wanted, abs=0.05)
        assert math.dist(*back) > 5
    text = files.panel_text(panel)
    mark = {(30, 2): ">", (2, 2): "<", (10, 9): "v"}[end]
    assert (text[end[1]].ljust(41)[end[0]] == mark) == (heads > 0)
    assert text[10] == "below"


def test_a_tree_is_indented_by_its_depth_and_marks_its_path() -> None:
    root = Node(
        "root",
        (Node("yes side", (Node("end", taken=True, leaf=True, edge="no"),), "yes", True), Node("no side", (), "no")),
    )
    panel = Tree(Node(root.text, root.below, taken=True), "head")
    assert files.panel_text(panel) == [
        "head",
        "-> root",
        "   yes: -> yes side",
        "      no: => end",
        "   no: no side",
    ]
    rects, words = _shapes(panel, "rect"), {t["said"]: t for t in _shapes(panel, "text")}
    lefts = {
        said: next(_area(r).left for r in rects if _within(words[said], _area(r)))
        for said in ("root", "yes side", "end")
    }
    assert lefts["root"] < lefts["yes side"] < lefts["end"]
    assert [r["class"] for r in rects] == ["hotbox", "hotbox", "hotbox", "paper"]
    assert [p["class"] for p in _shapes(panel, "path")] == ["hot", "hot", "o"]


@given(st.lists(st.text("abc lmnw", max_size=12), max_size=12), st.floats(40, 300))
def test_lines_are_broken_between_words_and_fit(words: list[str], room: float) -> None:
    text = " ".join(words)
    lines = wrap(text, room)
    assert " ".join(lines).split() == text.split()
    assert all(width(line) <= room or " " not in line for line in lines)
    for a, b in pairwise(lines):
        assert width(f"{a} {b.split()[0]}") > room  # each is as long as it may be


def _areas() -> st.SearchStrategy[Area]:
    side = st.integers(0, 9)
    return st.tuples(side, side, side, side).map(lambda t: Area(t[0], t[1], t[0] + t[2] + 1, t[1] + t[3] + 1))


@given(_areas(), _areas())
def test_rectangles_meet_where_they_share_points(a: Area, b: Area) -> None:
    def points(area: Area) -> Iterator[tuple[float, float]]:
        for x in range(int(area.left), int(area.right)):
            for y in range(int(area.top), int(area.bottom)):
                yield x + 0.5, y + 0.5

    shared = [p for p in points(a) if b.count([p])]
    assert a.meets(b, 0.0) == b.meets(a, 0.0) == bool(shared)
    assert a.count(list(points(b))) == len(shared)
    assert a.count([(a.left, a.top), (a.right, a.bottom), (a.left, a.bottom + 0.1)]) == 2  # its edges are its own
    assert a.inside(b) == (len(shared) == len(list(points(a))))
    assert a.meets(b, 1.0) or not shared


def test_a_text_has_its_area() -> None:
    scene = Scene()
    for anchor, share in (("start", 0.0), ("middle", 0.5), ("end", 1.0)):
        area = scene.text(100, 50, "some words", size=10, anchor=anchor)
        assert area.right - area.left == pytest.approx(width("some words", 10))
        assert 100 - area.left == pytest.approx(share * (area.right - area.left))
        assert area.top < 50 < area.bottom


@pytest.mark.parametrize(("op", "algorithm"), [(op, name) for op in ALGORITHMS for name in ALGORITHMS[op]])
def test_rounds_show_which_contributions_each_rank_holds(op: str, algorithm: str) -> None:
    """An empty place has none of them, a sum that is complete all: of one contribution each place has all or none."""
    picture = collectives.rounds(
        build(op, algorithm, ranks := 4, 24, tiers=(2, 2) if algorithm == "hierarchical" else None)
    )
    (panel,) = picture.panels
    assert isinstance(panel, Rounds)
    assert (panel.column == "block", "rows become columns" in picture.note) == (op == "all_to_all",) * 2
    before = panel.rounds[0].cells
    for state in panel.rounds:
        assert len(state.cells) == len(state.full) == ranks
        for words, shares, changed, old in zip(state.cells, state.full, state.changed, before, strict=True):
            assert [share == 0 for share in shares] == [word == "." for word in words]
            assert [word != last for word, last in zip(words, old, strict=True)] == list(changed)
            if "reduce" not in op:
                assert set(shares) <= {0.0, 1.0}
        before = state.cells
    start, end = panel.rounds[0].full, panel.rounds[-1].full
    if op in ("all_reduce", "reduce_scatter", "reduce"):
        assert {share for row in start for share in row} == {1 / ranks}
        assert min(max(row[i] for row in end) for i in range(len(end[0]))) == 1.0
    if op in ("all_reduce", "all_gather", "broadcast", "all_to_all"):
        assert {share for row in end for share in row} == {1.0}
