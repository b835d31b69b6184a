"""What the textbook's pictures say in words is what they draw, and their options are refused alike."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.in_process_cli import phalanx

from phalanx.cost.analytic.step import TERM_NAMES
from phalanx.planning.lookup import model_named
from phalanx.report.pictures.figure import Arrow, Bars, Box, Diagram, Label, Lane, Lines, Timeline
from phalanx.report.pictures.files import text
from phalanx.spec.errors import InputError
from phalanx.textbook import exam
from phalanx.textbook.answers import PICTURES, options_of, picture
from phalanx.textbook.case_studies import CaseResult, _row, _savings
from phalanx.textbook.gallery import layers
from phalanx.textbook.gallery.data_parallel import _BLOCKS
from phalanx.textbook.gallery.growth import RELEASES, Release
from phalanx.textbook.gallery.stale_pipelines import largest_rate


@pytest.mark.parametrize("option", ["gpus", "batch", "seq", "ranks"])
def test_a_picture_of_nothing_is_refused_by_name(option: str) -> None:
    names = [name for name in PICTURES if f"--{option}" in options_of(name)]
    assert names
    for name in names:
        for value in (0, -1):
            given: dict[str, str | int] = {option: value}
            given |= {"model": "gpt2"} if name == "decision-tree" else {}
            with pytest.raises(InputError) as refused:
                picture(name, given)
            assert refused.value.field == option, name


@pytest.mark.parametrize("name", ["hierarchy", "switches"])
def test_links_are_drawn_of_whole_nodes_from_two_gpus_on(name: str) -> None:
    assert picture(name, {"gpus": 2}) == picture(name, {"gpus": 8})
    with pytest.raises(InputError, match="gpus = 1: has no links to draw"):
        picture(name, {"gpus": 1})


def _waiting_ms(panel: Timeline) -> float:
    """Return the milliseconds without compute: of the whole step, which ends with its last block."""
    lanes: dict[str, Lane] = {lane.name: lane for lane in panel.lanes}
    end = max(block.end for lane in panel.lanes for block in lane.blocks)
    return end - sum(block.end - block.start for block in lanes["compute"].blocks)


@pytest.mark.parametrize("name", ["data-parallel-step", "fsdp", "prefetch"])
def test_a_step_waits_as_long_as_its_heading_says(name: str) -> None:
    drawn = picture(name, {"model": "gpt2", "gpus": 8})
    waits = []
    for panel in drawn.panels:
        if isinstance(panel, Timeline):
            said = re.search(r"waits ([\d.e+]+) ms|([\d.e+]+) ms wait", panel.head)
            assert said is not None
            waits.append(float(said[1] or said[2]))
            metrics = waits[-1] - _waiting_ms(panel)  # whose sum is not drawn
            assert 0 < metrics < 0.03
    if (share := re.search(r"(\d+)%", drawn.note)) is not None:
        better, worse = sorted(waits)
        assert 1 - better / worse == pytest.approx(int(share[1]) / 100, abs=0.011)


def test_fsdp_gathers_every_unit_twice_and_holds_two_units_at_most() -> None:
    """Until the step ends with nothing gathered; all parameters together are two bytes each."""
    timeline, curve = picture("fsdp", {"model": "llama3-8b"}).panels
    assert isinstance(timeline, Timeline)
    assert isinstance(curve, Lines)
    gathers = [b for lane in timeline.lanes for b in lane.blocks if b.kind.startswith("all-gather")]
    blocks = [b.label for b in gathers if b.label.isdigit()]
    assert sorted(blocks) == sorted([str(i) for i in range(_BLOCKS)] * 2)
    held, whole = curve.series
    sent = re.search(r"([\d.]+) times what DDP sends here", picture("fsdp", {"model": "llama3-8b"}).note)
    assert sent is not None
    assert 1.2 < float(sent[1]) < 1.5
    everything = 2 * replace(model_named("llama3-8b")[0], layers=_BLOCKS).parameter_count / 2**30
    assert [y for _, y in whole.points] == pytest.approx([everything] * 2, rel=1e-6)
    assert held.points[0][0] == 0
    assert all(0 <= y < everything / 2 for _, y in held.points)
    assert held.points[-1][1] == 0  # whole bytes: nothing is rounded
    assert {round(b.start, 6) for b in gathers} <= {round(x, 6) for x, _ in held.points}


def test_the_stack_names_commands_that_exist(tmp_path: Path) -> None:
    (panel,) = picture("stack").panels
    assert isinstance(panel, Diagram)
    boxes = [item for item in panel.items if isinstance(item, Box)]
    rows = {item.y for item in boxes}
    said = [item for item in panel.items if isinstance(item, Label) and not item.strong]
    assert len(rows) == len(said) == len(boxes) / 2 > 5
    commands = "\n".join(phalanx(tmp_path, *words, "--help")[1] for words in ((), ("tables",), ("runs",)))
    for word in (word for label in said for word in label.text.split(", ")):
        assert re.search(rf"^\W*{word} ", commands, re.MULTILINE), word


def test_the_largest_model_is_drawn_near_the_end_of_its_axis() -> None:
    panel = picture("growth").panels[0]
    assert isinstance(panel, Lines)
    assert panel.y.high is not None
    largest = max(release.parameters for release in RELEASES)
    assert largest <= panel.y.high <= 10 * largest
    assert [(m.label, m.y) for m in panel.marks] == [(r.name, r.parameters) for r in RELEASES]


def test_questions_and_answers_of_an_exam_have_the_same_numbers(tmp_path: Path) -> None:
    """From 1, in their order."""
    file = tmp_path / "exam.toml"
    file.write_text('students = ["Ada", "Grace"]\n[mix]\nring = 2\n"level 4" = 2\n')
    given = exam.read(file)
    asked = json.loads(phalanx(tmp_path, "learn quiz --set exam.toml --student Grace --json")[1])
    questions = re.findall(r"^(\d+)\. (.*)$", exam.sheet(given, "Grace"), re.MULTILINE)
    assert questions == [(str(i), e["question"]) for i, e in enumerate(asked, 1)]
    of_grace = exam.answers(given).partition("## Grace\n")[2]
    assert re.findall(r"^(\d+)\. (.*)$", of_grace, re.MULTILINE) == [
        (str(i), e["answer"]) for i, e in enumerate(asked, 1)
    ]
    assert exam.answers(given).startswith("# exam: answers\n")
    printed = phalanx(tmp_path, "learn quiz --answers --level 4")[1]
    assert [n for n, _ in re.findall(r"^(\d+)\. (.*)$", printed, re.MULTILINE)] == [str(n) for n in range(1, 21)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipelines_ends_hold_the_ends_of_the_model(ranks: int) -> None:
    (panel,) = picture("stages", {"ranks": ranks}).panels
    assert isinstance(panel, Diagram)
    stages = [item.lines for item in panel.items if isinstance(item, Box)]
    assert ["embedding" in lines for lines in stages] == [r == 0 for r in range(ranks)]
    assert ["head, loss" in lines for lines in stages] == [r == ranks - 1 for r in range(ranks)]


def test_a_layer_of_experts_lists_its_exchanges() -> None:
    """Counts, rows and results, of which the two larger ones are as large; its ranks hold each expert once."""
    (panel,) = picture("moe-layer").panels
    assert isinstance(panel, Diagram)
    titles = [item.lines[0] for item in panel.items if isinstance(item, Box) and item.lines[0].startswith("experts")]
    assert [list(map(int, re.findall(r"\d+", title))) for title in titles] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    said = [item.text for item in panel.items if isinstance(item, Label) and item.text.startswith("all-to-all")]
    assert [line.partition(", ")[2].partition(":")[0] for line in said] == [
        "counts",
        "rows to their experts",
        "results back",
    ]
    sizes = [re.search(r": (.*?) of a rank", line)[1] for line in said]  # type: ignore[index]
    assert sizes[1] == sizes[2] != sizes[0]


def test_a_day_is_its_year_and_the_days_before_it() -> None:
    for day, year in ((date(2020, 1, 1), 2020.0), (date(2021, 7, 2), 2021 + 182 / 365.25)):
        assert Release("a", day).year == pytest.approx(year, abs=1e-9)


def test_a_flush_bears_the_larger_learning_rate() -> None:
    panel = picture("staleness").panels[1]
    assert isinstance(panel, Lines)
    curves = {s.name: s.points for s in panel.series}
    for (p, flushed), (q, stale) in zip(curves["with a flush"], curves["no flush"], strict=True):
        assert p == q
        assert (flushed, stale) == (largest_rate(int(p), True), largest_rate(int(p), False))
        assert flushed > stale


def test_an_arrow_between_stages_is_two_bytes_a_number() -> None:
    said = re.search(r"micro-batch, ([\d, x]+) in bf16: (\d+) MiB", picture("stages", {"seq": 4096}).note)
    assert said is not None
    assert prod(int(n.replace(",", "")) for n in said[1].split(" x ")) * 2 == int(said[2]) * 2**20


def test_what_compression_saves_is_said_as_it_is_drawn() -> None:
    drawn = picture("compression")
    (panel,) = drawn.panels
    assert isinstance(panel, Lines)
    at = {s.name: dict(s.points) for s in panel.series}
    said = re.search(
        r"saves ([\d.]+) times at 2 ranks and ([\d.]+) at 64 \(([\d.]+) and ([\d.]+) with places", drawn.note
    )
    assert said is not None
    wide = next(points for name, points in at.items() if name.startswith("topk:0.01, places"))
    shown = [at["topk:0.01"][2], at["topk:0.01"][64], wide[2], wide[64]]
    assert [float(n) for n in said.groups()] == pytest.approx(shown, rel=6e-3)
    low = re.search(r"(\d+) times less at rank 4, (\d+) at rank 32", drawn.note)
    assert low is not None
    assert [int(n) for n in low.groups()] == [round(at[f"powersgd:{rank}"][8]) for rank in (4, 32)]


def test_pieces_of_a_job_take_as_many_times_as_long_as_their_bars() -> None:
    drawn = picture("fragmentation")
    (bars,) = (panel for panel in drawn.panels if isinstance(panel, Bars))
    seconds = [bar.parts[0][1] for bar in bars.bars]
    said = re.search(r"takes ([\d.]+) times as long", drawn.note)
    assert said is not None
    assert float(said[1]) == pytest.approx(seconds[-1] / seconds[0], rel=6e-3)
    assert [bar.text for bar in bars.bars] == [f"{s:.3g} s" for s in seconds]
    assert seconds == sorted(seconds)


def test_what_papers_alone_say_of_a_model_is_grey() -> None:
    panel = picture("growth").panels[0]
    assert isinstance(panel, Lines)
    assert {(m.label, m.colour == 7) for m in panel.marks} == {(r.name, not r.preset) for r in RELEASES}


@pytest.mark.parametrize(
    ("name", "end", "each"), [("partition", "sum", 4), ("data-parallelism", "the same update", 6)]
)
def test_arrows_reach_each_ranks_boxes_in_the_middle(name: str, end: str, each: int) -> None:
    """From what is cut to what is joined, without a gap: as many of each rank."""
    panels = [panel for panel in picture(name).panels if isinstance(panel, Diagram)]
    items = [item for panel in panels[-1:] for item in panel.items]
    boxes = [item for item in items if isinstance(item, Box)]
    arrows = [item for item in items if isinstance(item, Arrow)]
    own = [b for b in boxes if b.colour is not None]
    assert any(b.lines == (end,) for b in boxes)
    ranks = len({b.colour for b in own})
    assert len(arrows) % (ranks * each) == 0
    assert arrows
    for arrow in arrows:
        (x0, y0), (x1, y1) = arrow.points
        beside = [b for b in own if b.y + 1 == y0 == y1 or b.x + b.w // 2 == x0 == x1]
        assert beside, arrow


def test_a_choice_is_explained_by_the_two_terms_that_it_saves_most_on() -> None:
    """Of half a hundredth of the step or more, as shares of the step that was used."""
    used: Any = SimpleNamespace(fits=True, seconds=10.0, terms={"matmul": 5.0, "tp": 3.0, "dp": 1.5, "bubble": 0.5})
    chosen: Any = SimpleNamespace(terms={"matmul": 5.5, "tp": 1.0, "dp": 0.5, "bubble": 0.48})
    tp, dp = (TERM_NAMES[name] for name in ("tp", "dp"))
    assert _savings(used, chosen, None) == f"{tp} 20% less, {dp} 10% less"  # type: ignore[arg-type]
    chosen.terms["tp"], chosen.terms["dp"] = 2.96, 1.6
    assert _savings(used, chosen, None) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("levels", ("pp 0", "pp 1", "dp 0", "dp 1", "one colour: the same part", "ep: ranks 0 and 1")),
        ("hsdp", ("node 0", "node 3", "dp_shard: 4 groups of 8", "dp_replicate: 8 groups of 4", "all hold shard s0")),
        ("partition", ("column-parallel", "row-parallel", "one all-reduce forward")),
        ("sequence-parallel", ("gather", "scatter", "all-gather of tokens", "MiB, as nccl-tests counts")),
        ("moe-layer", ("dispatch", "combine", "router", "weighted sum")),
        ("routing", ("dropped",)),
        ("stages", ("stage 0", "stage 3", "embedding", "head, loss", "forward: activations", "backward: gradients")),
        ("data-parallelism", ("a batch of", "copy of the model", "all-reduce: the mean", "the same update")),
    ],
)
def test_a_picture_says_what_its_parts_are(name: str, words: tuple[str, ...]) -> None:
    said = " ".join("\n".join(text(picture(name))).split())
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize("fits", [True, False])
def test_a_case_costs_its_step_over_the_chosen_one(fits: bool) -> None:
    case: Any = SimpleNamespace(name="c", model="m", gpus=8, cluster="k", batch=4, seq=1024, used="dp=8")
    used, chosen = SimpleNamespace(fits=fits), SimpleNamespace(strategy="tp=8")
    row = _row(CaseResult(case, used, 3.0, chosen, 2.0, "why"))  # type: ignore[arg-type]
    assert row == (
        *("c", "m, 8 of k, 4 x 1,024", "dp=8", 3.0 if fits else None, "tp=8", 2.0),
        *(pytest.approx(0.5) if fits else None, "why"),
    )
    none = _row(CaseResult(case, used, 3.0, None, None, "why"))  # type: ignore[arg-type]
    assert none[3:] == (3.0, "none", None, None, "why")


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v2", "deepseek-v3"])
def test_models_with_other_matrices_are_not_cut(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="has other matrices than this picture"):
        picture("partition", {"model": model})
    dense = replace(model_named("deepseek-v3")[0], experts=None)
    monkeypatch.setattr(layers, "model_named", lambda name: (dense, ""))  # latent attention alone
    with pytest.raises(InputError, match="has other matrices"):
        picture("partition")


def test_each_way_to_be_in_pieces_has_the_same_number_of_gpus() -> None:
    """Of eight nodes of eight, 16: in two nodes, in four and in eight."""
    (panel,) = (p for p in picture("fragmentation").panels if isinstance(p, Diagram))
    boxes = [item for item in panel.items if isinstance(item, Box)]
    for case, nodes in enumerate((2, 4, 8)):
        own = [b for b in boxes if 27 * case <= b.x < 27 * case + 24]
        taken = [b for b in own if b.lines == ("x",)]
        assert (len(own), len(taken), len({b.y for b in taken})) == (64, 16, nodes)
        assert all((b.colour is None) != (b in taken) for b in own)
