"""Every picture: well-formed, with title, units and source; no text over another or outside; 80 columns as text."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phalanx.answers.runs.sweep import SweptRun, TrainingSweep, sheet
from phalanx.cost.step.expand import expand
from phalanx.planning.lookup import cluster_named, model_named
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report import plots
from phalanx.report.gallery.hardware import _rate
from phalanx.report.measured import runs as swept
from phalanx.report.pictures import bars, files, lines
from phalanx.report.pictures.figure import (
    Bar,
    Bars,
    Box,
    Diagram,
    Label,
    Lines,
    Mark,
    Picture,
    PlotAxis,
    Rounds,
    RuleLine,
    Series,
    Timeline,
)
from phalanx.report.pictures.scene import Area, area_of
from phalanx.report.view import report
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.presets import PRESETS as CLUSTERS
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.presets import PRESETS as MODELS
from phalanx.spec.strategy.compressors import parse
from phalanx.spec.strategy.spec import Strategy
from phalanx.textbook.answers import PICTURES, options_of, picture
from phalanx.textbook.gallery.data_parallel import times_less, with_times

_TEXT, _GROUP = "{http://www.w3.org/2000/svg}text", "{http://www.w3.org/2000/svg}g"


@cache
def _picture(name: str) -> Picture:
    return picture(name)


@cache
def _svg(name: str) -> str:
    return files.svg(_picture(name))


def _texts(drawn: str) -> tuple[list[tuple[str, Area]], Area]:
    """Return every text of an SVG with its rectangle, and the rectangle of the whole."""
    root = ElementTree.fromstring(drawn)
    wide, high = (float(x) for x in root.attrib["viewBox"].split()[2:])
    found: list[tuple[str, Area]] = []

    def walk(node: ElementTree.Element, down: float) -> None:
        if node.tag == _GROUP:
            moved = re.fullmatch(r"translate\(0 ([\d.]+)\)", node.attrib.get("transform", "translate(0 0)"))
            assert moved is not None
            down += float(moved[1])
        if node.tag == _TEXT:
            a, words = node.attrib, node.text or ""
            x, y, size = float(a["x"]), float(a["y"]) + down, float(a["font-size"])
            bold = a.get("font-weight") == "bold"
            found.append((words, area_of(x, y, words, size, a.get("text-anchor", "start"), bold)))
        for child in node:
            walk(child, down)

    walk(root, 0.0)
    return found, Area(0, 0, wide, high)


def _wrong(drawn: str) -> list[str]:
    """Return what is laid over another text, or lies outside."""
    found, whole = _texts(drawn)
    wrong = [f"outside: {words!r}" for words, area in found if words and not area.inside(whole)]
    for i, (words, area) in enumerate(found):
        wrong += [
            f"{words!r} over {other!r}" for other, b in found[i + 1 :] if words and other and area.meets(b, -0.5)
        ]
    return wrong


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_covers_another_or_is_cut_off(name: str) -> None:
    assert not _wrong(_svg(name))


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_title_units_and_source(name: str) -> None:
    p = _picture(name)
    root = ElementTree.fromstring(_svg(name))
    assert root[0].text == p.title
    assert "Source: " in (root[1].text or "")
    assert re.search(r"`phalanx |spec/|schedule/|StepProgram|seed|verify|collectives", p.source)
    for panel in p.panels:
        if isinstance(panel, Lines):
            assert panel.x.label
            assert panel.y.label
        elif isinstance(panel, Bars | Timeline):
            assert panel.unit


@pytest.mark.parametrize("name", PICTURES)
def test_its_words_are_readable_on_a_slide(name: str) -> None:
    """9 pixels and more where the picture is 1,280 wide."""
    root = ElementTree.fromstring(_svg(name))
    sizes = [float(node.attrib["font-size"]) for node in root.iter(_TEXT)]
    assert min(sizes) * 1280 / float(root.attrib["viewBox"].split()[2]) >= 9


@pytest.mark.parametrize("name", PICTURES)
def test_as_text_it_has_80_columns(name: str) -> None:
    written = files.text(_picture(name))
    assert max(map(len, written)) <= 80
    assert not any("\x1b" in line for line in written)


def test_what_stands_in_a_box_fits_it() -> None:
    panels = [panel for name in PICTURES for panel in _picture(name).panels if isinstance(panel, Diagram)]
    boxes = [item for panel in panels for item in panel.items if isinstance(item, Box)]
    assert len(boxes) > 100
    for box in boxes:
        assert all(len(line) <= box.w - 2 for line in box.lines), box
        assert len(box.lines) <= max(1, box.h - 2), box
    for panel in panels:  # and words beside boxes cross no frame
        for label in [item for item in panel.items if isinstance(item, Label)]:
            end = label.x + len(label.text)
            for box in [item for item in panel.items if isinstance(item, Box) and 0 <= label.y - item.y < item.h]:
                apart = end <= box.x or label.x >= box.x + box.w
                assert apart or box.x <= label.x < end <= box.x + box.w, (label, box)


_OTHERS = (
    *((name, {"cluster": c}) for c in ("dgx-1v", "sites-h100", "pcie-a100") for name in ("hierarchy", "switches")),
    *((name, {"cluster": c}) for c in ("dgx-1v", "gb200-nvl72") for name in ("staircase", "memory-hierarchy")),
    ("ring-all-reduce", {"ranks": 8}),
    ("binomial-all-reduce", {"ranks": 7}),
    ("memory-wall", {"ranks": 100_000}),
    ("moe-layer", {"model": "deepseek-v3", "ranks": 4, "seq": 999_999}),
    ("routing", {"model": "qwen3-30b-a3b", "seq": 1}),
    ("decision-tree", {"model": "llama3-70b", "gpus": 64}),
    ("fsdp", {"model": "gpt2", "gpus": 8}),
)


@pytest.mark.parametrize(("name", "given"), _OTHERS)
def test_other_questions_are_drawn_as_well(name: str, given: dict[str, str | int]) -> None:
    p = picture(name, given)
    assert not _wrong(files.svg(p))
    assert max(map(len, files.text(p))) <= 80


_PRESETS = {"--model": MODELS, "--cluster": CLUSTERS}
_LONG_TO_DRAW = ("scaling", "local-steps")


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in PICTURES if n not in _LONG_TO_DRAW and _PRESETS.keys() & options_of(n)])
def test_every_model_and_cluster_is_drawn_or_refused(name: str) -> None:
    for option in _PRESETS.keys() & options_of(name):
        for value in _PRESETS[option]:
            try:
                p = picture(name, {option.removeprefix("--"): value})
            except InputError:
                continue
            assert not _wrong(files.svg(p)), value
            assert max(map(len, files.text(p))) <= 80, value


def test_what_is_drawn_is_what_is_computed() -> None:
    """Some numbers of pictures, against sums done by hand."""
    wall = _picture("memory-wall").panels[0]
    assert isinstance(wall, Lines)
    h100 = CHIPS["H100"].memory_bytes
    assert [m.x for m in wall.marks[:2]] == [h100 / 2, h100 / 16]
    root, ring, _ = _picture("root-bottleneck").panels
    assert isinstance(root, Bars)
    assert isinstance(ring, Bars)
    assert [value for _, value in root.bars[0].parts] == [7.0, 7.0]  # P - 1 buffers
    assert root.end == ring.end == 14.0  # they are compared
    assert all([value for _, value in bar.parts] == [1.75, 1.75] for bar in ring.bars)  # 2 (P-1)/P
    routed = _picture("routing").panels[1]
    assert isinstance(routed, Bars)
    assert {"dropped" in bar.text for bar in routed.bars} == {True, False}
    assert all(("dropped" in bar.text) == (dict(bar.parts)["dropped"] > 0) for bar in routed.bars)
    zero = _picture("parameter-bytes").panels[1]
    assert isinstance(zero, Bars)
    assert [sum(value for _, value in bar.parts) for bar in zero.bars] == [16, 5.5, 3.75, 2]
    step, both = _picture("tp-efficiency").panels[0], _picture("prefetch").note
    assert isinstance(step, Lines)
    assert all(s.points[0] == (1.0, 1.0) and s.points[-1][1] < 0.5 for s in step.series)
    assert "of the waiting goes" in both
    law = _picture("growth").panels[1]
    assert isinstance(law, Lines)
    n, value = law.series[0].points[-1]
    assert value == pytest.approx(1.69 + 406.4 / n**0.34 + 410.7 / (20 * n) ** 0.28)


def test_a_part_has_one_colour_in_all_panels() -> None:
    """The first bar of the first panel has no master copy, which must not shift the colours of what follows."""
    for name in ("parameter-bytes", "scaling"):
        places = [bars.places(panel) for panel in _picture(name).panels if isinstance(panel, Bars)]
        assert all(a[part] == b[part] for a in places for b in places for part in a.keys() & b.keys())
    assert list(bars.places(_bars_of("parameter-bytes"))) == ["weights", "gradients", "master copy", "two moments"]


def _bars_of(name: str) -> Bars:
    return next(panel for panel in _picture(name).panels if isinstance(panel, Bars))


def test_tables_of_words_are_bars() -> None:
    sheet = Sheet("t", columns("what | takes [bytes] | time [s]"), [("a", 2**21, 1e-3), ("b", None, 2e-3)])
    panels = plots.picture([sheet], "memory").panels
    assert [panel.unit for panel in panels if isinstance(panel, Bars)] == ["MiB", "ms"]
    assert not _wrong(files.svg(plots.picture([sheet], "memory")))
    with pytest.raises(InputError, match="nothing to draw"):
        plots.picture([Sheet("t", columns("what"), [("a",)])], "memory")


def test_texts_over_each_other_are_noticed() -> None:
    """The check can fail: two labels at one place, a text beyond the edge."""
    over = Diagram((Label(1, 1, "one label"), Label(3, 1, "another")))
    outside = Diagram((Label(60, 1, "a label that is far too long for the page"),))
    assert any(" over " in line for line in _wrong(files.svg(Picture("t", (over,), "s"))))
    assert any("outside" in line for line in _wrong(files.svg(Picture("t", (outside,), "s"))))


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_a_limit_has_its_name_inside_the_picture(share: float) -> None:
    panel = Bars("GiB", (Bar("rank 0", (("weights", 80.0),), "80 GiB"),), (("what a GPU has", 80 * share),))
    drawn = files.svg(Picture("memory", (panel,), "phalanx"))
    assert "what a GPU has" in [words for words, _ in _texts(drawn)[0]]
    assert not [said for said in _wrong(drawn) if "what a GPU has" in said]


def test_labels_make_way_for_each_other() -> None:
    """Points at one place have their labels side by side; what has no room in the plot stands below it."""
    axis = PlotAxis("x", "count", low=0, high=10)
    close = tuple(Mark(5, 5, f"label {i}") for i in range(8))
    panel = Lines(axis, axis, (Series("", ((0, 0), (10, 10))),), close, (RuleLine("x", 5, "here"),))
    assert not _wrong(files.svg(Picture("t", (panel,), "s")))
    many = Lines(
        axis, axis, (Series("", ((0, 0), (10, 10))),), tuple(Mark(5, 5, f"{i} long " * 30) for i in range(9))
    )
    drawn = files.svg(Picture("t", (many,), "s"))
    assert not _wrong(drawn)
    assert "Without room above" in drawn
    assert lines.text(panel)


def test_light_and_dark_differ_by_the_reader_alone() -> None:
    drawn = _svg("roofline")
    assert "prefers-color-scheme:dark" in drawn
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|@import|url\(", drawn)


def test_options_are_those_that_a_picture_takes() -> None:
    assert options_of("moe-layer") == ["--model", "--ranks", "--seq"]
    with pytest.raises(InputError, match="nothing that stack depends on"):
        picture("stack", {"model": "gpt2"})
    with pytest.raises(InputError, match="attention and MLP side by side"):
        picture("sequence-parallel", {"model": "gpt-neox-20b"})
    with pytest.raises(InputError, match="did you mean roofline"):
        picture("roofine")


def test_a_png_needs_chromium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="needs Chromium"):
        files.require_browser(tmp_path / "x.png")
    files.require_browser(tmp_path / "x.svg")


def test_several_pictures_stand_below_each_other() -> None:
    both = files.svgs([_picture("stack"), _picture("roofline")])
    assert files.size(both)[1] == files.size(_svg("stack"))[1] + files.size(_svg("roofline"))[1]
    ElementTree.fromstring(both)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk:0.01", "randk:0.01"])
def test_compression_saves_what_the_program_sends_less(name: str) -> None:
    """The wire bytes of a program's collectives, and those of the same without compression."""
    model, _ = model_named("gpt2")

    def wire(compression: str, ranks: int) -> float:
        layout = Layout(model, Job(ranks, 64), Strategy(dp=ranks, compression=compression))
        times = {"all_reduce": 2, "all_gather": 1, "all_to_all": 1}
        events = [e for e in expand(layout.stage_view()).events if e.kind == "collective" and e.unit != "metrics"]
        return sum(times[e.op] * e.bytes * (ranks - 1) / ranks for e in events)

    c = parse(name)
    assert c is not None
    for ranks in (2, 8):
        assert wire("none", ranks) / wire(name, ranks) == pytest.approx(times_less(c)(ranks), rel=0.02)


