"""Reports: whole, closed, small, harmless whatever a user's text is, and drawn without an error by a browser."""

from __future__ import annotations

import copy
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from itertools import pairwise
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.browser import CHROMIUM, Browser, chromium
from support.fuzz import listings
from support.in_process_cli import error_of, phalanx
from support.quick_runs import JOB

from phalanx.answers import compare
from phalanx.answers.diagnose.run_files import _between
from phalanx.answers.runs import verify
from phalanx.answers.runs.experts import expert_balance
from phalanx.report.html.page import Section, page
from phalanx.report.measured.run_page import _timeline, of_run
from phalanx.report.observation import name_list, observation_page
from phalanx.report.pictures.figure import Bar, Bars, Lane, LaneBlock, Timeline
from phalanx.report.style import count_words
from phalanx.runs import folder as run_folder
from phalanx.schedule.observation_file import from_json
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy

QUESTION = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "8192")
_VOID = ("meta", "br", "wbr")


class _Nesting(HTMLParser):
    """Checks that every tag is closed in its order, and collects what a page asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asks: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asks += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asks += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _checked(text: str) -> dict[str, Any]:
    """Return the data of a page, after checks that hold of every page."""
    nesting = _Nesting()
    nesting.feed(text)
    assert nesting.open == []
    assert all(ask.startswith("#") for ask in nesting.asks)
    assert "default-src 'none'" in text
    assert len(text) < 3_000_000
    found = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    strategy = ("--strategy", "pp=4,virtual=2,schedule=interleaved")
    assert phalanx(folder, "plan", *QUESTION, *strategy, "--save", "plan.html")[0] == 0
    assert phalanx(folder, "compare plan.json tp=8,zero=1 --save compare.html")[0] == 0
    run = folder / "runs" / "one"
    run.mkdir(parents=True)
    shutil.copy(folder / "plan.json", run)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _steps(30)) + '{"step": 3')
    spans = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}},
        {
            "ph": "X",
            "pid": 0,
            "name": "forward a",
            "cat": "compute",
            "ts": 10.0,
            "dur": 5.0,
            "args": {"op": "forward"},
        },
        {"ph": "X", "pid": 0, "name": "all_reduce", "cat": "nccl", "ts": 12.0, "dur": 9.0, "args": {}},
    ]
    (run / "trace.json").write_text(json.dumps({"traceEvents": spans}))
    (run / "recorded.json").write_text(json.dumps({"step_time_s": 2.0, "memory_bytes": 2**30, "timeline": None}))
    assert phalanx(folder, "runs report runs/one")[0] == 0
    for name in ("memory", "comm"):
        assert phalanx(folder, "tables", name, "--params", "7B", "--save", f"{name}.html")[0] == 0
    small = ("--model", "gpt2", *QUESTION[2:4], "--gpus", "2,4", "--batch", "8", "--seq", "64")
    assert phalanx(folder, "tables scaling", *small, "--save", "scaling.html")[0] == 0
    large = ("--model", "llama3-405b", "--cluster", "dgx-h100", "--gpus", "1024", "--batch", "1024", "--seq", "8192")
    strategy = ("--strategy", "dp=8,zero=1,tp=4,sp=1,pp=32,virtual=4,schedule=interleaved")
    assert phalanx(folder, "plan", *large, *strategy, "--out", "large.json", "--save", "large.html")[0] == 0
    (folder / "job.toml").write_text(JOB)
    assert phalanx(folder, "verify job.toml --strategy tp=2 --save verify.html")[0] == 0
    return folder


def _steps(count: int) -> Iterator[dict[str, float]]:
    for i in range(count):
        yield {"step": i + 1, "loss": 9 / (i + 1), "step_time_s": 2.0, "tokens_per_s": 5e3, "mem_bytes": 2**30}


PAGES = ("plan.html", "compare.html", "runs/one/report.html", "memory.html", "comm.html", "scaling.html")
WITHOUT_CHARTS = ("verify.html",)


@pytest.mark.parametrize("name", [*PAGES, *WITHOUT_CHARTS])
def test_a_page_is_whole_and_asks_for_nothing(here: Path, name: str) -> None:
    text = (here / name).read_text()
    data = _checked(text)
    assert data["version"] == 1
    assert bool(data["charts"]) == (name in PAGES)
    if name in ("plan.html", "compare.html", "runs/one/report.html"):  # whose notes are no titles
        assert not any(";" in heading for heading in re.findall(r"<h2[^>]*>(.*?)</h2>", text))


def test_tables_are_drawn_with_what_adds_up(here: Path) -> None:
    page_ = (here / "memory.html").read_text()
    ids = re.findall(r' id="([^"]+)"', page_)
    assert len(ids) == len(set(ids))
    charts = _checked(page_)["charts"]
    assert page_.count("<svg") == len({c["id"] for c in charts})  # one for all panels of a section
    (stacked,) = (c for c in charts if c.get("head", "").endswith("what adds up"))
    totals = {bar["label"]: sum(value for _, value in bar["parts"]) for bar in stacked["bars"]}
    assert totals == {f"{n} bytes": n for n in (12, 16, 18, 20)}


def test_a_proof_shows_both_sides(here: Path) -> None:
    text = (here / "verify.html").read_text()
    assert _checked(text)["proved"] is True
    cells = re.findall(r"<tr><td>all_reduce</td><td>tp</td>(.*?)</tr>", text)
    predicted, recorded, *sizes = re.findall(r">([\d,]+)<", cells[0])
    assert predicted == recorded
    assert sizes[0] == sizes[1]


def test_an_observed_program_is_shown() -> None:
    text = observation_page(from_json(json.dumps(listings.observation())))
    data = _checked(text)
    assert {c["kind"] for c in data["charts"]} == {"bars"}
    assert "What could be better" in text


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a"], "a"),
        (["", "b"], "(root), b"),
        (["a", "b", ""], "a ... (root) (3)"),
        (["a", "b", "c", "d"], "a ... d (4)"),
    ],
)
def test_units_are_named_where_they_are_few(names: list[str], said: str) -> None:
    assert name_list(names) == said


def test_a_plan_adds_up(here: Path) -> None:
    data = _checked((here / "plan.html").read_text())
    *terms, step = data["charts"][0]["bars"]
    at = 0.0
    for bar in terms:
        assert bar["start"] == pytest.approx(at)
        at += bar["parts"][0][1]
    assert at == pytest.approx(step["parts"][0][1], rel=0.01)  # terms below a thousandth are not drawn
    assert sum(data["terms_s"].values()) == pytest.approx(step["parts"][0][1])
    charts = {c["id"]: c for c in data["charts"]}
    by_rank, by_part = (
        {bar["label"]: sum(n for _, n in bar["parts"]) for bar in charts[name]["bars"]}
        for name in ("memory-by-pipeline-rank", "memory-by-part")
    )
    assert list(by_rank) == [f"rank {i}" for i in range(4)]
    assert max(by_rank.values()) == pytest.approx(by_part["chosen"], rel=0.01)
    held = json.loads(phalanx(here, "predict plan.json --json")[1])
    assert by_part["chosen"] * 2**30 == pytest.approx(sum(held["memory_terms"].values()), rel=0.01)
    assert len(set(by_rank.values())) == 4  # fewer passes are in flight on each next rank
    pipeline = next(c for c in data["charts"] if c["kind"] == "timeline")
    assert [lane["name"] for lane in pipeline["lanes"]] == [f"rank {i}" for i in range(4)]
    for lane in pipeline["lanes"]:
        blocks = sorted(lane["blocks"], key=lambda block: block["start"])
        for before, after in pairwise(blocks):
            assert after["start"] >= before["end"] - 1e-9  # a rank does one thing at a time
    assert data["strategy"] == json.loads((here / "plan.json").read_text())["strategy"] or data["strategy"]


def test_a_run_shows_the_predicted_step_over_the_measured(here: Path) -> None:
    data = _checked((here / "runs/one/report.html").read_text())
    lanes = data["charts"][-1]["lanes"]
    assert {lane["name"] for lane in lanes} >= {"rank 0", "rank 0, communication"}
    assert "9.000" not in (here / "runs/one/report.html").read_text().partition("Loss")[0]


def test_of_a_thousand_ranks_each_stage_is_drawn_and_who_is_slow_is_named() -> None:
    strategy, ranks = Strategy(dp=256, pp=4), 1024
    named = [{"ph": "M", "pid": r, "name": "process_name", "args": {"name": f"rank {r}"}} for r in range(ranks)]
    passes = {"ph": "X", "name": "forward", "cat": "compute", "ts": 0.0, "args": {"op": "forward"}}
    spans = [passes | {"pid": r, "dur": 9000.0 if r == 700 else 5000.0} for r in range(ranks)]
    plan = SimpleNamespace(strategy=strategy, prediction={"forward_s": 0.004})
    (section,) = _timeline(plan, named + spans)  # type: ignore[arg-type]
    about = {row[0]: row[1:] for row in section.rows}
    assert [name for name in about if name != "predicted"] == [
        "rank 0",
        "rank 256",
        "rank 512",
        "rank 700",
        "rank 768",
    ]
    assert (about["rank 512"][0], about["rank 700"][0], about["rank 0"][0]) == ("255", "1", "256")
    assert about["rank 0"][1] == "5.00 (+25%)"
    assert section.text == ("rank 700 computes longest: 9.00 ms, 5.00 ms in the median; 4.00 ms more in forward",)
    assert {lane.name for lane in section.panels[0].lanes} >= {"rank 700", "rank 700, predicted"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("runs", "report", "runs/none"), "is not a folder of a run; name one"),
        (("runs", "report", "runs/broken"), "line 1 of metrics.jsonl is of no run of this version"),
        (("runs", "report", "runs/one", "--out", "no/where.html"), "make its folder first"),
        (("plan", *QUESTION, "--save", "no/where.html"), "make its folder first"),
    ],
)
def test_what_cannot_be_shown_is_said(here: Path, words: tuple[str, ...], said: str) -> None:
    broken = here / "runs" / "broken"
    broken.mkdir(exist_ok=True)
    shutil.copy(here / "plan.json", broken)
    (broken / "metrics.jsonl").write_text('{"step": 1}\n')
    assert said in error_of(here, *words)


_FIELDS = [(name, key) for name in ("process_name", "F") for key in ("pid", "ts", "dur", "name", "args", "ph")]
_ODD = [None, [], {}, "", "1", True, 0, 0.0, -1, 1.5, 1e300, 10**30, [[]], float("nan"), float("inf")]


@pytest.mark.parametrize(("of", "key"), _FIELDS)
def test_a_field_of_a_timeline_that_is_odd_is_drawn_or_refused(here: Path, tmp_path: Path, of: str, key: str) -> None:
    """Each field of each kind of event, missing and of every odd value."""
    run = shutil.copytree(here / "runs" / "one", tmp_path / "run")
    content = json.loads((run / "trace.json").read_text())
    at = next(
        i for i, e in enumerate(content["traceEvents"]) if (e["name"] == "process_name") == (of == "process_name")
    )
    refused = 0
    for odd in (*_ODD, "missing"):
        changed = json.loads(json.dumps(content))
        changed["traceEvents"][at][key] = odd
        if odd == "missing":
            del changed["traceEvents"][at][key]
        (run / "trace.json").write_text(json.dumps(changed))
        try:
            text = of_run(run)
        except InputError as error:
            text = str(error)
            refused += 1
        assert "</html>" in text or "is not a timeline" in text
    assert refused or key in ("args", "ph", "ts", "dur", "name"), "a rank that is none is refused"


@pytest.mark.parametrize(
    ("name", "key"),
    [("recorded.json", key) for key in ("step_time_s", "memory_bytes", "timeline", None)]
    + [("metrics.jsonl", key) for key in ("step", "loss", "step_time_s", "between_s", "expert_tokens", None)],
)
def test_what_a_run_has_written_is_read_or_refused_if_it_is_odd(
    here: Path, tmp_path: Path, name: str, key: str | None
) -> None:
    """Each field, or the whole of a record, by each of its readers; no figure is below zero or not finite."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(here / "plan.json", run)
    experts = {"between_s": 2.0, "expert_tokens": {"1": [1, 2]}, "expert_dropped": 0.0}
    rows = [row | experts for row in _steps(3)]
    recorded = {"step_time_s": 2.0, "memory_bytes": 2**30, "timeline": {"compute": 1.0}}
    for odd in (*_ODD, "missing"):
        steps, record = copy.deepcopy((rows, recorded))
        at: Any = steps[1] if name == "metrics.jsonl" else record
        if key is None:
            steps[1], record = (odd, record) if name == "metrics.jsonl" else (steps[1], odd)  # type: ignore[assignment]
        elif odd == "missing":
            del at[key]
        else:
            at[key] = odd
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
        (run / "recorded.json").write_text(json.dumps(record))
        for reader in (of_run, expert_balance):
            with suppress(InputError):
                reader(run)
        measured = [*compare._measured_fields(run).values(), verify._measured_peak(run / "recorded.json")[0]]
        assert all(f is None or f > 0 for f in measured), odd
        figures = list(measured)
        with suppress(InputError):
            figures.append(_between(run))
        assert all(f is None or 0 <= f < inf for f in figures), odd


