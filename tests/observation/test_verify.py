"""The real step without tensors' content: every strategy that can be drawn is proved, and what is broken is named."""

import gc
import json
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fresh_process import in_fresh_process
from support.in_process_cli import error_of, json_of, phalanx, text_of
from support.proving import prove
from support.sizes import examples, sampled
from support.strategies import cases
from torch._subclasses.fake_tensor import FakeTensorMode

import phalanx as library
from phalanx.answers.plan import decide
from phalanx.cost.step.expand import expand
from phalanx.observation.diff import memory_differences, slack
from phalanx.observation.fake import world
from phalanx.observation.fake.result_cache import ResultCache
from phalanx.observation.steady_state import SteadyState
from phalanx.observation.trainer.pipeline import PassRecord
from phalanx.observation.trainer.step import record_cut_step, record_step
from phalanx.observation.trainer.verify import ProvedClass, verify
from phalanx.observation.unobservable import Unsteady
from phalanx.runtime.data_parallel import engine, zero3
from phalanx.runtime.tracing import host_values
from phalanx.schedule.event import Event
from phalanx.schedule.layout import Layout
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files import plan as plans
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.training import training_step

SIZES = {
    "family": "llama",
    "vocab": 300,
    "hidden": 64,
    "layers": 3,
    "heads": 4,
    "ffn": 96,
    "max_seq": 64,
    "tied": False,
}
MODEL = build(ModelSpec, complete(SIZES), "model")
JOB = Job(global_batch=128, seq=32)
FEW = Job(global_batch=8, seq=32)


@examples(2, 60)
def test_drawn_strategies_of_large_worlds_are_proved(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.sampled_from([8, 64, 1000]).flatmap(lambda ranks: cases(ranks, small=False, compressed=ranks < 100)))
    def proved(case: tuple[ModelSpec, Job, Strategy]) -> None:
        prove(*case)

    proved()


@pytest.mark.parametrize(
    "strategy",
    sampled(
        [
            "dp=4,zero=2",
            "dp=4,zero=3",
            "dp=4,zero=3,reshard=step",
            "dp=4,compression=int8",
            "pp=2,dp=2,zero=2",
            "pp=2,dp=2,zero=3,schedule=zb-v",
        ],
        (1, 5),
    ),
)
def test_repeated_micro_batches_equal_executed_ones(strategy: str) -> None:
    s = _strategy(strategy)
    job = replace(JOB, global_batch=s.dp * 6)
    cut = record_step(MODEL, job, s, 1)
    assert cut.ran < 6
    whole = record_cut_step(MODEL, job, s, 1, first=6)
    assert whole.ran == 6
    assert len(cut.events) == len(whole.events)
    for a, b in zip(cut.events, whole.events, strict=True):
        assert a.identity == b.identity
        assert a.flops == b.flops
        assert abs(a.alloc - b.alloc) < 64
    assert cut.memory.state == whole.memory.state
    assert abs(cut.memory.peak - whole.memory.peak) < 256


