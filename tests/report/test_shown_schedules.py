"""Charts of pipelines: each pass is as wide as its seconds, remarks are its rank's; a run's trace beside its plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import phalanx

from phalanx.answers.schedules.pipeline import PipelineComparison, PipelineDrawing, RunPipeline, draw, of_run
from phalanx.report.gallery.pipelines import schedules as pictured
from phalanx.report.pictures.figure import Timeline
from phalanx.report.pipeline import chart, columns_per_second, cost_table, summary, view
from phalanx.spec.errors import InputError


def _drawn(names: tuple[str, ...] = ("1f1b",), ranks: int = 4, m: int = 8, **more: Any) -> PipelineDrawing:
    return draw(names, ranks, m, **more)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_a_chart_has_every_pass_where_it_is(name: str) -> None:
    """Of a second chunk in small letters; idle columns are dots; the remark is of the rank's own."""
    (cost,) = _drawn((name,), virtual=2 if name == "interleaved" else None).schedules
    priced = cost.priced
    scale = 8.0 / min(stop - start for own in priced.times for start, stop in own)
    lines = chart(priced, 10_000, scale).plain.splitlines()
    assert len(lines) == priced.schedule.ranks
    for rank, line in enumerate(lines):
        body, remark = re.fullmatch(rf"rank {rank} (.*?)(  idle.*)", line).groups()  # type: ignore[union-attr]
        assert len(body) == round(priced.makespan * scale)
        covered = 0
        for action, (start, stop) in zip(priced.schedule.actions[rank], priced.times[rank], strict=True):
            left, right = round(start * scale), round(stop * scale)
            second = action.chunk // priced.schedule.ranks % 2 == 1
            word = f"{action.kind.lower() if second else action.kind}{action.micro_batch}"
            assert body[left:right] == word.ljust(right - left), (action, body[left:right])
            covered += right - left
        assert body.count("·") == len(body) - covered
        idle = 1 - priced.work[rank] / priced.makespan
        assert remark == f"  idle {idle:4.0%}, at most {priced.peak[rank]:3} live"


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "interleaved"])
def test_a_lane_of_a_picture_is_idle_where_it_has_no_block(name: str) -> None:
    """Each pass once; of a second chunk in colours of its own; all schedules on the axis of the longest."""
    priced = [cost.priced for cost in _drawn((name, "1f1b")).schedules]
    picture = pictured([(" a", priced[0]), (" b", priced[1])], "s", "")
    for p, panel in zip(priced, picture.panels, strict=True):
        assert isinstance(panel, Timeline)
        assert panel.end == max(x.makespan for x in priced)
        for rank, lane in enumerate(panel.lanes):
            kinds = {(action.kind, action.chunk // p.schedule.ranks % 2) for action in p.schedule.actions[rank]}
            assert len({block.kind for block in lane.blocks}) == len(kinds)
            assert sum(block.kind.endswith("second chunk") for block in lane.blocks) == sum(
                action.chunk >= p.schedule.ranks for action in p.schedule.actions[rank]
            )
            spans = [(block.start, block.end) for block in lane.blocks]
            assert spans == [*p.times[rank]]
            idle = 1 - sum(end - start for start, end in spans) / p.makespan
            assert f"idle {idle:.0%}, {p.peak[rank]} live" == lane.remark


def test_a_long_chart_is_cut_into_panels_that_go_on() -> None:
    priced = _drawn().schedules[0].priced
    scale = columns_per_second([priced], 50)
    whole = chart(priced, 10_000, scale).plain.splitlines()
    lines = chart(priced, 50, scale).plain.splitlines()
    assert all(len(line) <= 50 for line in lines if not line.startswith("idle by rank"))
    assert sum(line.startswith("... from ") for line in lines) in (1, 2, 3)
    for rank in range(4):
        parts = [line.removeprefix(f"rank {rank} ") for line in lines if line.startswith(f"rank {rank} ")]
        assert (
            "".join(parts).partition("  idle")[0] == whole[rank].removeprefix(f"rank {rank} ").partition("  idle")[0]
        )
    percent = [int(n) for n in re.findall(r"from (\d+)% of the step on", "\n".join(lines))]
    assert percent == sorted(set(percent))
    assert 0 < percent[0] < percent[-1] + 1 <= 100


def test_schedules_share_one_scale_on_which_each_pass_has_room() -> None:
    both = [s.priced for s in _drawn(("gpipe", "1f1b"), 2, 11).schedules]
    scale = columns_per_second(both, 200)
    shortest = min(stop - start for p in both for own in p.times for start, stop in own)
    assert scale * shortest == pytest.approx(3)  # letter and two digits
    narrow = columns_per_second(both, 20)
    assert narrow * max(p.makespan for p in both) == pytest.approx(20 - len("rank 1 "))
    for p in both:
        assert max(map(len, chart(p, 20, narrow).plain.splitlines()[:2])) <= 20
    assert "idle by rank: " in chart(both[0], 20, narrow).plain


def test_costs_are_said_and_tabulated() -> None:
    plain, cut = (_drawn((name,), virtual=v).schedules[0] for name, v in (("1f1b", None), ("interleaved", 2)))
    assert summary(plain) == (
        "bubble fraction 27.3% of the step, bubble overhead 37.5% over the ideal; at most 4 activations; "
        f"{plain.messages} messages"
    )
    assert "activations of a chunk, 2 chunks per rank" in summary(cut)
    assert summary(cut).endswith("small letters: every second chunk of a rank")
    sheet = cost_table([plain, cut])
    for row, s in zip(sheet.rows, (plain, cut), strict=True):
        live = max(s.peak_activations) * s.ranks / s.chunks
        shares = (s.bubble_fraction, s.bubble_overhead)
        assert tuple(row) == (s.name, s.chunks // s.ranks, *shares, s.makespan, live, s.messages)
    shown = view(PipelineComparison((plain,), ("zb-v: why",)))
    assert (len(shown.sheets), shown.parts[-1]) == (1, "left out: zb-v: why")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("piped")
    (folder / "job.toml").write_text(
        '[model]\npreset = "gpt2"\n[cluster]\npreset = "dgx-h100"\n[job]\nglobal_batch = 4\nseq = 64\n'
    )
    assert phalanx(folder, "plan job.toml --strategy pp=2,micro_batch=1 --out plan.json")[0] == 0
    return folder


def _trace(folder: Path, to: Path, times: float, drop: int = 0, odd: bool = False) -> Path:
    """Write the trace of a run whose passes took `times` their predicted seconds, from a second on."""
    to.mkdir()
    (to / "plan.json").write_text((folder / "plan.json").read_text())
    events: list[dict[str, Any]] = [{"cat": "compute", "pid": 0, "ts": 0, "dur": 9, "args": {}}]
    predicted = _predicted(folder)
    for rank, own in enumerate(predicted.schedule.actions):
        for action, (start, stop) in zip(own, predicted.times[rank], strict=True):
            args = {"kind": action.kind, "chunk": action.chunk, "micro_batch": action.micro_batch}
            at, took = 1e6 + 1e6 * times * start, 1e6 * times * (stop - start)
            events.append({"cat": "schedule", "pid": rank, "ts": at, "dur": took, "args": args})
    events = events[: len(events) - drop]
    if odd:
        del events[-1]["args"]["chunk"]
    (to / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return to


def _predicted(folder: Path) -> Any:
    from phalanx.cost.step.predict_pipeline import price_pipeline
    from phalanx.cost.step.terms import terms
    from phalanx.schedule.layout import Layout
    from phalanx.schedule.pipeline.simulate import strip_sends
    from phalanx.spec.files import plan as plans

    plan = plans.read(folder / "plan.json")
    layout = Layout(plan.model, plan.job, plan.strategy)
    views = layout.stage_views()
    priced = price_pipeline(views, [terms(view) for view in views], plan.cluster).priced
    return replace(priced, schedule=strip_sends(layout.schedule))


def test_a_runs_pipeline_is_measured_beside_the_predicted_one(run: Path, tmp_path: Path) -> None:
    found = of_run(_trace(run, tmp_path / "slow", 3.0))
    measured, predicted = found.measured, found.predicted
    assert measured.makespan == pytest.approx(3 * predicted.makespan, rel=1e-5)
    assert measured.bubble_fraction == pytest.approx(predicted.bubble_fraction, abs=1e-5)
    assert (measured.ranks, measured.micro_batches) == (predicted.ranks, predicted.micro_batches) == (2, 4)
    shown = view(PipelineDrawing((), (found,), "1,1,1"))
    titles = [part(200).plain for part in shown.parts if callable(part)][::2]
    assert [
        f"measured in {measured.makespan:.3g} s" in titles[0],
        f"predicted in {predicted.makespan:.3g} s" in titles[1],
    ] == [True] * 2
    assert isinstance(found, RunPipeline)


@pytest.mark.parametrize(("how", "said"), [({"drop": 1}, "its trace lacks"), ({"odd": True}, "is damaged")])
def test_a_trace_that_is_not_whole_is_refused(run: Path, tmp_path: Path, how: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        of_run(_trace(run, tmp_path / "odd", 1.0, **how))


def test_a_run_without_pipeline_or_trace_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no trace\.json"):
        of_run(run)
    (tmp_path / "job.toml").write_text((run / "job.toml").read_text())
    assert phalanx(tmp_path, "plan job.toml --strategy dp=2 --out plan.json")[0] == 0
    with pytest.raises(InputError, match="was trained without a pipeline"):
        of_run(tmp_path)