def test_an_uplink_of_the_first_tier_is_a_ranks_own() -> None:
    node = cluster_named("dgx-h100")(8)
    tier = replace(node.tiers[0], uplink_bandwidth_bytes_per_s_per_direction=1e9)
    assert _rate(replace(node, tiers=(tier, *node.tiers[1:])), 0) == 1e9


def test_every_event_of_a_step_has_its_time() -> None:
    strategy = Strategy(dp=4, zero=3)
    events = expand(Layout(model_named("llama3-8b")[0], Job(8, 512), strategy).stage_view()).events
    drawn = with_times(events, lambda event: 1.0)
    assert [t.event for t in drawn] == list(events)
    assert {t.end - t.start for t in drawn} == {1.0}


def test_a_sweep_is_drawn_by_strategy_with_the_spread_of_its_steps() -> None:
    runs = tuple(
        SweptRun(Strategy(dp=dp), 2e-3 * dp, 3e-3 * dp, (2.5e-3 * dp, 4e-3 * dp), 2**20, 2**20 + 5, False)
        for dp in (1, 2)
    )
    table = sheet(TrainingSweep(runs, ()), 8)
    for row in table.rows:  # strategy, then predicted, measured and the share by which it is off
        for predicted, measured, off in (row[2:5], row[5:8]):
            assert (1 + off) * measured == pytest.approx(predicted)
    drawn = swept.sweep_picture(runs, table)
    times, sizes = drawn.panels
    assert isinstance(times, Bars)
    assert isinstance(sizes, Bars)
    assert [bar.heading for bar in times.bars] == [str(runs[0].strategy), "", "dp=2", ""]
    measured = times.bars[3]
    assert measured.parts == [("measured, to the first quartile", 5.0), ("to the third quartile", 3.0)]
    assert measured.text == "6.0 ms, half of its steps 5.0 ms to 8.0 ms"
    assert [bar.text for bar in sizes.bars] == ["1.0 MiB"] * 4
    assert ">dp=2<" in report([table], swept.sweep(TrainingSweep(runs, ()), table).pictures())