@examples(2, 20)
def test_remembered_results_change_no_record(examples: int) -> None:
    @settings(max_examples=examples)
    @given(case=st.sampled_from([1, 4]).flatmap(lambda ranks: cases(ranks, small=False, compressed=True)))
    def equal(case: tuple[ModelSpec, Job, Strategy]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            ours = record_step(*case, rank=0)
            patch.setattr(ResultCache, "run", lambda self, func, args, kwargs, tensors: func(*args, **kwargs))
            assert record_step(*case, rank=0) == ours

    equal()


def test_ranks_that_hold_only_padding_are_a_class() -> None:
    """Of 1,000 ranks most hold nothing: the optimizer has no parameters there."""
    first, last = verify(MODEL, replace(JOB, global_batch=4000), Strategy(dp=4000, zero=3))
    assert (first.ranks.rank, last.ranks.rank) == (0, 3999)
    assert first.ranks.count + last.ranks.count == 4000
    assert first.proved
    assert last.proved
    assert last.recorded is not None
    assert first.recorded is not None
    assert last.recorded.memory.state < first.recorded.memory.state


def _strategy(line: str) -> Strategy:
    from phalanx.spec.files.job_file import make_strategy

    found = make_strategy(line)
    assert found is not None
    return found


def _replace(patch: pytest.MonkeyPatch, target: Any, name: str, fault: Callable[..., Any]) -> None:
    original = getattr(target, name)
    patch.setattr(target, name, lambda self, *args, **kwargs: fault(original, self, *args, **kwargs))


def _broken(strategy: str, target: Any, name: str, fault: Callable[..., Any]) -> ProvedClass:
    """Verify with a method replaced by `fault`, which takes the original before its arguments."""
    with pytest.MonkeyPatch.context() as patch:
        _replace(patch, target, name, fault)
        found = verify(MODEL, JOB, _strategy(strategy))[0]
    assert not found.proved
    return found


def test_too_many_blocks_are_refused_before_any_runs() -> None:
    deep = build(ModelSpec, complete(SIZES | {"layers": 1026}), "model")
    with pytest.raises(InputError, match=r"model\.layers = 1026: a rank would execute 513 blocks, 512 at most"):
        verify(deep, Job(global_batch=2, seq=32), Strategy(pp=2))


def test_a_bucket_too_many_is_named() -> None:
    def finish(original: Any, self: Any) -> None:
        b = self.buckets[0]
        self.comm.all_reduce(b.sent, b.axis, unit=b.name, phase="B", micro_batch=self._micro_batch)
        original(self)

    found = _broken("dp=64,bucket=0.1", engine.DataParallel, "finish", finish)
    (difference,) = found.differences
    assert difference.aspect == "collectives over dp_replicate"
    assert "one too many is issued" in difference.cause
    assert "all_reduce bucket.0 over dp_replicate (64 ranks)" in difference.recorded
    assert difference.predicted == "nothing"


def test_a_unit_that_is_gathered_twice_is_named() -> None:
    def start(original: Any, self: Any, name: str, phase: Any) -> None:
        original(self, name, phase)
        unit = self.units[name]
        if name == "blocks.1" and phase == "B" and not unit.gathered and self._micro_batch == 1:
            own = unit.flat.own(unit.memory)
            more = {"unit": name, "phase": phase, "micro_batch": self._micro_batch}
            self.comm.all_gather(unit.memory, own, "dp_shard", **more)

    found = _broken("dp=64,zero=3", zero3.ParameterGatherer, "start", start)
    (difference,) = found.differences
    assert difference.aspect == "collectives over dp_shard"
    assert "all_gather blocks.1 over dp_shard (64 ranks) micro-batch 1" in difference.recorded
    assert any(i == difference.number and ours != theirs for i, ours, theirs in difference.around)


def test_a_bucket_that_is_forgotten_is_named() -> None:
    def issue(original: Any, self: Any) -> None:
        if self._next == 1:
            self._next += 1
        else:
            original(self)

    found = _broken("dp=64,bucket=0.1", engine.DataParallel, "_issue", issue)
    assert "bucket.1" in str(found.differences[0])
    assert "one is missing" in str(found.differences[0])


def test_memory_that_stays_is_named() -> None:
    kept: list[torch.Tensor] = []

    def ends(original: Any, self: Any, name: str, out: Any) -> None:
        original(self, name, out)
        if name == "blocks.1":
            kept.append(out.detach().clone())
            kept.append(torch.empty(2**16))

    found = _broken("dp=64,zero=3", zero3.ParameterGatherer, "forward_ends", ends)
    kept.clear()
    assert [d.aspect for d in found.differences] == ["live bytes before forward blocks.2 of micro-batch 0"]


def test_tensors_of_the_caller_do_not_count() -> None:
    with FakeTensorMode():
        theirs = [torch.empty(2**16), torch.nn.Linear(8, 8)]
    prove(MODEL, FEW, Strategy(dp=2))
    assert theirs


def test_other_flops_are_named() -> None:
    def passes(original: Any, self: Any, batches: Any, seed: float) -> Any:
        torch.empty(8, 8) @ torch.empty(8, 8)
        result = original(self, batches, seed)
        torch.empty(8, 8) @ torch.empty(8, 8)
        return result

    found = _broken("dp=64", training_step.Training, "_passes", passes)
    assert [d.aspect for d in found.differences] == ["FLOPs of B embed"]
    assert found.differences[0].recorded == f"{2 * 8**3:,}"


def test_a_collective_that_bypasses_comm_is_named_with_its_line() -> None:
    def finish(original: Any, self: Any) -> None:
        dist.all_reduce(self.buckets[0].shard)
        original(self)

    found = _broken("dp=64", engine.DataParallel, "finish", finish)
    assert "c10d.allreduce_.default bypasses comm, at " in found.failed
    assert "test_verify.py" in found.failed
    assert "(finish)" in found.failed


def test_reading_a_value_fails_the_step_and_names_the_line() -> None:
    def square(original: Any, self: Any) -> Any:
        found = original(self)
        return found * float(found)

    found = _broken("dp=64", engine.DataParallel, "norm_square", square)
    assert "reads the value of a tensor, at " in found.failed
    assert "(square)" in found.failed


def test_nothing_is_left_behind() -> None:
    hook, reads = sys.excepthook, host_values.read
    gc.unfreeze()  # as in a program that has frozen nothing itself
    world._frozen_before.cache_clear()
    try:
        verify(MODEL, FEW, Strategy(dp=2))
        assert gc.get_freeze_count() == 0
        gc.freeze()  # as in one that has
        world._frozen_before.cache_clear()
        count = gc.get_freeze_count()
        with world.frozen_objects():
            pass
        assert gc.get_freeze_count() > count // 2  # some of them end
    finally:
        gc.freeze()
        world._frozen_before.cache_clear()
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert host_values.read is reads


def test_memory_of_a_step_is_compared_over_time() -> None:
    """Less than the slack passes, more does not, at whatever instant."""
    strategy = Strategy(dp=2, zero=3)
    recorded = record_step(MODEL, FEW, strategy, 0)
    program = expand(Layout(MODEL, FEW, strategy).rank_view(0))
    held = recorded.memory
    assert not list(memory_differences(program, recorded.events, held))
    for i, event in enumerate(recorded.events):
        if event.kind == "compute":
            events = (*recorded.events[:i], replace(event, alloc=event.alloc + 2**16), *recorded.events[i + 1 :])
            assert len(list(memory_differences(program, events, held))) == 1
    for name in ("state", "first", "before", "end", "peak"):
        other = replace(held, **{name: getattr(held, name) + 2**16})
        assert list(memory_differences(program, recorded.events, other)), name
    most, whole = slack(program), program.state.total
    exact = {"state": whole, "before": whole + program.before, "end": whole, "peak": program.peak_bytes}
    for name, bytes_ in exact.items():  # the slack itself passes
        for off, wrong in ((most, 0), (-most, 0), (most + 1, 1)):
            other = replace(held, **{name: bytes_ + off})
            assert len(list(memory_differences(program, recorded.events, other))) == wrong, (name, off)


JOB_FILE = """
[model]
preset = "llama3-8b"
layers = 2
[job]
global_batch = 64
seq = 8192
precision = { compute = "bfloat16" }
"""


def _run_and_largest_memory(here: Path, *words: str) -> tuple[tuple[int, str, str], int]:
    return phalanx(here, *words), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_the_command_proves_a_large_model_in_little_memory(tmp_path: Path) -> None:
    """1.5 B parameters: 2.9 GiB of weights alone in bfloat16, and none of them is allocated."""
    (tmp_path / "job.toml").write_text(JOB_FILE)
    # A process's largest memory begins with that of the one it is forked from, here that of the pool's ranks.
    words = ("verify", "job.toml", "--strategy", "dp=64,zero=1", "--json")
    (code, out, err), largest = in_fresh_process(_run_and_largest_memory, tmp_path, *words)
    assert code == 0, err
    found = json.loads(out)
    assert found["proved"]
    assert found["world"] == 64
    (only,) = found["classes"]
    assert only["rank_count"] == 64
    assert only["recorded"]["peak_bytes"] > 10 * 2**30
    assert abs(only["recorded"]["peak_bytes"] - only["predicted"]["peak_bytes"]) <= only["largest_deviation_bytes"]
    assert largest < 2**20  # KiB


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB_FILE)
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    for arguments, message in (
        ([str(tmp_path / "job.tom")], "no such file"),
        ([str(plan)], "is not a plan.json"),
        ([str(plan), "--strategy", "dp=2"], "a plan is verified unchanged"),
        ([str(job), "--strategy", "dp=60"], "does not divide job.global_batch"),
        ([str(job), "--strategy", "dp=64,ep=2"], "the model has no experts"),
        ([str(job), "--strategy", "dp=64", "--cluster", "dgx-h10"], "did you mean dgx-h100"),
    ):
        err = error_of(tmp_path, "verify", *arguments)
        assert message in err
        assert len(err.strip().splitlines()) == 1


