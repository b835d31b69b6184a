"""Placements, traces, expenses and the terms of a plan: all ranks are drawn, all spans written, units read back."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.answers import presets
from phalanx.answers.plan import decide, job_plan, with_strategy
from phalanx.planning.expense.expense import Expense
from phalanx.planning.lookup import cluster_named
from phalanx.planning.placement import axis_groups, default_placement
from phalanx.planning.stragglers.timelines import SimulatedRank, SimulatedSpan
from phalanx.planning.tables.table import Sheet
from phalanx.report import expense, mesh, models, plan, read
from phalanx.report.gallery.collectives import _crossing, family
from phalanx.report.gallery.mesh import cube
from phalanx.report.html import plan as page_of_plan
from phalanx.report.measured import runs
from phalanx.report.pictures.figure import Node, Tree
from phalanx.report.simulation import write_trace
from phalanx.schedule.collectives.registry import ALGORITHMS
from phalanx.spec.files import job_file
from phalanx.spec.strategy.spec import Strategy, parse


@pytest.mark.parametrize("width", [34, 50, 80, 200])
@pytest.mark.parametrize(("line", "axis"), [("tp=4,dp=8", "tp"), ("tp=8,pp=2,dp=2", "pp")])
def test_all_ranks_of_a_node_are_drawn_whatever_the_width(line: str, axis: str, width: int) -> None:
    placed = default_placement(Strategy(**parse(line)), cluster_named("dgx-h100")(32))
    lines = mesh.nodes(placed, axis, width).plain.splitlines()
    hosts = [placed.topology.hosts[host] for host, _ in placed.ranks_by_host()]
    of_hosts: list[str] = []
    for text in lines[:-1]:
        if text.strip().startswith(hosts[len(of_hosts)] if len(of_hosts) < len(hosts) else "\0"):
            of_hosts.append("")
            text = text.strip().removeprefix(hosts[len(of_hosts) - 1])
        of_hosts[-1] += re.sub(r"  +[a-z].*", "", text)
    drawn = [list(map(int, re.findall(r"\d+", ranks))) for ranks in of_hosts]
    assert drawn == [list(ranks) for _, ranks in placed.ranks_by_host()]
    assert lines[-1] == f"colours and bars: groups of {axis}"
    if width == 200:
        groups = {rank: i for i, ranks in enumerate(placed.mesh.groups(axis)) for rank in ranks.tolist()}
        for ranks, text in zip(drawn, of_hosts, strict=True):
            changes = sum(groups[a] != groups[b] for a, b in pairwise(ranks))
            assert text.count("|") == changes
    table = [tuple(row)[:3] for row in mesh.axes(placed).rows]
    assert table == [(g.axis, g.size, g.groups) for g in axis_groups(placed)]
    assert all(size * groups == 32 for _, size, groups in table)


@pytest.mark.parametrize("line", ["tp=2", "tp=4,dp=8", "tp=3,dp=2,pp=4", "tp=2,cp=2,dp=3,pp=2", "tp=4,pp=2,dp=16"])
def test_slices_of_a_cube_have_their_ranks_in_columns_as_narrow_as_the_last(line: str) -> None:
    """One blank before the last rank, and each rank ends where the one above it does; nodes are drawn alike."""
    placed = default_placement(Strategy(**parse(line)), cluster_named("dgx-h100")(128))
    (depth, rows, _), ranks = cube(placed)
    *lines, note = mesh.slices(placed)
    heads = [text for text in lines if not text.startswith(" ")]
    assert heads == ([f"{depth} {i}" for i in range(len(ranks))] if depth else [])
    drawn = [text.removeprefix(f"  {rows} ") if rows else text for text in lines if text.startswith(" ")]
    cells = [re.findall(r" *\d+", re.sub(r"^\d+", "", text) if rows else text) for text in drawn]
    assert [list(map(int, own)) for own in cells] == [own.tolist() for plane in ranks for own in plane]
    cell = len(str(placed.world - 1)) + 1
    assert {len(text) for own in cells for text in own[1:]} <= {cell}
    assert note.startswith("columns: ")
    of_nodes = mesh.nodes(placed, "tp", 200).plain.splitlines()[:-1]
    names = [placed.topology.hosts[host] for host, _ in placed.ranks_by_host()]
    widest = max(map(len, names))
    for text, name, (_, own) in zip(of_nodes, names, placed.ranks_by_host(), strict=True):
        first = text[widest + 1 :].replace("|", " ")
        assert text.startswith(name)
        assert first.startswith("".join(f"{rank:>{cell}}" for rank in own.tolist()))


@pytest.mark.parametrize("line", ["tp=3,dp=8", "tp=4,dp=6", "dp=3,tp=2,pp=4", "cp=6,pp=4"])
def test_links_of_an_axis_are_all_named_and_count_its_groups(line: str) -> None:
    placed = default_placement(Strategy(**parse(line)), cluster_named("dgx-h100")(24))
    for shown, row in zip(mesh.axes(placed).rows, axis_groups(placed), strict=True):
        links = str(shown[3])
        counts = [int(n) for n in re.findall(r" \((\d+) groups?\)", links)]
        assert re.sub(r" \([^)]*\)", "", links).split(", ") == list(row.tiers)
        assert counts == ([] if len(row.tiers) == 1 else list(row.tiers.values()))
        assert sum(counts or [row.groups]) == row.groups


@pytest.mark.parametrize(
    ("count", "said"), [(2, "0 1"), (12, " ".join(map(str, range(12)))), (13, "0 1 2 3 4 5 ... 12")]
)
def test_a_long_group_is_shortened(count: int, said: str) -> None:
    assert mesh.rank_list(range(count)) == said


def test_a_trace_has_all_spans_of_all_ranks(tmp_path: Path) -> None:
    spans = (SimulatedSpan("F", False, 0.5, 1.5, 0), SimulatedSpan("rank 1", True, 1.5, 2.0))
    write_trace(
        tmp_path / "t.json", [SimulatedRank(0, 1, spans), SimulatedRank(3, 1200, spans[:1])], Strategy(dp=2, tp=2)
    )
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["otherData"] == {"strategy": "dp=2,tp=2"}
    events = content["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 (dp_replicate 0, tp 0)", "rank 3 (dp_replicate 1, tp 1), 1,200 ranks alike"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {(p, t): name for p in (0, 3) for t, name in enumerate(("works", "waits for"))}
    written = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert written == [
        (0, 0, "F", 5e5, 1e6, {"micro_batch": 0}),
        (0, 1, "rank 1", 1.5e6, 5e5, {}),
        (3, 0, "F", 5e5, 1e6, {"micro_batch": 0}),
    ]


_SCALE = {"kWh": 1.0, "MWh": 1e3, "GWh": 1e6, "kg": 1.0, "t": 1e3}


@given(st.floats(0.01, 1e9))
def test_energy_and_carbon_read_back(amount: float) -> None:
    e = Expense("a million tokens", 1.0, None, amount, amount)
    for text in (expense.energy(e), expense.carbon(e)):
        number, unit, *_ = text.split()
        assert float(number.replace(",", "")) * _SCALE[unit] == pytest.approx(amount, rel=6e-3)
        largest, of = ("GWh", 1e6) if "Wh" in unit else ("t", 1e3)
        value = float(number.replace(",", ""))
        assert (unit == largest) == (amount >= of)
        assert unit == largest or value < 1000.5
        assert value >= 1 or unit in ("kWh", "kg")
    nothing = Expense("a million tokens", 1.0, None, None, None)
    assert (expense.energy(nothing), expense.carbon(nothing)) == ("", "")


@given(st.floats(1e-6, 1e-3), st.floats(1.01, 100), st.floats(1.01, 100))
def test_curves_meet_where_they_are_equal(start: float, ahead: float, behind: float) -> None:
    """Between two sizes, as lines on logarithmic axes."""
    low, high = 2.0**10, 2.0**20
    one, other = [(low, start), (high, 8 * start * behind)], [(low, start * ahead), (high, 8 * start)]
    at = _crossing(one, other, low, high)
    share = math.log(at / low) / math.log(high / low)
    there = [a[1] * (b[1] / a[1]) ** share for a, b in (one, other)]
    assert low < at < high
    assert there[0] == pytest.approx(there[1])
    assert _crossing(one, other[1:], low, high) == high


def test_the_largest_terms_of_a_plan_are_named_with_their_shares() -> None:
    """Six at most, the largest first, and none of half a hundredth or less."""
    terms = {"a": 0.4, "b": 0.3, "c": 0.1, "d": 0.0051, "e": 0.0049, "f": 0.18}
    answer: Any = SimpleNamespace(best=SimpleNamespace(terms_s=terms, step_time_s=1.0))
    assert list(plan._largest(answer)) == ["a 40%", "b 30%", "f 18%", "c 10%", "d 1%"]
    answer.best.terms_s = {str(i): 0.1 for i in range(10)}
    assert len(list(plan._largest(answer))) == 6


def test_the_family_has_each_algorithm_of_each_collective_once() -> None:
    trees = [panel for panel in family().panels if isinstance(panel, Tree)]
    nodes: dict[str, Node] = {}

    def walk(node: Node) -> None:
        nodes.update({node.text.partition(" (")[0]: node} if node.text.partition(" (")[0] in ALGORITHMS else {})
        for below in node.below:
            walk(below)

    for tree in trees:
        walk(tree.root)
    assert nodes
    for op, node in nodes.items():
        named: Counter[str] = Counter()
        for leaf in node.below:
            first, made, _ = leaf.text.partition(" = ")
            own = [first] if made else leaf.text.removeprefix("by its own rounds: ").split(", ")
            named.update(own)
        assert named == Counter(ALGORITHMS[op])


@pytest.mark.parametrize(
    ("equal", "said"),
    [
        (None, "equal ones do not fit"),
        (2.0, "as equal as whole blocks allow"),
        (2.1, "equal ones take 2.10 s, 5.0% more"),
    ],
)
def test_uneven_chunks_are_held_against_equal_ones(equal: float | None, said: str) -> None:
    chunks = SimpleNamespace(equal_step_time_s=equal)
    answer: Any = SimpleNamespace(best=SimpleNamespace(step_time_s=2.0), chunks=chunks)
    assert plan._equal_chunks(answer) == said


@pytest.mark.parametrize("lost", [0, 1, 3, 5])
def test_a_plan_in_a_paragraph_names_three_of_what_is_lost(lost: int) -> None:
    """The largest first, each sentence with its full stop; shares and rates are of the step."""
    terms = {"matmul": 1.0} | {f"loss {i}": 0.1 * (i + 1) for i in range(lost)} | {"tiny": 1e-4}
    step = sum(terms.values())
    priced = SimpleNamespace(terms=terms, bytes_=2.0**30)
    answer: Any = SimpleNamespace(
        best=SimpleNamespace(strategy=Strategy(dp=2)),
        to_run=SimpleNamespace(priced=priced, seconds=step, mfu=0.5),
        pricing=SimpleNamespace(
            job=SimpleNamespace(global_batch=8, seq=100),
            profile=SimpleNamespace(name="a stack"),
            cluster=SimpleNamespace(device=SimpleNamespace(usable_bytes=2.0**31)),
        ),
    )
    said = page_of_plan._in_a_paragraph(answer)
    assert said.startswith(f"Run it as dp=2 under a stack: {800 / step:,.0f} tokens/s, {400 / step:,.0f} a GPU")
    assert "A step of 8 sequences takes" in said
    assert "holds 1.0 GiB of 2.0 GiB" in said
    assert f"{1 / step:.1%} of the step computes" in said
    assert said.endswith(".")
    assert not said.endswith("..")
    assert re.findall(r"to loss (\d)", said) == [str(i) for i in reversed(range(lost))][:3]
    assert ("and to less than that" in said) == (lost > 3)


@pytest.mark.parametrize(
    ("step", "memory", "fits", "said"),
    [
        (0.9, 2**30, True, "-10.0%\n+0 B"),
        (1.05, 2**29, True, "+5.0%\n-512.0 MiB"),
        (1.0, 3 * 2**30, False, "+0.0%\n+2.0 GiB\ndoes not fit"),
    ],
)
def test_a_change_is_shown_against_what_runs_now(step: float, memory: int, fits: bool, said: str) -> None:
    now: Any = SimpleNamespace(step_time_s=1.0, memory_bytes=2**30)
    other: Any = SimpleNamespace(step_time_s=step, memory_bytes=memory, fits=fits)
    assert read._difference(now, other) == said


@pytest.mark.parametrize("experts", [4, 4096])
def test_loads_of_experts_are_drawn_where_there_is_room(experts: int) -> None:
    """With a column of bars and its explanation, or neither; what was dropped has a row."""
    chosen = {0: [1] * experts, 2: [1] * (experts - 1) + [3]}
    part: Any = SimpleNamespace(chosen=chosen, busiest={0: 1.0, 2: 2.5}, dropped=0.125, first_step=1, last_step=9)
    sheet = runs.balance([part, part])
    bars = experts < 100
    assert [row[:3] for row in sheet.rows] == [
        ("block 0", "1.00", "1.00"),
        ("block 2", "2.50", "2.50"),
        ("dropped", "12.5%", "12.5%"),
    ]
    assert {len(row) for row in sheet.rows} == {len(sheet.columns)} == {3 + bars}
    assert ("a bar per expert" in sheet.note) == bars


@pytest.mark.parametrize("line", ["dp=8", "pp=4", "pp=2,virtual=2,schedule=interleaved"])
def test_chunks_of_a_job_are_led_by_the_imbalance_of_their_ranks(tmp_path: Path, line: str) -> None:
    """The slowest rank's seconds, which are said, over the mean of all ranks'; without a pipeline there are none."""
    preset = 'model.preset = "gpt2"\ncluster = { preset = "dgx-h100", nodes = 1 }\n'
    (tmp_path / "job.toml").write_text(f"{preset}job = {{ global_batch = 8, seq = 512 }}\n")
    file = with_strategy(job_file.load(tmp_path / "job.toml", ()), f"{line},micro_batch=1")
    shown = plan.job_plan(job_plan(decide(file)))
    led = [(str(part), sheet) for part, sheet in pairwise(shown.parts) if str(part).startswith("chunks: ")]
    assert len(led) == (line != "dp=8")
    for words, sheet in led:
        assert isinstance(sheet, Sheet)
        of_ranks: dict[int, float] = {}
        for row in sheet.records():
            of_ranks[row["rank"]] = of_ranks.get(row["rank"], 0.0) + row["micro_batch_s"]
        slowest, mean = max(of_ranks.values()), sum(of_ranks.values()) / len(of_ranks)
        said = re.fullmatch(r"chunks: the slowest rank computes ([\d.]+) ms .*; imbalance ([\d.]+)%", words)
        assert said is not None
        assert float(said[1]) == pytest.approx(1e3 * slowest, rel=6e-3)
        assert float(said[2]) == pytest.approx(100 * (slowest / mean - 1), abs=0.051)


@pytest.mark.parametrize("groups", [(), ((4, 1),), ((4, 1), (8, 2), (4, 1))])
def test_collectives_that_were_chosen_are_listed_by_group_or_it_is_said_that_none_was(
    groups: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.report.collectives.choices", lambda decided: [f"{len(decided)} sizes"])
    decided = [SimpleNamespace(op="all_reduce", group_size=ranks, hosts=hosts) for ranks, hosts in groups]
    lines = list(plan._collectives(SimpleNamespace(plan=SimpleNamespace(collectives=decided))))  # type: ignore[arg-type]
    if groups:
        several = ["all_reduce over 8 ranks on 2 hosts", "  1 sizes"] if len(groups) > 1 else []
        assert lines == ["all_reduce over 4 ranks", f"  {groups.count((4, 1))} sizes", *several]
    else:
        assert lines == ["collectives: torch.distributed's; no other was measured on this cluster"]


@pytest.mark.parametrize("step", [0.05, 20.0])
def test_of_a_steps_terms_those_that_are_a_percent_are_said_the_largest_first(step: float) -> None:
    """However long the step is; what rounds to 0 % is left out."""
    shares = {"matmul": 0.5, "tp": 0.3, "launch": 0.1, "head": 0.006, "dp": 0.004}
    best = SimpleNamespace(step_time_s=step, terms_s={name: share * step for name, share in shares.items()})
    said = [line.rpartition(" ")[2] for line in plan._largest(SimpleNamespace(best=best))]  # type: ignore[arg-type]
    assert said == ["50%", "30%", "10%", "1%"]


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"])
def test_what_experts_give_is_against_the_model_with_one_expert_a_layer(name: str) -> None:
    """Which has the parameters that the shape of one expert says; its router's, a thousandth, are left aside."""
    shape = presets.model(name)
    experts = shape.model.experts
    assert experts is not None
    (line,) = models._efficiency(shape)
    single = replace(shape.model, experts=replace(experts, count=1, top_k=1, groups=1, top_groups=1))
    more, flops = map(float, re.findall(r"([0-9.]+) times the (?:parameters for|FLOPs a token)", line))
    assert more == pytest.approx(shape.model.parameter_count / single.parameter_count, rel=0.02)
    assert flops == pytest.approx(shape.model.active_count / single.parameter_count, rel=0.02)
    assert line.startswith(f"experts: {experts.count} times one expert's parameters for {experts.top_k} times its")
