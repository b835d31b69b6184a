"""Numbers that are not finite: named where they arose, skipped without a trace; fp16 and its loss scale."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import fault_injection
from support.fault_injection import VICTIM, batches, held, poison
from support.rank_pool import Pool
from support.sizes import sampled

from phalanx.answers.plan import decide
from phalanx.answers.runs import train
from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.checkpoint import store
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel.bucket_buffers import square
from phalanx.runtime.process.environment import ALONE
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file, plan
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse
from phalanx.training.data import TokenSet
from phalanx.training.data.tokens import TokenRange
from phalanx.training.loss_scale import GOOD_STEPS, LossScale
from phalanx.training.trainer import Trainer
from phalanx.training.training_step import SKIPS_IN_A_ROW, StepResult, Training

SIZES = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 40}
SPEC = build(ModelSpec, complete({**SIZES, "max_seq": 16}), "model")
FULL, HALF = Precision("float32"), Precision("float16")


def strategy(line: str) -> Strategy:
    found = make_strategy(parse(line))
    assert found is not None
    return found


def job(ranks: int, precision: Precision = FULL) -> Job:
    return Job(2 * ranks, 8, precision)  # two micro-batches each


def training(precision: Precision = FULL, nonfinite: str = "stop") -> Training:
    return Training(SPEC, job(1, precision), Strategy(), Comm(ALONE, mesh(Strategy())), 0, nonfinite)  # type: ignore


def step(state: Training, i: int = 0) -> StepResult:
    return state.step(batches(ALONE, SPEC, state.job, Strategy(), i), 1e-3)


@pytest.mark.parametrize(
    "line",
    sampled(
        [
            "dp=2",
            "dp=2,zero=1",
            "dp=2,zero=2",
            "dp=2,zero=3",
            "dp=4,zero=3,shard=2",
            "dp=2,compression=int8",
            "dp=4,zero=2,shard=2,compression=int4:stochastic",
            "dp=2,zero=3,compression=int8",
            "dp=2,zero=1,compression=topk:0.1",
            "dp=2,compression=randk:0.05",
            "dp=2,compression=randk:0.05:nofeedback",
            "dp=2,compression=threshold:1e-3",
            "dp=2,zero=2,compression=powersgd:2",
        ],
        (0, 1, 2, 4, 5, 6, 7, 8, 9, 11, 12),
    ),
)
def test_a_poisoned_gradient_is_named_and_leaves_no_trace(pool: Pool, line: str) -> None:
    s = strategy(line)
    place = {2: "dp_shard 1" if s.shards > 1 else "dp_replicate 1", 4: "dp_replicate 0, dp_shard 1"}[s.dp]
    for found in pool.run(s.dp, fault_injection.spoiled_step, SPEC, job(s.dp, Precision("bfloat16")), s, "gradient"):
        assert found["said"] == (
            f"gradient of {VICTIM} on rank 1 ({place}) in micro-batch 1 is not finite (3 of 640 elements: nan)"
        )
        assert found["skipped"] == 1
        # Weights, optimizer and what compression keeps back are as if the step had never been.
        assert found["same"]
        assert found["differ"] == []


@pytest.mark.parametrize("line", sampled(["dp=2", "dp=2,zero=2", "dp=2,zero=3"], (0, 2)))
def test_a_fault_that_does_not_come_again_is_said_to_be_one(pool: Pool, line: str) -> None:
    s = strategy(line)
    for fault in ("transient", "reduced once", "reduced"):
        said = [f["said"] for f in pool.run(2, fault_injection.spoiled_step, SPEC, job(2), s, fault, "shm")]
        assert said[0] == said[1]
        assert ("did not happen again" in said[0]) == (fault != "reduced")
        if fault == "transient":
            assert f"the reduced gradient of {VICTIM} was not finite" in said[0]
        else:
            assert "on rank 1" in said[0]
            assert ("too large for its type, or communication is at fault" in said[0]) == (fault == "reduced")


def test_the_origin_in_the_forward_pass_is_named() -> None:
    state = training(nonfinite="stop")
    handle = state.model.blocks["1"].mlp.register_forward_hook(lambda m, args, out: out / 0)
    with pytest.raises(
        FloatingPointError, match=r"^output of blocks.1 on rank 0 in micro-batch 0 .*elements: (nan|inf)"
    ):
        step(state)
    handle.remove()
    assert not step(state).skipped
    before = {name: t.clone() for name, t in held(state).items()}
    with torch.no_grad():
        state.weights["blocks.1.norm1.weight"][3] = float("inf")
    with pytest.raises(FloatingPointError, match=r"^weight blocks.1.norm1.weight on .* \(1 of 16 elements: inf\)"):
        step(state)
    after = held(state)
    assert [n for n, t in before.items() if not torch.equal(t, after[n])] == ["parameters.blocks.1.norm1.weight"]


def test_too_many_skips_in_a_row_end_the_run() -> None:
    state = training(nonfinite="skip")
    for _ in range(2):  # a good step in between starts the count anew
        handle = poison(state, float("inf"), 1, 2 * (SKIPS_IN_A_ROW - 1))
        assert all(step(state).skipped for _ in range(SKIPS_IN_A_ROW - 1))
        handle.remove()
        assert not step(state).skipped
    poison(state, float("inf"), 1, 99)
    assert all(step(state).skipped for _ in range(SKIPS_IN_A_ROW - 1))
    with pytest.raises(FloatingPointError, match=f"{VICTIM} .*; {SKIPS_IN_A_ROW} steps in a row"):
        step(state)
    assert state.skipped == 3 * (SKIPS_IN_A_ROW - 1)


def test_an_overflow_halves_the_scale_and_training_goes_on() -> None:
    state, truth = training(HALF), training()
    state.loss_scale = LossScale(2.0**24, good=7)
    before = {name: w.clone() for name, w in state.weights.items()}
    skips = 0
    while (result := step(state)).skipped:
        skips += 1
        assert result.skipped.startswith("gradients overflow float16 at the loss scale ")
        assert state.loss_scale == LossScale(2.0 ** (24 - skips))
        assert all(torch.equal(before[name], w) for name, w in state.weights.items())
    assert 3 < skips == state.skipped < 12
    assert state.loss_scale == LossScale(2.0 ** (24 - skips), good=1)
    expected = step(truth)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=2e-3)
    losses = [[step(t, i).loss for i in range(1, 12)] for t in (state, truth)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    state.loss_scale = LossScale(4.0, good=GOOD_STEPS - 1)
    step(state)
    assert state.loss_scale == LossScale(8.0)


def test_the_divisor_of_the_loss_is_exact_in_fp16() -> None:
    for tokens in (1, 2, 3, 1000, 1024, 4_000_000):
        divisor = LossScale(2.0**16).divisor(tokens)
        assert 1 <= divisor * 2**16 / tokens < 2
        assert float(torch.tensor(1 / divisor, dtype=torch.float16)) in (1 / divisor, float("inf"))


def test_a_step_without_any_gradient_has_the_norm_zero_and_changes_nothing() -> None:
    """Where all weights are 0, so are all gradients; AdamW without decay then leaves weights of 0."""
    run = training()
    with torch.no_grad():
        for weight in run.weights.values():
            weight.zero_()
    result = step(run)
    assert (result.grad_norm, result.loss) == (0.0, pytest.approx(math.log(SPEC.vocab)))
    assert not any(weight.any() for weight in run.weights.values())


def test_below_the_smallest_scale_there_is_nothing_left_to_try() -> None:
    state = training(HALF, nonfinite="skip")
    state.loss_scale = LossScale(2.0)
    poison(state, float("inf"), 0, 99)
    assert step(state).skipped.endswith("at the loss scale 2; it is 1 now")
    with pytest.raises(
        FloatingPointError, match=f"at the loss scale 1, the smallest: gradient of {VICTIM} on rank 0"
    ):
        step(state)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,compression=topk:0.1"])
def test_all_ranks_skip_where_one_overflows(pool: Pool, line: str) -> None:
    half = Precision("float16", reduce="float16")
    ours, theirs = pool.run(2, fault_injection.overflow_on_one, SPEC, job(2, half), strategy(line))
    assert ours == theirs
    assert [bool(result.skipped) for result, _ in ours] == [False, True, False]
    assert [scale for _, scale in ours] == [LossScale(1024.0, 1), LossScale(512.0), LossScale(512.0, 1)]


@pytest.mark.parametrize(
    "line",
    sampled(["dp=2", "dp=2,zero=3", "dp=2,compression=threshold:1e-3", "dp=2,zero=3,compression=int8"], (0, 2, 3)),
)
def test_fp16_gradients_and_what_is_kept_back_do_not_know_the_scale(pool: Pool, line: str) -> None:
    truth = pool.run(2, fault_injection.norm_and_kept, SPEC, job(2), strategy(line), 1.0)[0]
    for scale in (2.0**6, 2.0**12):
        for reduce in ("float32", "float16"):
            half = Precision("float16", reduce=reduce)  # type: ignore[arg-type]
            found = pool.run(2, fault_injection.norm_and_kept, SPEC, job(2, half), strategy(line), scale)[0]
            assert found == pytest.approx(truth, rel=0.03)


class Folders:
    """Runs of the trainer in this process, from one text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tokens = np.random.default_rng(1).integers(61, size=2000)
        np.save(folder / "tokens.npy", tokens)
        parts = (TokenRange(folder / "tokens.npy", "", 0, 1800), TokenRange(folder / "tokens.npy", "", 1800, 200))
        self.tokens = TokenSet(folder, parts, 61, 4.0)

    def run(
        self, name: str, steps: int, resume: bool = False, last: int = 10, save_every: int = 0, late: bool = False
    ) -> tuple[list[dict[str, Any]], Any]:
        """Steps up to `steps`, of a run that is to have `last`: the lines of its metrics, and what it recorded."""
        tables: dict[str, Any] = {
            "model": {**SIZES, "max_seq": 16},
            "cluster": {"preset": "dgx-a100"},
            "job": {"global_batch": 4, "seq": 8, "precision": {"compute": "float16"}},
            "strategy": {"micro_batch": 2},
            "train": {
                "name": name,
                "steps": last,
                "lr": 1e-2,
                "save_every": save_every or steps,
                "nonfinite": "skip",
            },
        }
        decision = decide(job_file.from_tables(tables, Path()))
        run = self.folder / name
        run.mkdir(exist_ok=True)
        plan.write(decision.plan, run / "plan.json")
        trainer = Trainer(decision.plan, self.tokens, run, Comm(ALONE, mesh(Strategy())), resume)
        trainer.late = late
        if not resume:
            trainer.training.loss_scale = LossScale(2.0**20)
        trainer.run(_After(steps - trainer.start))  # type: ignore[arg-type]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return lines, train.outcome(run, 4.0)