def test_column_parallel_is_cut_by_columns() -> None:
    """W's parts lie side by side, V's one below the other, in the ranks' colours; both cover the whole width."""
    products = _picture("partition").panels[0]
    assert isinstance(products, Diagram)
    boxes = [item for item in products.items if isinstance(item, Box) and item.lines]
    columns, rows = ([b for b in boxes if b.lines[0].startswith(name)] for name in "WV")
    assert len({box.y for box in columns}) == 1 == len({box.x for box in rows})
    assert [box.colour for box in columns] == [box.colour for box in rows] == [0, 1, 2, 3]
    assert (columns[0].lines[1], columns[-1].lines[-1]) == ("0", "14335")


@pytest.mark.parametrize(("cluster", "ports"), [("dgx-h100", 3), ("pcie-a100", 1)])
def test_two_nodes_are_joined_by_a_network(cluster: str, ports: int) -> None:
    (panel,) = picture("hierarchy", {"cluster": cluster, "gpus": 64}).panels
    assert isinstance(panel, Diagram)
    words = [line for item in panel.items if isinstance(item, Box) for line in item.lines]
    assert sum("port" in word for word in words) == 2 * ports
    assert sum(word.startswith("GPU 0") for word in words) == 2


def test_the_family_is_made_of_its_parts() -> None:
    """Before and after of each operation, and the state between two that make a third."""
    each, made, _ = _picture("collectives-family").panels
    assert isinstance(each, Rounds)
    assert isinstance(made, Rounds)
    after = {a.head.partition(":")[0]: b.cells for a, b in zip(each.rounds[::2], each.rounds[1::2], strict=True)}
    assert after["all_gather"] == [["A", "B", "C"]] * 3
    assert [row[i] for i, row in enumerate(after["reduce_scatter"])] == ["ABC"] * 3
    assert after["all_to_all"] == [["A0", "B0", "C0"], ["A1", "B1", "C1"], ["A2", "B2", "C2"]]
    gathered = next(i for i, state in enumerate(made.rounds) if state.head == "after gather")
    assert made.rounds[gathered].cells[0] == ["A", "B", "C"]
    assert made.rounds[gathered + 1].cells == after["all_gather"]