def test_a_record_represents_later_passes_only_after_two_equal_ones() -> None:
    sent = Event("collective", "all_reduce", "B", axis="tp", group_size=2, bytes=64)
    passes = [PassRecord((sent.at("block", m), *[sent] * (m == 2)), (0, 0), 0) for m in range(4)]
    steady = SteadyState[PassRecord](PassRecord.same)
    for record, represented in zip(passes, (False, True, False, False), strict=True):
        steady.add("F", record)
        assert (steady.steady("F") is not None) == represented
    with pytest.raises(Unsteady):
        steady.repeat("F")


def test_the_command_sums_up_several_classes(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB_FILE)
    line = ["verify", str(job), "--strategy", "dp=4,pp=2", "--cluster", "dgx-h100", "--set", "job.seq=512"]
    code, out, _ = phalanx(tmp_path, *line)
    assert (code, out.count("\nrank ")) == (0, 2)
    assert "all 8 ranks proved by the steps of 2, in " in out


def test_the_command_shows_the_first_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB_FILE)
    original = engine.DataParallel._issue

    def twice(self: Any) -> None:
        original(self)
        if self._next == 2:
            b = self.buckets[0]
            self.comm.all_reduce(b.sent, b.axis, unit=b.name, phase="B", micro_batch=self._micro_batch)

    monkeypatch.setattr(engine.DataParallel, "_issue", twice)
    line = ["verify", str(job), "--strategy", "dp=32,pp=2", "--cluster", "dgx-h100", "--set", "job.seq=512"]
    code, out, _ = phalanx(tmp_path, *line)
    assert code == 1
    assert "NOT proved: 2 of 2 steps (ranks 0, 32)" in out
    assert "NOT proved: collectives over dp_replicate, event" in out
    assert "one too many is issued; all others are as predicted" in out
    assert "→" in out