class _After:
    """Asks for a stop in its n-th step."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __bool__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_a_run_that_overflows_is_recorded_and_resumed_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = Folders(tmp_path)
    whole, outcome = folders.run("whole", 10)
    said = capsys.readouterr().err
    skips = whole[-1]["skipped"]
    assert 1 <= skips < 9
    assert said.count("gradients overflow float16 at the loss scale") == skips
    assert "step 1 skipped: gradients overflow float16 at the loss scale 1048576; it is 524288 now" in said
    assert [row["loss_scale"] for row in whole] == [2.0 ** (20 - row["skipped"]) for row in whole]
    assert sum("skipped_because" in row for row in whole) == skips
    assert whole[0]["grad_norm"] is None
    # What is held against the prediction is a step that was made.
    assert outcome.differences == ()
    first, _ = folders.run("parts", 4)
    assert len(first) == 4
    both, _ = folders.run("parts", 10, resume=True)
    for key in ("step", "loss", "grad_norm", "loss_scale", "skipped"):
        assert [row[key] for row in both] == [row[key] for row in whole]


def test_metrics_that_are_read_one_step_late_are_the_same(tmp_path: Path) -> None:
    """As on a GPU: a step with an overflow is skipped by the optimizer's kernels, and the passes of the next one are
    run again with the smaller loss scale."""
    folders = Folders(tmp_path)
    at_once, _ = folders.run("whole", 10, save_every=4)
    late, _ = folders.run("late", 10, save_every=4, late=True)
    assert 1 <= late[-1]["skipped"] < 9
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "loss_scale", "skipped", "skipped_because")
    assert [[row.get(key) for key in keys] for row in late] == [[row.get(key) for key in keys] for row in at_once]
    # A stop that was asked for in a step is seen one step later, and that step is the last.
    stopped, _ = folders.run("stopped", 4, save_every=100, late=True)
    assert len(stopped) == 5
    resumed, _ = folders.run("stopped", 10, resume=True, late=True)
    assert [row["loss"] for row in resumed] == [row["loss"] for row in at_once]


def test_a_held_out_loss_that_is_not_finite_is_said_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of a token that no step has seen may be broken while every step's loss is finite."""
    monkeypatch.setattr(Training, "evaluate", lambda *_: (math.nan, 8.0))
    lines, outcome = Folders(tmp_path).run("run", 10, last=2)
    assert "step 2: the loss on held-out sequences is not finite" in capsys.readouterr().err
    assert (len(lines), "eval_loss" in lines[-1], outcome.eval_loss) == (2, False, None)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_step_that_the_device_skips_leaves_no_trace(optimizer: Any) -> None:
    ways = []
    for late in (False, True):
        given = replace(job(1), optimizer=Optimizer(name=optimizer))
        state = Training(SPEC, given, Strategy(), Comm(ALONE, mesh(Strategy())), 0, "skip")
        said: list[StepResult] = []
        for i in range(5):
            if i == 2:
                handle = poison(state, float("inf"), 1, 2 - late)  # once in the step, once in the search
            inputs = batches(ALONE, SPEC, given, Strategy(), i)
            found = state.issue(inputs, 1e-3) if late else state.step(inputs, 1e-3)
            said += [found] if found is not None else []
        handle.remove()
        said += [found for found in (state.settle(),) if found is not None]
        assert [bool(result.skipped) for result in said] == [False, False, True, False, False]
        ways.append(([(r.loss, r.skips) for r in said], {name: t.clone() for name, t in held(state).items()}))
    assert ways[0][0] == ways[1][0]
    assert all(torch.equal(t, ways[1][1][name]) for name, t in ways[0][1].items())


