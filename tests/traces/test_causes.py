"""Each cause is named from the share on that its rule states, and no part of a step is lost on the way to a row."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.answers.diagnose import run_files
from phalanx.answers.diagnose.causes import Evidence, causes
from phalanx.answers.diagnose.diagnosis import _cautions, _compared_rank, _findings, _rows
from phalanx.answers.diagnose.planned_parts import PlannedAxis
from phalanx.answers.diagnose.run_files import RunFiles, read_files
from phalanx.answers.diagnose.stated_rate import StatedRate, seconds_at, stated_rate
from phalanx.answers.prediction import prediction_of
from phalanx.answers.question.query import Query
from phalanx.answers.question.resolution import read
from phalanx.spec import documents
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.traces.breakdown import AxisUse, Breakdown
from phalanx.traces.memory_snapshot import MemoryUse

S = Strategy(dp=4)


def _step(rank: int | None = 0, counts: Any = None, **parts: float) -> Breakdown:
    named = {name.replace("over_", "over "): seconds for name, seconds in parts.items()}
    return Breakdown(rank, f"{rank}.json", 3, sum(named.values()), named, {}, counts or {}, ())


def _evidence(own: Breakdown, gaps: dict[str, float], s: Strategy = S, **more: Any) -> Evidence:
    planned = {part: own.parts.get(part, 0.0) - gap for part, gap in gaps.items()}
    given = {"ranks": [own], "planned": planned, "axes": {}, "spread_out": frozenset(), "fp32_share": 0.0} | more
    return Evidence(strategy=s, grid=mesh(s), ranks_per_node=2, own=own, gaps=gaps, **given)


def _names(e: Evidence) -> list[str]:
    return [cause.name for cause in causes(e)]


@pytest.mark.parametrize(("gap", "named"), [(0.019, []), (0.0201, ["slow attention"]), (-0.5, [])])
def test_a_gap_is_a_finding_from_two_hundredths_of_the_step_on(gap: float, named: list[str]) -> None:
    assert _names(_evidence(_step(products=0.9, attention=0.1), {"attention": gap})) == named


def test_findings_come_largest_first_with_their_seconds() -> None:
    own = _step(products=0.8, attention=0.1, memory=0.1)
    found = causes(_evidence(own, {"attention": 0.05, "products": 0.2, "memory": 0.01}))
    assert [(c.name, c.seconds) for c in found] == [("slow products", 0.2), ("slow attention", 0.05)]


@pytest.mark.parametrize(("single", "name"), [(0.19, "slow products"), (0.21, "products in fp32")])
def test_products_in_fp32_are_a_fifth_or_more(single: float, name: str) -> None:
    own = _step(products=1.0)
    assert _names(_evidence(own, {"products": 0.1}, fp32_share=single)) == [name]


PLANNED = PlannedAxis(calls=10, bytes=1e9, alone_s=0.1)
OVER = "communication over {0}"


@pytest.mark.parametrize(
    ("axis", "calls", "size", "moving", "exposed", "planned_gap", "name"),
    [
        # Small buckets: twice as many collectives of data parallelism, and four more.
        ("dp", 20, 1e9, 0.1, 0.05, 0.04, "small buckets"),
        ("dp", 19, 1e9, 0.1, 0.05, 0.04, OVER),
        ("tp", 20, 1e9, 0.1, 0.05, 0.04, OVER),
        # No overlap: what was to be hidden is exposed, and takes no longer alone.
        ("dp", 10, 1e9, 0.1, 0.09, 0.06, "no overlap"),
        ("dp", 10, 1e9, 0.1, 0.079, 0.06, OVER),
        ("dp", 10, 1e9, 0.1, 0.09, 0.015, OVER),
        ("tp", 10, 1e9, 0.1, 0.09, 0.06, OVER),
        # A slow link: a quarter longer than planned, with the planned calls and bytes.
        ("tp", 10, 1e9, 0.126, 0.1, 0.05, "slow link under {0}"),
        ("tp", 10, 1e9, 0.124, 0.1, 0.05, OVER),
        ("tp", 17, 1e9, 0.2, 0.1, 0.05, OVER),
        ("tp", 16, 1e9, 0.2, 0.1, 0.05, "slow link under {0}"),
        ("dp", 10, 1e9, 0.2, 0.19, 0.15, "slow link under {0}"),
        # More bytes than planned, a quarter at least.
        ("tp", 10, 1.26e9, 0.2, 0.1, 0.05, "more bytes over {0}"),
        ("tp", 10, 1.24e9, 0.1, 0.1, 0.05, OVER),
        ("tp", 10, 0.0, 0.2, 0.1, 0.05, "slow link under {0}"),
    ],
)
def test_communication_has_the_cause_that_its_calls_bytes_and_seconds_show(
    axis: str, calls: float, size: float, moving: float, exposed: float, planned_gap: float, name: str
) -> None:
    """Of 10 planned collectives of 1 GB in all, 0.1 s alone. `planned_gap`: by how much more is exposed."""
    own = replace(_step(products=0.9, **{f"over_{axis}": exposed}), axes={axis: _use(calls, size, moving)})
    e = _evidence(own, {f"over {axis}": planned_gap}, axes={axis: PLANNED})
    assert _names(e) == ([name.format(axis)] if planned_gap >= 0.02 * own.step_s else [])


def _use(calls: float, size: float, moving: float) -> AxisUse:
    values = {"calls": calls, "bytes": size, "moving_s": moving}
    return AxisUse(**{name: values.get(name, 0.0) for name in AxisUse.__dataclass_fields__})


def test_communication_without_a_plan_of_its_axis_is_named_as_what_it_is() -> None:
    own = replace(_step(products=0.9, over_ep=0.1), axes={"ep": _use(10, 1e9, 0.1)})
    assert _names(_evidence(own, {"over ep": 0.1})) == [OVER.format("ep")]
    assert _names(_evidence(replace(own, axes={}), {"over ep": 0.1}, axes={"ep": PLANNED})) == [OVER.format("ep")]


@pytest.mark.parametrize(
    ("tp", "spread", "name"), [(2, True, "tp across nodes"), (4, True, OVER), (2, False, OVER), (1, True, OVER)]
)
def test_an_axis_that_fits_a_node_is_to_stay_in_one(tp: int, spread: bool, name: str) -> None:
    axis = "tp" if tp > 1 else "dp"
    own = _step(products=0.9, **{f"over_{axis}": 0.1})
    s = Strategy(dp=4 // tp, tp=tp)
    e = _evidence(own, {f"over {axis}": 0.1}, s, spread_out=frozenset({axis} if spread else ()))
    assert _names(e) == [name.format(axis)]


@pytest.mark.parametrize(("slow", "named"), [(1.04, False), (1.2, True)])
def test_stragglers_are_named_by_the_rank_that_computes_longest(slow: float, named: bool) -> None:
    """By a hundredth of the step; where none does, by what the rank idles in."""
    ranks = [_step(i, products=slow if i == 2 else 1.03, host=0.3 if i == 1 else 0.0, loading=0.1) for i in range(4)]
    own = _step(0, products=1.03, stragglers=0.2)
    (cause,) = causes(_evidence(own, {"stragglers": 0.2}, ranks=ranks))
    assert cause.name == "slow rank"
    assert cause.why.startswith(
        "rank 2 computes 1.2 s" if named else "rank 1 comes last: 0.3 s of its step are the ho"
    )
    (alone,) = causes(_evidence(own, {"stragglers": 0.2}))
    assert (alone.name, alone.why) == ("stragglers", "collectives wait for their last rank")


@pytest.mark.parametrize(("experts", "rest", "name"), [(0.5, 0.0, "imbalanced experts"), (0.2, 0.3, "slow rank")])
def test_experts_are_imbalanced_where_only_they_take_longer(experts: float, rest: float, name: str) -> None:
    ranks = [_step(i, experts=1 + experts * (i == 3), attention=1 + rest * (i == 3)) for i in range(4)]
    s = Strategy(dp=4, ep=4)
    own = _step(0, experts=1.0, attention=1.0, stragglers=0.5)
    assert _names(_evidence(own, {"stragglers": 0.5}, s, ranks=ranks)) == [name]


def test_many_launches_count_kernels() -> None:
    own = _step(products=0.9, launches=0.1, counts={"products": 1000.0, "attention": 234.0, "over dp": 7.0})
    (cause,) = causes(_evidence(own, {"launches": 0.1}))
    assert (cause.name, "1,234 kernels" in cause.why) == ("too many launches", True)


@pytest.mark.parametrize(
    ("forward", "backward", "planned", "named"),
    [
        (63, 32, "none", True),
        (48, 32, "none", False),
        (49, 32, "none", True),
        (64, 32, "full", False),
        (64, 0, "none", False),
    ],
)
def test_recomputation_shows_in_cores_of_attention(forward: int, backward: int, planned: Any, named: bool) -> None:
    """Half as many again forward as backward, where the plan repeats nothing; it explains all that computes."""
    own = _step(products=0.9, attention=0.1, counts={"forward attention": forward, "backward attention": backward})
    gaps = {"products": 0.1, "attention": 0.05, "over tp": 0.04, "optimizer": -0.01}
    found = causes(_evidence(own, gaps, Strategy(dp=4, recompute=planned)))
    assert ([c.name for c in found] == ["recomputation"]) == named
    if named:
        assert found[0].seconds == pytest.approx(0.19)


def _snapshot(allocated: int, reserved: int, peak: int, failures: int = 0) -> MemoryUse:
    return MemoryUse("s.pickle", allocated, reserved, peak, peak, failures, (("train.py:3", 9),))


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (_snapshot(75, 100, 110), []),
        (_snapshot(74, 100, 110), ["no tensor holds 26% of the reserved memory"]),
        (_snapshot(100, 100, 111), ["11% more memory than planned; train.py:3 holds most"]),
        (_snapshot(100, 100, 100, 2), ["2 allocations failed"]),
    ],
)
def test_memory_is_worth_a_word_from_a_quarter_idle_and_a_tenth_more_on(use: MemoryUse, said: list[str]) -> None:
    prediction: Any = type("Prediction", (), {"memory_bytes": 100.0})()
    found = list(_cautions(RunFiles(memory=(use,)), prediction))
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True))
    assert [line for line in _cautions(RunFiles(memory=(use,)), None) if "planned" in line] == []


PARTS = (
    "products",
    "attention",
    "experts",
    "memory",
    "over pp",
    "over dp",
    "pipeline",
    "host",
    "forward",
    "backward",
)


@given(
    st.dictionaries(st.sampled_from(PARTS), st.floats(0.01, 1)),
    st.dictionaries(st.sampled_from(PARTS[:2] + PARTS[5:]), st.floats(0.01, 1)),
    st.floats(0, 1),
)
def test_rows_have_every_second_once(own: dict[str, float], planned: dict[str, float], between: float) -> None:
    """Of the plan and of the measured step, with what passes between steps; the largest gap first."""
    step = Breakdown(0, "a", 1, sum(own.values()), own, {}, {}, ())
    rows = _rows(planned, step, step.step_s, {"between steps": between})
    assert sum(row.measured_s or 0.0 for row in rows) == pytest.approx(step.step_s + between)
    assert len({row.part for row in rows}) == len(rows)
    if planned:
        assert sum(row.predicted_s or 0.0 for row in rows) == pytest.approx(sum(planned.values()))
        gaps = [row.gap_s or 0.0 for row in rows]
        assert gaps == sorted(gaps, reverse=True)
    else:
        assert all(row.predicted_s is None and row.gap_s is None for row in rows)
    only = _rows(planned, None, 2.0, {"between steps": between})
    assert sum(row.measured_s or 0.0 for row in only) == pytest.approx(2.0 + between)


def test_the_usual_rank_is_the_lower_median_of_the_longest_stage() -> None:
    ranks = [_step(i, products=seconds) for i, seconds in enumerate((1.0, 2.0, 3.0, 4.0))]
    assert _compared_rank(ranks, None) is ranks[1]
    assert _compared_rank(ranks[:3], None) is ranks[1]
    question: Any = type("Question", (), {"strategy": Strategy(pp=2, dp=2)})()
    assert _compared_rank(ranks, question) is ranks[2]
    assert _compared_rank([], None) is None


@pytest.mark.parametrize(("seconds", "named"), [(0.019, False), (0.021, True)])
def test_delays_and_pauses_are_findings_from_two_hundredths_on(seconds: float, named: bool) -> None:
    for step_s in (1.0, 4.0):
        extra = {"delayed steps": seconds * step_s, "between steps": 0.0}
        found = _findings(None, None, [], [], None, [], step_s, extra)
        assert [(c.name, c.seconds) for c in found] == [("delayed steps", seconds * step_s)] * named
        extra = {"delayed steps": 0.0, "between steps": seconds * step_s}
        found = _findings(None, None, [], [], None, [], step_s, extra)
        assert [(c.name, c.seconds) for c in found] == [("saving of checkpoints", seconds * step_s)] * named


def test_of_a_long_log_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LARGEST", 10)
    for text in ("0123456789", "a 0123456789", "é 012345678"):
        (tmp_path / "a.log").write_text(text)
        assert documents.read_log(tmp_path / "a.log", "log") == text[-10:]
    with pytest.raises(InputError, match="no such file"):
        documents.read_log(tmp_path / "none.log", "log")


def test_words_are_seconds_rates_files_or_folders(tmp_path: Path) -> None:
    assert [(rate.number, rate.unit) for rate in read_files(["230TFLOP/s", "2 s"]).stated] == [
        (230, "TFLOP/s"),
        (2, "s"),
    ]
    for word in ("0s", "0.0 TFLOP/s"):
        with pytest.raises(InputError, match="above 0"):
            read_files([word])
    with pytest.raises(InputError, match=r"1\.2\.3s"):  # no number, so the name of a file
        read_files(["1.2.3s"])
    with pytest.raises(InputError, match="has no trace"):
        read_files([str(tmp_path)])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a regular file"):
        read_files([str(tmp_path / "pipe")])
    (tmp_path / "a.log").write_text("step 1\n")
    assert read_files([str(tmp_path / "a.log")]).logs == (tmp_path / "a.log",)


@pytest.mark.parametrize(
    ("name", "text", "is_log"),
    [
        ("a.jsonl", '{"step": 1}', True),  # of a run that just began: one line without its end
        ("a.jsonl", '{"step": 1}\n{"step": 2}\n', True),
        ("a.log", '{"step": 1}\n{"step": 2}\n', True),
        ("a.json", '{"traceEvents": [{"ph": "X", "ts": 0, "dur": 1, "name": "n", "cat": "kernel"}]}\n', False),
        ("a.json", '{"schemaVersion": 1,\n"traceEvents": []}\n', False),
    ],
)
def test_a_file_of_json_is_a_log_or_a_trace(tmp_path: Path, name: str, text: str, is_log: bool) -> None:
    (tmp_path / name).write_text(text)
    assert run_files._is_lines(tmp_path / name, text.encode()) == is_log


@pytest.mark.parametrize(
    ("word", "number", "unit"),
    [
        ("4.3s", 4.3, "s"),
        ("850ms", 0.85, "s"),
        ("1.2 s/it", 1.2, "s"),
        ("230 TFLOPs/GPU", 230, "TFLOP/s"),
        ("0.4 samples/s", 0.4, "samples/s"),
        ("2.5it/s", 2.5, "steps/s"),
        ("46% MFU", 0.46, "MFU"),
        ("9,600 tokens/s/GPU", 9600, "tokens/s/GPU"),
        ("9.6k tok/s per gpu", 9600, "tokens/s/GPU"),
        ("4000tgs", 4000, "tokens/s/GPU"),
        ("76.8k tokens/sec/all", 76800, "tokens/s"),
    ],
)
def test_a_rate_is_as_people_say_it(word: str, number: float, unit: str) -> None:
    rate = stated_rate(word)
    assert rate is not None
    assert (rate.number, rate.unit) == (pytest.approx(number), unit)


def test_every_rate_of_a_step_is_its_seconds() -> None:
    query = Query(model="llama3-8b", cluster="8xh100", batch=64, seq=4096, strategy="tp=2")
    prediction = prediction_of(read(query))
    step_s, mfu = prediction.step_time_s, prediction.mfu
    assert mfu is not None
    assert prediction.model_flops is not None
    rates = {
        "s": step_s,
        "steps/s": 1 / step_s,
        "samples/s": 64 / step_s,
        "tokens/s/GPU": 64 * 4096 / 8 / step_s,
        "MFU": mfu,
        "TFLOP/s": prediction.model_flops / 8 / step_s / 1e12,
    }
    for unit, number in rates.items():
        assert seconds_at(StatedRate("", number, unit), prediction) == pytest.approx(step_s), unit
    assert seconds_at(StatedRate("", 8 * rates["tokens/s/GPU"], "tokens/s", True), prediction) == pytest.approx(
        step_s
    )
    with pytest.raises(InputError, match="is of one GPU or of all 8; write 9600tokens/s/gpu or 9600tokens/s/all"):
        seconds_at(StatedRate("9600tok/s", 9600, "tokens/s"), prediction)


def test_a_runs_pauses_are_those_after_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "between_s": {s}}}\n' for i, s in enumerate((9.0, 1.0, 3.0, -1.0, "null", "NaN")))
    )
    assert run_files._between(tmp_path) == 2.0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run_files._between(tmp_path) == 0.0