def test_precision_of_the_state_is_that_of_the_job() -> None:
    for compute in ("float32", "bfloat16"):
        prove(MODEL, replace(FEW, precision=Precision(compute)), Strategy(dp=4, zero=2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "name", "what"),
    [
        ("dp=64,bucket=0.1", "begin", "the most live bytes before the first pass"),
        ("dp=64,zero=1", "updated", "live bytes in optimizer"),
    ],
)
def test_memory_outside_of_the_passes_is_seen(strategy: str, name: str, what: str) -> None:
    kept: list[torch.Tensor] = []

    def allocating(original: Any, self: Any) -> None:
        original(self)
        (kept if name == "updated" else []).append(torch.empty(2**16))

    with pytest.MonkeyPatch.context() as patch:
        training = training_step.Training.__init__

        def begin(self: Any, *args: Any, **more: Any) -> None:
            training(self, *args, **more)
            _replace(patch, engine.DataParallel, name, allocating)

        patch.setattr(training_step.Training, "__init__", begin)
        found = verify(MODEL, JOB, _strategy(strategy))[0]
    assert [d.aspect for d in found.differences] == [what]


def test_the_order_over_all_axes_is_compared() -> None:
    """Replicas reduced before the bucket's own reduction: each axis for itself is in order."""

    def issue(original: Any, self: Any) -> None:
        original(self)
        if self._next == len(self.buckets) and self._last:
            self.comm.recorder.events[-2:] = reversed(self.comm.recorder.events[-2:])

    found = _broken("dp=64,zero=2,shard=8,bucket=0.1", engine.DataParallel, "_issue", issue)
    assert [d.aspect for d in found.differences] == ["order"]


def test_a_collective_without_a_wait_is_named() -> None:
    def complete(original: Any, self: Any, b: Any) -> None:
        if b.name == "bucket.1":
            b.handle = None
        else:
            original(self, b)

    found = _broken("dp=64,bucket=0.1", engine.DataParallel, "_complete", complete)
    assert [str(d) for d in found.differences] == [
        "waits: predicted for every collective, recorded none for all_reduce of bucket.1 over dp_replicate"
    ]


@pytest.mark.parametrize("call", ["barrier", "broadcast", "gather_objects"])
def test_calls_that_are_not_recorded_are_refused_inside_a_step(call: str) -> None:
    def finish(original: Any, self: Any) -> None:
        arguments = {"barrier": (), "broadcast": (torch.empty(1), "world"), "gather_objects": (1, "world")}
        getattr(self.comm, call)(*arguments[call])
        original(self)

    found = _broken("dp=64", engine.DataParallel, "finish", finish)
    assert call in found.failed
    assert "is issued inside a step but not recorded" in found.failed


def test_an_error_in_the_step_is_named_with_its_line() -> None:
    def finish(original: Any, self: Any) -> None:
        torch.empty(2, 3) @ torch.empty(2, 3)
        original(self)

    found = _broken("dp=64", engine.DataParallel, "finish", finish)
    assert "RuntimeError" in found.failed
    assert "(finish)" in found.failed