def test_a_long_runs_page_takes_linear_time_and_is_no_larger(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = here / "runs" / "long"
    run.mkdir()
    shutil.copy(here / "plan.json", run)
    sizes = []
    for count in (8_000, 32_000):
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _steps(count)) + '{"step": 3')
        began = time.process_time()
        text = of_run(run)
        assert time.process_time() - began < 4  # once 7 and 110 s: every step took the median of all
        assert f"{count:,} steps of" in text
        sizes.append(len(text))
    assert max(sizes) < 1.05 * min(sizes)
    # Of a file of any length a sample is read, and its last steps.
    monkeypatch.setattr(run_folder, "_WHOLE", 2**20)
    rows = run_folder.metrics(run, 1_000)
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 32_000)
    assert 1_000 <= len(rows) < 2_000
    assert max(b - a for a, b in pairwise(steps)) < 40
    text = of_run(run)
    assert "32,000 steps of" in text
    assert "spread evenly over the run" in text


def test_a_users_text_runs_nothing() -> None:
    hostile = '</script><script>alert(1)</script><img src=x onerror="alert(1)">'
    bars = Bars(hostile, (Bar(hostile, [(hostile, 1.0)], hostile),), ((hostile, 0.5),), hostile)
    blocks = [LaneBlock(0.0, 1.0, hostile, hostile, hostile)]
    panels = (bars, Timeline(hostile, (Lane(hostile, blocks),)))
    section = Section(hostile, hostile, (hostile,), (hostile,), [(hostile,)], panels)
    text = page(hostile, hostile, [section], {hostile: hostile})
    data = _checked(text)
    assert data["title"] == hostile  # as data it is whole
    assert "<img" not in text
    assert text.count("<script") == 2  # the data, and what opens tables on paper