def test_an_error_leaves_the_checkpoint_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step, write = [0], Training.step, store.write

    def second_fails(self: Training, *args: Any) -> StepResult:
        steps[0] += 1
        if steps[0] == 2:
            raise FloatingPointError("poisoned")
        return step(self, *args)

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        write(*args)

    monkeypatch.setattr(Training, "step", second_fails)
    monkeypatch.setattr(store, "write", slowly)
    with pytest.raises(FloatingPointError, match="poisoned"):
        Folders(tmp_path).run("short", 10, save_every=1)
    assert store.intact_steps(tmp_path / "short" / "checkpoint") == [1]


@pytest.mark.parametrize(
    ("precision", "field"),
    [
        (Precision("float32", reduce="float16"), "reduce"),
        (Precision("bfloat16", reduce="float16"), "reduce"),
        (Precision("float16", accumulate="float16"), "accumulate"),
        (Precision("float16", master="float16"), "master"),
    ],
)
def test_fp16_without_a_loss_scale_to_hold_it_is_refused(precision: Precision, field: str) -> None:
    with pytest.raises(InputError, match=rf"job.precision.{field}.*float16.*use (float32|bfloat16)"):
        require_runnable(Strategy(), job(1, precision))


def test_a_loop_of_ones_own_has_no_loss_scale() -> None:
    with pytest.raises(InputError, match=r"precision.compute = 'float16': needs a loss scale"):
        spread(ALONE, torch.nn.Linear(2, 2), precision=HALF)


def test_the_norm_of_many_elements_is_right() -> None:
    """torch's own on the CPU is off by 1e-4 of four million numbers."""
    flat = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    for part in (flat, flat.bfloat16(), flat[:7], flat[:0]):
        true = float(part.double().square().sum())
        assert float(square(part)) == pytest.approx(true, rel=1e-5)