def test_a_plan_whose_figures_are_not_its_own_is_not_proved(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    few = JOB_FILE.replace("global_batch = 64", "global_batch = 8")
    job.write_text(few.replace('preset = "llama3-8b"\nlayers = 2', _TINY) + _CLUSTER)
    prediction = json_of(tmp_path, "plan", str(job), "--strategy", "dp=8,zero=2", "--set", "job.seq=32", "--json")[
        "best"
    ]
    assert prediction.pop("strategy")
    file = job_file.load(job, ["job.seq=32", "strategy=dp=8,zero=2"])
    decision = decide(file)
    plans.write(decision.plan, tmp_path / "plan.json")
    (tmp_path / "recorded.json").write_text('{"interr')
    code, out, err = phalanx(tmp_path, "verify", str(tmp_path / "plan.json"))
    assert code == 0, out
    assert "recorded.json holds no measured peak memory" in err
    for name, wrong in (("memory_bytes", 1), ("flops", 1), ("bytes_per_axis", {"dp_shard": 7})):
        edited = replace(decision.plan, prediction={**decision.plan.prediction, name: wrong})
        plans.write(edited, tmp_path / "plan.json")
        code, out, _ = phalanx(tmp_path, "verify", str(tmp_path / "plan.json"))
        assert code == 1
        assert f"NOT proved: {name} of the plan" in out


_TINY = 'family = "llama"\nvocab = 300\nhidden = 64\nlayers = 1\nheads = 4\nffn = 96\nmax_seq = 64'
_CLUSTER = '[cluster]\npreset = "dgx-h100"\n'


@pytest.mark.parametrize("zero", sampled([0, 2], (1,)))
def test_factors_of_a_high_rank_are_proved(zero: int) -> None:
    """What a decomposition works in is larger than any piece that other compressors code."""
    spec = build(ModelSpec, complete(SIZES | {"vocab": 8000, "hidden": 256}), "model")
    prove(spec, JOB, Strategy(dp=8, zero=zero, compression="powersgd:64"))  # type: ignore[arg-type]


def _about_a_small_model(here: Path) -> list[str]:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 300, "n_positions": 256}
    (here / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    return ["--model", "config.json", "--cluster", "dgx-h100", "--gpus", "8", "--batch", "8", "--seq", "256"]


def test_options_replace_a_job_file(tmp_path: Path) -> None:
    """Without a file verify takes the options of predict; GPUs fill dp."""
    asked = _about_a_small_model(tmp_path)
    code, out, err = phalanx(tmp_path, "verify", *asked, "--strategy", "tp=4,zero=1", "--json")
    assert code == 0, err
    assert json.loads(out)["strategy"].startswith("dp=2,zero=1,tp=4")
    assert "dp=2 fills 8 GPUs over tp=4" in err
    for words, said in ((["--precision", "nvfp4"], "--precision"), (["--set", "job.seq=8"], "--set")):
        assert error_of(tmp_path, "verify", *asked, "--strategy", "tp=4", *words).startswith(f"error: {said}")


def _verified_on(config: Path, device: str) -> tuple[bool, bool]:
    asked: Any = {"model": str(config), "cluster": "dgx-h100", "gpus": 2, "batch": 2, "seq": 64, "strategy": "dp=2"}
    found = library.verify(**asked, device=device)
    return found.proved, found.on_gpu


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_notebook_verifies_on_the_device_that_it_names(tmp_path: Path, device: str) -> None:
    _about_a_small_model(tmp_path)
    assert in_fresh_process(_verified_on, tmp_path / "config.json", device) == (True, device == "cuda")


def test_a_plan_of_another_stack_fails_where_traffic_differs(tmp_path: Path) -> None:
    asked = _about_a_small_model(tmp_path)
    assert phalanx(tmp_path, "plan", *asked)[0] == 0
    plan = plans.read(tmp_path / "plan.json")
    plans.write(replace(plan, strategy=_strategy("dp=8,zero=1")), tmp_path / "plan.json")
    out = text_of(tmp_path, "verify plan.json")
    assert "megatron-core's own program is not run" in out
    # Its gradients are reduced in two bytes, ours in four.
    choices = {**plan.choices, "stack": "nemo-25.02"}
    plans.write(replace(plan, strategy=_strategy("dp=8,zero=1"), choices=choices), tmp_path / "plan.json")
    code, out, _ = phalanx(tmp_path, "verify plan.json")
    assert code == 1
    assert "NOT proved: bytes that the job sends over dp" in out