_CUT_OFF = """[...document.querySelectorAll('figure.svg svg')].flatMap((svg) => {
  const room = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter((text) => {
    const own = text.getBoundingClientRect();
    return own.width && (own.left < room.left - 1 || own.right > room.right + 1);
  }).map((text) => text.textContent);
})"""
"""What is written in charts and leaves them to the left or right."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page's scripts cannot be run")
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.parametrize("name", [*PAGES, "large.html"])
def test_a_browser_draws_every_chart_whole(here: Path, name: str, browser: Browser) -> None:
    tab = browser.tab((here / name).as_uri())
    for width in (1200, 390):  # a desk and a phone
        tab.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        tab.wait(f"document.readyState === 'complete' && innerWidth === {width}")
        assert tab.value("document.querySelectorAll('figure.svg svg').length > 0")
        assert tab.value(_CUT_OFF) == []
        assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.errors == []


def test_on_paper_the_numbers_are_open(here: Path, browser: Browser) -> None:
    tab = browser.tab((here / "plan.html").as_uri())
    tab.wait("document.querySelector('figure.svg svg')")
    opened = "document.querySelectorAll('details[open]').length"
    for event, open_ in (("beforeprint", True), ("afterprint", False)):
        tab.value(f"dispatchEvent(new Event('{event}'))")
        assert bool(tab.value(opened)) is open_


def test_a_plan_of_a_thousand_gpus_stays_small(here: Path) -> None:
    text = (here / "large.html").read_text()
    data = _checked(text)
    pipeline = next(c for c in data["charts"] if c["kind"] == "timeline")
    drawn = [lane["name"] for lane in pipeline["lanes"]]
    assert (drawn[0], drawn[-1]) == ("rank 0", "rank 31")
    assert sum(len(lane["blocks"]) for lane in pipeline["lanes"]) <= 3000
    assert f"on {len(drawn)} of 32 pipeline ranks" in text
    assert "... and 96 more nodes" in text  # 32 of 128 are drawn, one of each pipeline rank
    assert len(text) < 1_100_000


def test_a_number_has_its_noun() -> None:
    assert [count_words(1, "micro-batch"), count_words(2, "micro-batch")] == ["1 micro-batch", "2 micro-batches"]
    assert [count_words(1, "rank"), count_words(2048, "rank")] == ["1 rank", "2,048 ranks"]
