"""A diagnosis names what was planted, with its seconds; and says in a line what it cannot use."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.imagined_run import Fault, Step, faults, step_of, write
from support.in_process_cli import text_of

from phalanx.answers.diagnose.causes import Evidence, causes
from phalanx.answers.diagnose.diagnosis import Diagnosis, diagnosis_of
from phalanx.answers.diagnose.planned_parts import axis_name, axis_of
from phalanx.answers.question.query import Query
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.traces import kineto
from phalanx.traces.breakdown import breakdown
from phalanx.traces.rank_trace import TracedCollective


def _query(strategy: str, gpus: int, model: str = "llama3-8b", batch: int = 8) -> Query:
    return Query(model=model, cluster="dgx-h100", gpus=gpus, batch=batch, seq=2048, strategy=strategy)


RUNS = {
    "tp2 dp2": _query("tp=2,sp=1,zero=1", 4, batch=4),
    "pp2 tp2": _query("pp=2,tp=2,sp=1,zero=0", 4),
    "ep4": _query("ep=4,zero=1", 4, "qwen3-30b-a3b", 4),
    "dp16": _query("zero=1,tp=1", 16, batch=16),
}


@pytest.fixture(scope="module", params=RUNS, ids=str)
def run(request: pytest.FixtureRequest) -> tuple[Query, Step]:
    query = RUNS[request.param]
    return query, step_of(query)


def _diagnosed(folder: Path, query: Query, step: Step, fault: Fault) -> Diagnosis:
    return diagnosis_of(write(folder, step, fault), query)


def test_a_run_as_planned_has_no_finding(run: tuple[Query, Step], tmp_path: Path) -> None:
    found = _diagnosed(tmp_path, *run, Fault())
    assert found.planned_s is not None
    assert found.step_s == pytest.approx(found.planned_s, rel=0.01)
    assert found.findings == ()
    assert sum(part.measured_s or 0.0 for part in found.parts) == pytest.approx(found.step_s)


def test_planted_faults_are_named_first_with_their_seconds(run: tuple[Query, Step], tmp_path: Path) -> None:
    query, step = run
    whole = _diagnosed(tmp_path / "whole", query, step, Fault()).step_s
    wrong = []
    planted = faults(step)
    for name, fault in planted.items():
        found = _diagnosed(tmp_path / name, query, step, fault)
        first, added = found.findings[0] if found.findings else None, found.step_s - whole
        if first is None or first.cause != name or abs(first.seconds / added - 1) > 0.2:
            wrong.append((name, added, found.findings))
    assert len(planted) >= 10
    assert len(wrong) <= len(planted) // 12, wrong


def _trace(folder: Path) -> Path:
    return Path(write(folder, step_of(RUNS["tp2 dp2"]))[0])


def test_a_trace_is_read_packed_or_not_or_cut(tmp_path: Path) -> None:
    whole = _trace(tmp_path)
    text = whole.read_bytes()
    plain = kineto.read(whole)[0]
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(text))
    assert len(kineto.read(packed)[0].start) == len(plain.start)
    (unpacked := tmp_path / "unpacked.json.gz").write_bytes(text)
    assert "not compressed" in kineto.read(unpacked)[0].notes[0]
    for name, half in (("cut.json", text[: len(text) // 2]), ("cut.json.gz", gzip.compress(text)[:-3000])):
        (tmp_path / name).write_bytes(half)
        trace = kineto.read(tmp_path / name)[0]
        assert 0 < len(trace.start) < len(plain.start)
        assert "ends in the middle" in trace.notes[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{}", "no traceEvents"),
        (b'{"traceEvents": []}', "no traceEvents"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "no activity"),
        (b'{"model": "llama", "layers": [1, 2', "no traceEvents"),
        (b'{"a" 1}', "is not a trace"),
        (
            b'{"deviceProperties": [{"name": "NVIDIA H100"}], "traceEvents": [{"ph": "X", "cat": "cpu_op", '
            b'"name": "aten::mm", "ts": 1, "dur": 2, "args": {}}]}',
            "has no kernels of its NVIDIA H100",
        ),
        (b"\x1f\x8b not gzip at all", "is damaged"),
        (b'{"traceEvents": ' + b"[" * 100_000, "is not a trace"),
    ],
)
def test_what_is_no_trace_is_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=said):
        kineto.read(file)


def test_a_trace_of_a_launching_host_alone_is_one_line(tmp_path: Path) -> None:
    """What it launched was not recorded: neither kernels nor operators."""
    file = tmp_path / "trace.json"
    event = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
    file.write_text(json.dumps({"traceEvents": [{**event, "args": {}}]}))
    with pytest.raises(InputError, match="records neither kernels nor operators"):
        diagnosis_of([str(file)], RUNS["tp2 dp2"])


def test_ranks_and_worlds_must_agree_with_the_plan(tmp_path: Path) -> None:
    files = write(tmp_path, step_of(RUNS["tp2 dp2"]))
    with pytest.raises(InputError, match="is of rank 0"):
        diagnosis_of([files[0], files[0]], RUNS["tp2 dp2"])
    with pytest.raises(InputError, match="is of 4 ranks, and the plan has 8"):
        diagnosis_of(files, _query("tp=2", 8))


def test_a_rate_is_a_step_and_its_count_of_flops_is_named(tmp_path: Path) -> None:
    query = RUNS["tp2 dp2"]
    found = diagnosis_of(["300TFLOP/s"], query)
    assert found.rate is not None
    assert found.rate.tflops == pytest.approx(300)
    assert "full square" in found.rate.stated_count
    log = tmp_path / "train.log"
    rate = found.rate.tflops * 0.9
    log.write_text(
        f" elapsed time per iteration (ms): {1000 * found.step_s} | throughput per GPU (TFLOP/s/GPU): {rate} |\n"
    )
    other = diagnosis_of([str(log)], query).rate
    assert other is not None
    assert other.stated_count == "-10% of the FLOPs counted here"
    # Seconds in words go before the log's, and those before the seconds of a rate.
    for words, seconds in ((["600TFLOP/s"], found.step_s), (["600TFLOP/s", "1.5 s"], 1.5)):
        both = diagnosis_of([str(log), *words], query)
        assert both.step_s == pytest.approx(seconds)
        assert both.rate is not None
        assert both.rate.stated_tflops == 600
    with pytest.raises(InputError, match="is a rate of an unknown step"):
        diagnosis_of(["300TFLOP/s"], Query())


@pytest.mark.parametrize(
    ("step", "precision", "refused"), [("0.5s", "bf16", True), ("0.5s", "fp8", False), ("0.2s", "fp8", True)]
)
def test_a_step_shorter_than_its_products_is_not_of_this_plan(step: str, precision: str, refused: bool) -> None:
    """6 x 8.03e9 parameters x 262,144 tokens on 16 H100 are at least 0.8 s in 16 bits and 0.4 s in 8."""
    query = Query(None, "llama3-8b", "dgx-h100", 16, 32, 8192, "dp=16,zero=1", "megatron-core", precision)
    if not refused:
        assert diagnosis_of([step], query).rate is not None
        return
    with pytest.raises(InputError, match="is not of this plan"):
        diagnosis_of([step], query)


def test_nested_operators_count_once(tmp_path: Path) -> None:
    """On the CPU an operator contains those that it calls: attention its products, a linear layer its addmm."""

    def op(name: str, start: float, seconds: float) -> dict[str, object]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 1e6 * start, "dur": 1e6 * seconds}

    events = [
        op("aten::_scaled_dot_product_attention_math", 0, 4),
        op("aten::bmm", 1, 1),
        op("aten::linear", 5, 2),
        op("aten::addmm", 5.5, 1),
        op("aten::gelu", 7.0001, 1),
    ]
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps(events))
    parts = breakdown(kineto.read(file)[0], lambda call: call.group).parts
    assert parts == pytest.approx({"attention": 4, "products": 1, "memory": 2, "launches": 1e-4, "host": 1})


@pytest.mark.parametrize("where", ["user_annotation", "gpu_user_annotation"])
def test_without_marked_steps_a_step_is_from_one_update_to_the_next(tmp_path: Path, where: str) -> None:
    """Of four updates, the annotations of the CPU or, if it has none, those of the GPU."""

    def event(category: str, name: str, start: float, seconds: float) -> dict[str, object]:
        times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
        return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 0, **times}

    ends = (1.0, 3.0, 4.5, 8.5)
    updates = [event(where, "Optimizer.step#AdamW.step", end - 0.25, 0.25) for end in ends]
    kernels = [event("kernel", "ampere_bf16_gemm", end - 0.75, 0.25) for end in ends]
    (tmp_path / "trace.json").write_text(json.dumps([*updates, *kernels]))
    found = breakdown(kineto.read(tmp_path / "trace.json")[0], lambda call: call.group)
    assert (found.steps, found.step_s, found.step_times) == (3, pytest.approx(2.5), pytest.approx((2.0, 1.5, 4.0)))


def test_our_own_timeline_of_a_slower_machine_is_no_recomputation(tmp_path: Path) -> None:
    """Both passes twice as long as planned are slow passes; a backward pass longer by a forward one repeats it."""

    def own(op: str, start: float, seconds: float) -> dict[str, object]:
        times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
        return {
            "ph": "X",
            "cat": "compute",
            "name": f"{op} blocks.0",
            "pid": 0,
            "tid": 0,
            **times,
            "args": {"op": op},
        }

    def parts(*events: dict[str, object]) -> dict[str, float]:
        file = tmp_path / "trace.json"
        file.write_text(json.dumps({"traceEvents": list(events)}))
        return breakdown(kineto.read(file)[0], lambda call: call.group).parts

    measured = parts(own("loading", 0, 0.5), own("forward", 0.5, 1), own("backward", 1.5, 2))
    assert measured == pytest.approx({"forward": 1, "backward": 2, "loading": 0.5})
    for backward, name in ((4.0, None), (5.9, "recomputation")):
        slow = parts(own("forward", 0, 2), own("backward", 2, backward))
        own_step = breakdown(kineto.read(tmp_path / "trace.json")[0], lambda call: call.group)
        planned = {"forward": 1.0, "backward": 2.0}
        evidence = Evidence(
            strategy=Strategy(),
            grid=mesh(Strategy()),
            ranks_per_node=1,
            own=own_step,
            ranks=[own_step],
            gaps={part: slow[part] - planned[part] for part in planned},
            planned=planned,
            axes={},
            spread_out=frozenset(),
            fp32_share=0.0,
        )
        assert [c.name for c in causes(evidence) if c.name == "recomputation"] == ([name] if name else [])


def test_every_axis_of_a_mesh_belongs_to_one_of_the_plan() -> None:
    for s in (Strategy(dp=4, zero=1, shard=2, tp=2, cp=2, pp=2), Strategy(dp=4, zero=1, shard=2, local=8)):
        assert {axis_name(name) for name, _ in mesh(s).axes} <= {"dp", "tp", "cp", "pp"}


def test_a_group_whose_ranks_a_trace_does_not_list_is_named_by_its_size() -> None:
    named = axis_of(Strategy(dp=2, tp=4))
    assert named(TracedCollective("all_reduce", size=4)) == "tp"
    assert named(TracedCollective("all_reduce", size=2)) == "dp"
    assert named(TracedCollective("all_reduce", ranks=(0, 4))) == "dp"


def test_attention_that_is_recomputed_adds_to_attention_and_launches_alone() -> None:
    plain, selective = (
        step_of(_query(f"tp=2,sp=1,zero=1,recompute={kind}", 4, batch=4)).parts for kind in ("none", "selective")
    )
    longer = {part for part in selective if selective[part] > plain.get(part, 0.0) * (1 + 1e-9)}
    assert longer == {"attention", "launches"}


def test_a_plan_among_the_files_is_the_plan(tmp_path: Path) -> None:
    """As people type it: `phalanx diagnose plan.json run.log`."""
    plan = tmp_path / "any_name.json"
    words = (
        "plan --model llama3-8b --cluster dgx-h100 --gpus 8 --batch 8 --seq 2048 --strategy tp=8 --out any_name.json"
    )
    text_of(tmp_path, words)
    beside = diagnosis_of([str(plan), "4.3s"], Query())
    named = diagnosis_of(["4.3s"], Query(plan))
    assert beside.planned_s is not None
    assert (beside.planned_s, beside.step_s, beside.findings) == (named.planned_s, named.step_s, named.findings)
