"""Views of what was measured: each figure of an answer stands in its row, rows add up to the whole, words follow
the numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fuzz import listings
from support.in_process_cli import json_of, phalanx, text_of

from phalanx.answers.diagnose.diagnosis import Diagnosis, LinkGap, NamedGap, PartGap
from phalanx.answers.diagnose.flop_rate import FlopRate, PublishedRates
from phalanx.answers.observed import ObservedFlow, ObservedPrice, ObservedStep, PlanDifference, PlanDifferences
from phalanx.planning.explain.observed_lint import lint
from phalanx.planning.tables.table import Sheet
from phalanx.report import observation
from phalanx.report.measured import run_page
from phalanx.report.measured.diagnosis import view
from phalanx.report.pictures.figure import Lines, Timeline
from phalanx.report.style import cell_text, seconds, size
from phalanx.report.validate import collectives, families, overall, worst_sweeps
from phalanx.report.view import View
from phalanx.schedule.observation import Allocation, Observation, RankObservation
from phalanx.schedule.observation_file import from_json
from phalanx.spec.strategy.spec import Strategy
from phalanx.traces.memory_snapshot import MemoryUse
from phalanx.traces.nccl import InspectedCollective

DIAGNOSIS = Diagnosis(
    about="a run",
    step_s=2.0,
    planned_s=1.6,
    parts=(
        PartGap(
            "products",
            1.0,
            1.5,
        ),
        PartGap("over dp", 0.6, 0.5),
        PartGap("loading", None, None),
    ),
    findings=(NamedGap("slow rank", 0.5, "rank 3 is slow.", "look at it", 1.5), NamedGap("b", 0.1, "w", "r", 1.9)),
    rate=FlopRate(400.0, 500.0, 0.4, 0.5, PublishedRates(7, 0.3, 0.35, 0.38), 450.0, "recomputation too"),
    rank=3,
    ranks=4,
    used=("a.json: a trace",),
    further="a further change",
    links=tuple(
        LinkGap(InspectedCollective(op, 8, 2, 2**20, 5, 3e-3), planned)
        for op, planned in (("all_reduce", 1.5e-3), ("all_gather", None))
    ),
    memory=(MemoryUse("s.pickle", 1 * 2**30, 2 * 2**30, 3 * 2**30, 4 * 2**30, 0, (("train.py:3", 2**29),)),),
    planned_bytes=5 * 2**30,
    cautions=("a caution",),
)


def _rows(shown: View, title: str) -> list[dict[str, Any]]:
    """Return the rows of a table, by the names of its columns."""
    (sheet,) = (s for s in shown.sheets if s.title.startswith(title))
    return _named(sheet)


def _named(sheet: Sheet) -> list[dict[str, Any]]:
    assert all(len(row) == len(sheet.columns) for row in sheet.rows)
    assert all(
        isinstance(cell_text(v, c.unit), str) for row in sheet.rows for v, c in zip(row, sheet.columns, strict=True)
    )
    return [dict(zip((c.name for c in sheet.columns), row, strict=True)) for row in sheet.rows]


def _lines(shown: View) -> str:
    return "\n".join(part for part in shown.parts if isinstance(part, str))


def test_a_diagnosis_shows_each_part_with_its_gap() -> None:
    shown = view(DIAGNOSIS)
    said = _lines(shown)
    assert "a run: a step takes 2 s, 1.6 s planned: +0.4 s, +25% of the plan" in said
    assert [tuple(row.values()) for row in _rows(shown, "where a step goes")] == [
        ("products", 1.0, 1.5, 0.5, 0.25),
        ("over dp", 0.6, 0.5, pytest.approx(-0.1), pytest.approx(-0.05)),
        ("loading", None, None, None, 0.0),
    ]
    assert "1. slow rank: 0.5 s (25%). rank 3 is slow.\n   look at it; without it a step takes 1.5 s" in said
    assert "2. b: 0.1 s (5%). w\n   r; without it a step takes 1.9 s" in said
    assert said.index("1. slow") < said.index("a further change") < said.index("a caution") < said.index("a.json")
    assert "of rank 3, of 4 with a trace; over: communication" in shown.sheets[0].note
    alone = view(replace(DIAGNOSIS, planned_s=None, parts=(PartGap("products", None, 1.5),), rank=None, ranks=0))
    assert [tuple(row.values()) for row in _rows(alone, "where a step goes")] == [("products", 1.5, 0.75)]
    assert "a step of 2 s; it has no plan" in _lines(alone)
    assert alone.sheets[0].note == ""


def test_a_diagnosis_shows_links_and_memory_against_the_plan() -> None:
    shown = view(DIAGNOSIS)
    reduced, gathered = _rows(shown, "collectives as NCCL timed them")
    assert tuple(reduced.values()) == ("all_reduce", 8, 2, 2**20, 5, 3e-3, 1.5e-3, pytest.approx(1.0))
    assert tuple(gathered.values())[-2:] == (None, None)
    (held,) = _rows(shown, "memory")
    assert list(held.values()) == ["s.pickle", *(n * 2**30 for n in (1, 2, 3, 4))]
    assert shown.sheets[-1].note == "planned: 5.0 GiB reserved on the fullest rank; held by train.py:3: 512.0 MiB"
    nothing = view(replace(DIAGNOSIS, links=(), memory=(), step_s=None))
    assert nothing.sheets == []


def test_a_diagnosis_says_whether_a_rate_is_normal() -> None:
    said = _lines(view(DIAGNOSIS))
    assert "400 TFLOP/s per GPU, 40.0% MFU; planned: 500, 50.0%" in said
    assert "above 30% to 38% MFU, of 7 published runs" in said
    assert "the 450 TFLOP/s stated count recomputation too" in said
    assert DIAGNOSIS.rate is not None
    for mfu, place in ((0.29, "below"), (0.3, "within"), (0.38, "within")):
        assert f"{place} 30% to 38%" in _lines(view(replace(DIAGNOSIS, rate=replace(DIAGNOSIS.rate, mfu=mfu))))


def test_a_diagnosis_without_a_cause_says_so() -> None:
    said = _lines(view(replace(DIAGNOSIS, findings=())))
    assert "nothing takes longer than planned by more than 2 %" in said
    assert "give a trace" in _lines(view(replace(DIAGNOSIS, findings=(), ranks=0)))
    assert "give a trace" not in _lines(view(replace(DIAGNOSIS, planned_s=None, ranks=0)))


@pytest.fixture
def observed() -> Observation:
    return from_json(json.dumps(listings.observation()))


def _of(o: Observation, **changes: Any) -> tuple[RankObservation, View]:
    r = replace(o.ranks[0], **changes)
    return r, observation.observation(replace(o, ranks=(r,)))


def test_an_observation_shows_all_events_flops_and_bytes(observed: Observation) -> None:
    """Alike ones together: counts, FLOPs and bytes of its tables are those of the rank."""
    r, shown = _of(observed)
    rows = _rows(shown, "collectives")
    assert sum(row["count"] for row in rows) == len(r.communication) == 3
    sent = sum(o.event.bytes for o in r.communication)
    assert sum(row["count"] * row["bytes each"] for row in rows) == sent
    assert {row["over"] for row in rows} == {"dp (8)", "pp (2)"}
    assert {row["where"] for row in rows} == {str(o.site) for o in r.communication}
    *units, everything = _rows(shown, "FLOPs of a step")
    for phase, name in (("F", "forward"), ("B", "backward")):
        total = sum(n for (p, _), n in r.flops.items() if p == phase)
        assert everything[name] == sum(row[name] for row in units) == total
    held = _rows(shown, "live bytes")
    assert sum(row["held by"] != "" and row["bytes"] for row in held) == sum(h.bytes for h in r.holders)
    assert [row["call"] for row in _rows(shown, "the host waits")] == [s.call for s in r.synchronisations]
    (title,) = (s.title for s in shown.sheets if s.title.startswith("live bytes"))
    assert title == "live bytes: peak 1.0 GiB (1,073,741,824 B) in the backward pass of blocks.0"


@pytest.mark.parametrize(("count", "said"), [(1, "1 micro-batch, AdamW"), (2, "2 micro-batches, AdamW")])
def test_an_observed_rank_is_introduced(observed: Observation, count: int, said: str) -> None:
    _, shown = _of(observed, micro_batches=count)
    lines = _lines(shown)
    assert lines.startswith("train.py: 8 ranks (dp 8), torch 2.13, device cuda\n\nrank 0 (all ranks), step 2: ")
    assert said in lines
    assert "no optimizer" in _lines(_of(observed, optimizers=())[1])
    assert "(one rank)" in _lines(_of(observed, are="")[1])
    assert ": 8 ranks, torch" in _lines(observation.observation(replace(observed, axes={})))


def test_tables_of_an_observation_end_where_the_json_goes_on(observed: Observation) -> None:
    site, one = observed.ranks[0].communication[0].site, observed.ranks[0].communication[0]
    many = tuple(replace(one, event=replace(one.event, bytes=i + 1)) for i in range(45))
    _, shown = _of(observed, events=many)
    (sheet,) = (s for s in shown.sheets if s.title.startswith("collectives"))
    assert (len(sheet.rows), sheet.note) == (40, "5 more rows in --json")
    _, shown = _of(observed, events=many[:40])
    assert [s.note for s in shown.sheets if s.title.startswith("collectives")] == [""]
    page = observation.observation_page(replace(observed, ranks=(replace(observed.ranks[0], events=many),)))
    assert page.count(f"<td>{site}</td>") >= 45
    _, shown = _of(observed, events=(), synchronisations=(), flops={})
    assert [s.title.partition(":")[0] for s in shown.sheets] == ["live bytes"]


def test_what_holds_memory_is_shown_largest_first_and_adds_up(observed: Observation) -> None:
    """Allocations of a hundredth of the peak or more, and the rest of their kind; by kind and unit they add up."""
    r = observed.ranks[0]
    site, kind = r.communication[0].site, r.holders[0].kind
    made = {
        "site": site,
        "units": ("blocks.0",),
        "saved_for": ("mm",),
        "backward_bytes": 0,
        "kind": kind,
        "model": "",
        "count": 1,
    }
    fields = {name for name in Allocation.__dataclass_fields__}
    large, small = (
        Allocation(**{k: v for k, v in (made | {"operation": "mm", "peak_bytes": n}).items() if k in fields})
        for n in (2**28, 2**20)
    )
    rows = observation.memory_rows(replace(r, allocations=(large, small)))
    shown = [(row.kind, row.peak_bytes) for row in rows if row.peak_bytes]
    assert shown == [(kind, 2**28), (f"rest of {kind}", 2**29 - 2**28)]
    assert rows[0].made_by == f"mm at {site}; kept for the backward of mm"
    assert sum(row.peak_bytes for row in rows) == sum(h.bytes for h in r.holders)
    most = [max(row.peak_bytes, row.backward_bytes) for row in rows]
    assert most == sorted(most, reverse=True)


def test_the_page_of_an_observation_has_its_totals(observed: Observation) -> None:
    page = observation.observation_page(observed)
    assert all(escape(observation.finding(f)) in page for f in lint(observed))
    assert bool(lint(observed)) != ("Nothing was found." in page)
    sound = replace(observed, ranks=(replace(observed.ranks[0], synchronisations=(), kept=(), events=()),))
    assert ("Nothing was found." in observation.observation_page(sound)) == (not lint(sound))
    cells = re.findall(r"<td>(forward|backward)</td><td[^>]*>([\d,]+)</td>", page)
    assert {(d, int(n.replace(",", ""))) for d, n in cells} == {("forward", 10**12), ("backward", 2 * 10**12)}
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    charts = {chart["unit"]: chart for chart in data["charts"]}
    flops, held = charts["TFLOP"], charts["MiB"]
    assert dict(flops["bars"][0]["parts"]) == {"forward": 1.0, "backward": 2.0}
    assert flops["bars"][0]["text"] == "3"
    assert held["bars"][0]["text"] == "512.0 MiB"
    assert [n for _, n in held["bars"][0]["parts"]] == [512.0]


def test_the_price_of_an_observation_is_shown_rank_by_rank() -> None:
    flows = tuple(ObservedFlow(**_flow(i)) for i in range(2))
    step = ObservedStep(3, 10**12, 0.1, 0.2, 0.25, 0.3, 2**30, 2.0**31, True, flows)
    tight = replace(step, rank=4, fits=False)
    answer = ObservedPrice("train.py", "dgx-h100", 8, (step, tight))
    shown = observation.price(answer, collectives=True)
    first, second = _rows(shown, "a step, priced")
    assert tuple(first.values()) == (3, 0.1, 0.2, 0.25, 0.3, 2**30, "yes")
    assert second["fits"] == f"no: {size(2.0**31)}"
    assert [row["alone"] for row in _rows(shown, "rank 3")] == [f.seconds for f in reversed(flows)]
    assert len(observation.price(answer).sheets) == 1
    assert _lines(shown).startswith("train.py: 8 ranks of dgx-h100\n")


def _flow(i: int) -> dict[str, Any]:
    values: dict[str, Any] = {"op": "all_reduce", "axis": "dp", "dtype": "bfloat16", "links": "inside"}
    names = ObservedFlow.__dataclass_fields__
    return {name: values.get(name, i + 1) for name in names}


def test_differences_from_a_plan_are_shown_side_by_side() -> None:
    differences = (
        PlanDifference(0, "all_reduce", 2, 3, 20, 30, True),
        PlanDifference(1, "FLOPs", 0, 0, 5, 5, False),
        PlanDifference(1, "send", 0, 4, 0, 9, True),
    )
    (sheet,) = observation.differences(PlanDifferences(differences)).sheets
    assert [tuple(row) for row in sheet.rows] == [
        (0, "all_reduce", 2, 3, 20, 30, "differs"),
        (1, "FLOPs", None, None, 5, 5, "same"),
        (1, "send", 0, 4, 0, 9, "differs"),
    ]
    assert bool(PlanDifferences(differences))
    assert not PlanDifferences(differences[1:2])


# The page of a run.


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from phalanx.spec.files import plan

    folder = tmp_path_factory.mktemp("run")
    words = "plan --model gpt2 --cluster dgx-h100 --gpus 8 --batch 8 --seq 1024 --strategy dp=8 --out plan.json"
    assert phalanx(folder, words)[0] == 0
    return folder, plan.read(folder / "plan.json")


def _row(step: int, seconds: float = 2.0) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 9 / step,
        "step_time_s": seconds,
        "tokens_per_s": 1e3 * step,
        "mem_bytes": 2**30 * step,
    }


def test_a_run_is_summed_up_by_its_steps(planned: Any) -> None:
    _, plan = planned
    steps = [_row(i, 8.0 if i == 5 else float(i)) for i in range(1, 6)]
    first, second, *rest = run_page._summary("one", plan, steps, 5).text
    assert first.endswith("on dgx-h100, 5 steps of 8 sequences")
    assert second == "loss 1.800 after step 5; a step takes 3.00 s in the median, 1.00 s at best; memory 5.0 GiB"
    assert rest == ["1 of 5 steps took over 1.5 times the median"]
    even = [_row(i) for i in range(1, 6)]
    assert run_page._summary("one", plan, even, 50).text[2:] == (
        "what is said and drawn of steps is of 5, spread evenly over the run",
    )
    assert run_page._summary("one", plan, [], 0).text[1] == "no step has been written yet"


@pytest.mark.parametrize(
    ("numbers", "taken"),
    [(range(1, 31), 30), (range(41, 61), 20), ((10, 20, 30), 30), (range(100, 9101, 1000), 9100)],
)
def test_steps_are_counted_where_all_were_read(planned: Any, numbers: Any, taken: int, tmp_path: Path) -> None:
    """A run that begins at a later step is whole; of a sample the last step says how many were taken."""
    folder, _ = planned
    (tmp_path / "plan.json").write_text((folder / "plan.json").read_text())
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(_row(i)) + "\n" for i in numbers))
    assert f", {taken:,} steps of 8 sequences" in run_page.of_run(tmp_path)


def test_a_curve_has_the_steps_numbers() -> None:
    steps = [_row(i) for i in range(1, 31)]
    section = run_page._lines("Loss", "nats", {"training": "loss"}, steps)
    (panel,) = section.panels
    assert isinstance(panel, Lines)
    assert panel.series[0].points == [(float(row["step"]), row["loss"]) for row in steps]
    assert (panel.series[0].dots, panel.x.low, panel.y.low) == (True, 1.0, 0.3)
    assert section.rows == [(str(row["step"]), f"{row['loss']:.4g}") for row in steps[-10:]]
    long = run_page._lines("Loss", "nats", {"training": "loss"}, [_row(i) for i in range(1, 4002)], zero=True)
    (panel,) = long.panels
    assert isinstance(panel, Lines)
    assert (len(panel.series[0].points), panel.series[0].dots, panel.y.low) == (1334, False, None)
    assert run_page._lines("Loss", "nats", {"training": "loss"}, []).panels == ()


def test_each_curve_of_a_run_has_its_unit_and_its_own_numbers(planned: Any) -> None:
    """Read back from the page: what is a size or a rate is drawn from zero, a loss from its lowest."""
    steps = [_row(i) for i in range(2, 6)]
    whole = run_page.report("r", planned[1], steps, [], [], 5)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', whole)
    curves = {chart["id"]: chart for chart in json.loads(data)["charts"]}
    assert {name: chart["y"]["label"].split(",")[0] for name, chart in curves.items()} == {
        "loss": "nats a token",
        "throughput": "tokens/s",
        "memory": "GiB",
    }
    for name, key, unit in (("loss", "loss", 1), ("throughput", "tokens_per_s", 1), ("memory", "mem_bytes", 2**30)):
        (line,) = curves[name]["series"]
        assert line["points"] == [[row["step"], row[key] / unit] for row in steps]
        assert curves[name]["y"]["low"] == (None if unit > 1 or "_per_" in key else steps[-1][key])


def test_a_timeline_has_each_ranks_milliseconds_under_the_predicted_ones() -> None:
    spans = [{"ph": "M", "pid": p, "name": "process_name", "args": {"name": f"rank {p}"}} for p in (0, 1)]
    for pid, times in ((0, 1.0), (1, 2.0)):
        at = 5e3
        for kind, ms in (("forward", 2.0), ("backward", 4.0), ("optimizer", 1.0), ("norm", 0.5)):
            spans.append(_span(pid, kind, "compute", at, 1e3 * times * ms))
            at += 1e3 * times * ms
        spans.append(_span(pid, "all_reduce", "nccl", 6e3, 3e3))
    prediction = {"forward_s": 1e-3, "backward_s": 4e-3, "optimizer_s": 0.0, "exposed_communication_s": 2e-3}
    plan: Any = SimpleNamespace(strategy=Strategy(dp=2), prediction=prediction)
    (section,) = run_page._timeline(plan, spans)
    assert section.columns == ("ms", "ranks", "forward", "backward", "communication", "optimizer", "other")
    assert [tuple(row) for row in section.rows] == [
        ("predicted", "", "1.00", "4.00", "2.00", "0.00", "0.00"),
        ("rank 0", "1", "2.00 (+100%)", "4.00 (+0%)", "3.00", "1.00", "0.50"),
        ("rank 1", "1", "4.00 (+300%)", "8.00 (+100%)", "3.00", "2.00", "1.00"),
    ]
    assert list(section.text) == [
        "rank 1 computes longest: 15.00 ms, 11.25 ms in the median; 2.00 ms more in backward"
    ]
    (panel,) = section.panels
    assert isinstance(panel, Timeline)
    lanes = {lane.name: [(b.start, b.end, b.kind) for b in lane.blocks] for lane in panel.lanes}
    assert list(lanes) == [f"rank {p}{what}" for p in (0, 1) for what in (", predicted", "", ", communication")]
    assert lanes["rank 0, predicted"] == [(0, 1, "forward"), (1, 5, "backward"), (5, 7, "communication")]
    assert lanes["rank 0"] == [(0, 2, "forward"), (2, 6, "backward"), (6, 7, "optimizer"), (7, 7.5, "other")]
    assert lanes["rank 1, communication"] == [(1, 4, "communication")]
    assert run_page._timeline(plan, []) == []
    alike = [span for span in spans if span["pid"] == 0]
    assert run_page._timeline(plan, alike)[0].text == ()


def _span(pid: int, name: str, cat: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "name": name, "cat": cat, "ts": ts, "dur": dur, "args": {"op": name}}


def test_collectives_of_validation_are_named_with_their_own_errors() -> None:
    errors = {
        name: {"n": n, "median": n + 0.5, "mape": n + 1.5} for n, name in enumerate(("all_reduce", "others"), 3)
    }
    unfit = {key: {"n": 0} for key in ("fit", "fit_near")}
    said = overall({**unfit, "collectives": {**errors, "none": {"n": 0}, "note": "text"}})
    assert [line.partition(":")[0] for line in said] == ["all-reduce", "other collectives"]
    for line, e in zip(said, errors.values(), strict=True):
        assert f"off by {e['median']} % in the median, {e['mape']} % on average ({e['n']})" in line


@pytest.mark.parametrize("tokens", ["1B", "300B"])
def test_a_whole_training_is_as_many_steps_and_gpu_hours_as_its_answer_has(tmp_path: Path, tokens: str) -> None:
    ask = "predict --model llama3-8b --cluster dgx-h100 --gpus 16 --batch 64 --seq 8192 --strategy tp=2,zero=1"
    shown, answer = (
        text_of(tmp_path, f"{ask} --tokens {tokens}"),
        json_of(tmp_path, f"{ask} --tokens {tokens} --json"),
    )
    training = answer["training"]
    assert training["gpu_hours"] == pytest.approx(16 * training["steps"] * answer["step_time_s"] / 3600)
    (found,) = re.findall(r"whole training .*? ([\d,]+) steps, .*?: ([\d,.]+) GPU-hours", " ".join(shown.split()))
    assert int(found[0].replace(",", "")) == round(training["steps"])
    assert float(found[1].replace(",", "")) == pytest.approx(training["gpu_hours"], rel=5e-3)


def test_errors_of_validation_are_shares_and_the_worst_and_the_most_stand_first() -> None:
    draw = np.random.default_rng(1)
    errors = [{"n": n, "median": 2.0 * n, "p90": 3.0 * n, "bias": -n} for n in range(4)]
    by_chip = {"A": {"op": errors[1], "none": errors[0]}, "B": {"op": errors[2]}}
    refused = {"few": 1, "most": 9, "some": 4}
    table, left = collectives(
        SimpleNamespace(scores={"by_chip": by_chip, "all": errors[3], "refused": refused})  # type: ignore[arg-type]
    ).parts
    assert isinstance(table, Sheet)
    assert isinstance(left, Sheet)
    assert [row[:3] for row in table.rows] == [("A", "op", 1), ("B", "op", 2), ("all of them", "", 3)]
    assert [row[3:] for row in table.rows] == [(0.02 * n, pytest.approx(0.03 * n), -n / 100) for n in (1, 2, 3)]
    assert list(left.rows) == [("most", 9), ("some", 4), ("few", 1)]
    none = {"by_chip": {"A": {"op": errors[0]}}, "all": errors[0], "refused": {}}
    assert collectives(SimpleNamespace(scores=none)).parts == ["none of these rows can be predicted"]  # type: ignore[arg-type]
    regrets = draw.random(8).tolist()
    sweeps = [
        {"question": f"q{i}", "strategies": 9, "spearman": 0.5, "regret": regret, "chosen": "tp=2,pp=2" * (i > 3)}
        | {"chosen_out_of_memory": i % 2 == 1}
        for i, regret in enumerate(regrets)
    ]
    rows = worst_sweeps({"sweeps": {"each": {"cluster": sweeps}}}).rows
    assert [row[3] for row in rows] == sorted(regrets, reverse=True)[:5]
    for question, *_, chosen in rows:
        i = int(str(question)[1:])
        assert str(chosen).startswith("tp=2, pp=2") == (i > 3)
        assert ("ran out of memory" in str(chosen)) == (i % 2 == 1)
        assert (chosen == "none") == (i < 4 and i % 2 == 0)


@pytest.mark.parametrize("axes", [{}, {"dp": 4, "tp": 2}])
def test_what_is_better_than_a_program_is_said_or_how_to_ask_for_it(
    axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observation, "_steps", lambda now: f"steps of {now}")
    answer: Any = SimpleNamespace(findings=(), now="it", axes=axes, better=None)
    parts = observation.improvement(answer).parts
    assert parts[:2] == ["steps of it", "nothing found in the program itself"]
    assert str(parts[2]).startswith("with --model, --batch and --seq")
    best = SimpleNamespace(strategy="tp=2", step_time_s=2.0, mfu=0.5, memory_bytes=2**30)
    answer.better = SimpleNamespace(best=best, question=SimpleNamespace(stack="a stack"))
    (said,) = observation.improvement(answer).parts[2:]
    mesh = "dp=4, tp=2" if axes else "no named axis"
    figures = f"{seconds(2.0)} a step, MFU 50.0%, {size(2**30)} a GPU"
    assert str(said).startswith(f"the program's mesh: {mesh}; better under a stack: tp=2: {figures}")


def test_kinds_of_a_family_stand_below_it() -> None:
    """Where it has several; families by name."""
    errors = {"n": 1, "mape": 5.0, "median": 5.0, "p90": 5.0, "bias": 5.0, "spearman": None}
    quantities = ("time", "memory_allocated", "memory_reserved", "memory_shown", "time_left_out")
    scored: dict[str, Any] = dict.fromkeys(quantities, errors)
    by_family = dict.fromkeys(("zeta", "alpha", "mu"), scored)
    by_kind = dict.fromkeys(("alpha/dense", "alpha/MoE", "mu/dense", "zeta/dense", "zeta/MoE"), scored)
    shown = families({**scored, "by_family": by_family, "by_kind": by_kind})
    order = list(dict.fromkeys(row[0] for row in shown.rows))
    assert order == ["alpha", "alpha/dense", "alpha/MoE", "mu", "zeta", "zeta/dense", "zeta/MoE", "all"]
