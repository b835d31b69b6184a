"""A user's own steps: planted factors are found again, few steps move little, logs of every framework are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.fitted_cluster import laptop
from typer.testing import CliRunner

from phalanx.answers.machine.calibration import _rows, calibration_of
from phalanx.answers.plan import decide
from phalanx.answers.question.query import Query
from phalanx.answers.question.resolution import read
from phalanx.cli.app import app
from phalanx.cost.analytic.chips import with_calibration
from phalanx.cost.analytic.step import step
from phalanx.frameworks.step_logs import step_time
from phalanx.spec.cluster.calibration import Calibration
from phalanx.spec.documents import read_log
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files import plan as plans
from phalanx.spec.files.cluster_toml import to_toml
from phalanx.validate import calibrate as calibration
from phalanx.validate.calibrate import PRIORS, Floats, calibrate

_LAYOUTS = ("tp=8", "tp=4", "tp=2,zero=3", "zero=3", "tp=8,pp=2", "tp=4,pp=4", "tp=2,pp=2", "cp=2,tp=4")


def _price(lines: tuple[str, ...] = _LAYOUTS) -> Callable[[Calibration], Floats]:
    asked = [
        read(Query(model="llama3-8b", cluster="dgx-h100", gpus=64, batch=128, seq=8192, strategy=line)).estimate
        for line in lines
    ]

    def price(by: Calibration) -> Floats:
        return np.array(
            [float(step(e.shape, e.layout, with_calibration(e.system, by), e.profile).seconds) for e in asked]
        )

    return price


def test_planted_factors_are_found_again() -> None:
    price = _price()
    fit = calibrate(price, price(Calibration(products=1.15, between=1.6)))
    assert max(map(abs, fit.before)) > 8
    assert max(map(abs, fit.after)) < 3
    assert float(np.median(np.abs(fit.left_out))) < 4
    assert fit.calibration.products == pytest.approx(1.15, rel=0.05)
    assert fit.calibration.between > 1.2
    assert fit.spread["products"] < PRIORS["products"] / 2


def test_what_steps_depend_on_is_narrowed_and_nothing_else() -> None:
    def price(by: Calibration) -> Floats:
        return np.array([by.products, by.products * by.between, by.products])

    fit = calibrate(price, price(Calibration(products=1.1)))
    assert all(fit.spread[part] < PRIORS[part] / 2 for part in ("products", "between"))
    assert all(fit.spread[part] == pytest.approx(PRIORS[part]) for part in ("attention", "memory", "inside", "host"))


@pytest.mark.parametrize("odd", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_takes_a_positive_time(odd: float) -> None:
    price = _price(("tp=8", "dp=8"))
    with pytest.raises(InputError, match="not positive"):
        calibrate(price, [1.0, odd])


def test_steps_that_contradict_each_other_bend_little() -> None:
    price, swings = _price(), np.resize([1.3, 1 / 1.3], len(_LAYOUTS))
    fit = calibrate(price, swings * price(Calibration()))
    assert max(abs(np.log(getattr(fit.calibration, part))) for part in PRIORS) < 0.12


def test_an_error_by_the_others_is_that_of_a_fit_to_them() -> None:
    lines = _LAYOUTS[:5]
    measured = _price(lines)(Calibration(products=1.2, inside=1.3)) * np.array([1.01, 0.98, 1.02, 1.0, 0.99])
    found = calibrate(_price(lines), measured).left_out
    for i, off in enumerate(found):
        rest = [k for k in range(len(lines)) if k != i]
        by = calibrate(_price(tuple(lines[k] for k in rest)), measured[rest], left_out=False).calibration
        assert off == pytest.approx(100 * (_price(lines)(by)[i] / measured[i] - 1), abs=1)


def test_more_steps_are_priced_no_more_often() -> None:
    asked = []
    for n in (2, 8):
        price, count = _price(_LAYOUTS[:n]), [0]

        def counted(
            by: Calibration, price: Callable[[Calibration], Floats] = price, count: list[int] = count
        ) -> Floats:
            count[0] += 1
            return price(by)

        calibrate(counted, 1.2 * price(Calibration()))
        asked.append(count[0])
    assert max(asked) <= 2 + 7 * 12


def test_one_step_cannot_move_a_factor_far() -> None:
    """A step that is twice as slow as predicted bends no part by more than three and a half of its spreads."""
    price = _price(("tp=8",))
    fit = calibrate(price, 2 * price(Calibration()))
    for part, spread in PRIORS.items():
        assert abs(np.log(getattr(fit.calibration, part))) <= 3.5 * spread + 1e-9
    assert fit.calibration.products < 1.2
    assert -50 < fit.after[0] < -5
    assert fit.left_out == ()


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        (
            " [2025-08-01 07:19:50] iteration        2/    5000 | consumed samples:          256 | elapsed time per "
            "iteration (ms): 4412.3 | learning rate: 1.4E-07 | global batch size:   128 | lm loss: 1.04E+01 |",
            4.4123,
        ),
        ("Step Time : 9.09s GPU utilization: 663.5MODEL_TFLOP/s/GPU", 9.09),
        (
            "Training epoch 0, iteration 1/249 | lr: 3.922e-06 | global_batch_size: 8 | global_step: 1 | "
            "reduced_train_loss: 1.653 | train_step_timing in s: 2.505 | consumed_samples: 16",
            2.505,
        ),
        ("100%|####| 100/100 [10:48<00:00, global_step=99.00, train_step_timing in s=3.130]", 3.13),
        ("completed step: 7, seconds: 1.150, TFLOP/s/device: 470.000, Tokens/s/device: 57000.000", 1.15),
        ("iteration: 5 / 100 | consumed_tokens: 10K | elapsed_time_per_iteration_ms: 1.5K | tokens_per_sec: 2M", 1.5),
        ("step: 10  loss:  8.1  memory: 55.4GiB(58%)  tps: 4,096  tflops: 200.1  mfu: 20.1%", 128 * 8192 / 4096 / 64),
        (
            "[INFO] [timer.py:260:stop] epoch=0/micro_step=3/global_step=3, RunningAvgSamplesPerSec=70.1, "
            "CurrSamplesPerSec=64.0, MemAllocated=4.75GB, MaxMemAllocated=15.59GB",
            2.0,
        ),
        ("{'train_runtime': 100.0, 'train_samples_per_second': 9.2, 'train_steps_per_second': 0.25}", 4.0),
        ('{"step": 3, "loss": 2.1, "step_time_s": 0.5, "tokens_per_s": 1000}', 0.5),
        ("  1%|▏         | 24/1752 [01:08<1:22:56,  2.88s/it]", 2.88),
        ("[1763]  98%|█████████▊| 1717/1752 [10:06:28<12:25, 21.30s/it]", 21.3),
        ("\r 50%|#####     | 5/10 [00:01<00:01,  4.00it/s]", 0.25),
        (
            "steps: 20 loss: 4.6178 iter time (s): 0.994 samples/sec: 257.601\n"
            "rank=0 time (ms) | forward: 2785.85 | backward: 5153.22 | step: 12.50",  # of all steps since the last
            0.994,
        ),
        (
            "[Rank 0] time (ms) | fwd_microstep: 38.5 | bwd_microstep: 112.9 | step_microstep: 8.2\n"
            "[Rank 0] time (ms) | fwd: 100.5 | bwd: 300.0 | bwd_inner: 280.0 | bwd_allreduce: 20.0 | step: 99.5",
            0.5,
        ),
        (
            "rank=0 time (ms) | forward: 27.41 | backward: 73.44 | backward_inner: 50.99 | backward_allreduce: 22.40 "
            "| step: 72.82",
            0.17367,
        ),
        ("\t Train throughput/batches_per_sec: 0.1600\n\t Train throughput/samples_per_sec: 20.4800", 6.25),
        ("    throughput/device/tokens_per_second=8,402\n    throughput/device/batches_per_second=0.2500", 4.0),
        ("Step 1 | loss:1.32 lr:2e-05 tokens_per_second_per_gpu:4096.0 peak_memory_reserved:55.1", 4.0),
        ("{'loss': '1.3', 'memory/max_active (GiB)': '51.2', 'tokens_per_second_per_gpu': '4096.00'}", 4.0),
        ("iter 10: loss 3.2104, time 234.50ms, mfu 40.12%", 0.2345),
        (
            "step   12/18865 | loss 5.170 (-1.2z)| norm 0.9 (0.1z)| lr 6e-04 | 1234.50 ms | 38.7% bf16 MFU",
            1.2345,
        ),
        ("step 00004/21400 (0.02%) | loss: 8.89 | lrm: 1.00 | dt: 989.44ms | tok/sec: 529,882 | mfu: 74.13", 0.98944),
        ("step:100/1770 train_time:12345ms step_avg:123.45ms", 0.12345),
        ("step 5 loss 3.1 step_time_ms=250", 0.25),
        ("iteration 5 | iter time: 250.5 ms | lr 1e-4", 0.2505),
        ("{'step': 5, 'step_time': 0.25}", 0.25),
        ("step 5 Iteration time (s): 1.5", 1.5),
        ("step 5, loss 2.1, 1.25 s/step", 1.25),
        ("step:10 - timing_s/gen:41.2 - timing_s/update_actor:33.1 - timing_s/step:96.2 - perf/mfu/actor:0.38", 33.1),
    ],
)
def test_the_lines_of_frameworks(line: str, seconds: float) -> None:
    found = step_time(f"some banner\n{line}\n{line}\nthe end", "log", batch=128, seq=8192, gpus=64)
    assert found.seconds == pytest.approx(seconds)
    assert found.steps + found.dropped == 2


def test_the_longest_bar_is_of_the_training() -> None:
    """Bars of evaluations, of shards and of a tokenizer are beside a Trainer's own; near 1 s its unit turns."""
    bars = "".join(
        f"\r {i}%|    | {i}/100 [00:10<01:40, {'1.25s/it' if i % 2 else '0.80it/s'}]" for i in range(10, 20)
    )
    others = (
        "Loading checkpoint shards: 100%|##| 400/400 [00:05<00:00, 9.3s/it]\n"
        + 30 * "\r 50%|#| 4/8 [0:09<0:09, 9.00s/it]"
    )
    map_ = "\nMap: 100%|####| 669/669 [00:00<00:00, 3076.21 examples/s]"
    found = step_time(others + bars + others + map_, "log")
    assert (found.seconds, found.steps + found.dropped) == (pytest.approx(1.25), 10)


_COUNTED = {
    "stamps": "2025-03-01 10:{m:02}:{s:02},250 INFO train.py:88 step {n} loss 3.2",
    "stamps, month first": "03/01/2025 10:{m:02}:{s:02} - INFO - __main__ - iter={n} loss=3.2",
    "LLaMA-Factory": '{{"current_steps": {n}, "total_steps": 500, "loss": 1.6, "elapsed_time": "0:{m:02}:{s:02}"}}',
    "ms-swift": "{{'loss': 1.6, 'global_step/max_steps': '{n}/500', 'elapsed_time': '{m}m {s}s', 'memory(GiB)': 61}}",
}


@pytest.mark.parametrize("line", _COUNTED.values(), ids=_COUNTED)
@pytest.mark.parametrize("step_s", [0.25, 6.0, 45.0])
def test_a_clock_of_lines_that_count_steps_says_how_long_one_takes(line: str, step_s: float) -> None:
    every = max(1, round(10 / step_s))
    at = [60 + round(n * step_s) for n in range(0, 40 * every, every)]
    lines = [line.format(n=i * every + 1, m=seconds // 60, s=seconds % 60) for i, seconds in enumerate(at)]
    lines = [line for line, seconds in zip(lines, at, strict=True) if seconds < 3600]
    earlier_run = [line.format(n=300 + n, m=0, s=10 * n) for n in range(4)]
    found = step_time("\n".join(["a banner of 2025-03-01 09:59:00", *earlier_run, *lines, "done"]), "log")
    assert found.seconds == pytest.approx(step_s, rel=0.02)
    assert "by the lines' clock" in found.note


def test_a_log_s_colours_are_not_read(tmp_path: Path) -> None:
    """As torchtitan writes them, and as a browser's copy leaves them."""
    plain = "step: 10  loss:  8.1  memory: 55.4GiB(58%)  tps: 4,096  tflops: 200.1\n"
    for escape in ("\x1b[", "["):
        log = tmp_path / "run.log"
        log.write_bytes(
            plain.replace("tps", f"{escape}34mtps").replace("tflops", f"{escape}1;36mtflops").encode() + b"\xff"
        )
        found = step_time(read_log(log, "log"), "log", batch=128, seq=8192, gpus=64)
        assert (found.seconds, found.tflops) == (4.0, 200.1)


def test_warm_up_is_dropped_and_delays_are_counted() -> None:
    ms = [60000, 9000, 1000, 1010, 990, 1000, 5000, 1000]
    found = step_time("\n".join(f"elapsed time per iteration (ms): {x}.0 |" for x in ms), "log")
    assert found.seconds == pytest.approx(1.0)
    assert (found.dropped, found.delayed) == (4, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing here", "prints no time of a step"),
        ("tps: 4,096", "prints tokens per second, which need the batch"),
        ("CurrSamplesPerSec=0.0", "prints a rate of 0"),
    ],
)
def test_a_log_that_says_nothing_is_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        step_time(text, "log")


def _asked(*more: str) -> list[str]:
    return [*more, "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "8192"]


def test_the_file_changes_every_price_and_is_said(tmp_path: Path) -> None:
    out, run = tmp_path / "mine.toml", CliRunner()
    steps = tmp_path / "steps.csv"
    steps.write_text('step,measured\n"tp=8,zero=1",6.5s\n"tp=4",5.0\n')
    told = run.invoke(app, _asked("measure", "steps", str(steps), "--out", str(out), "--json"))
    assert told.exit_code == 0, told.output
    factors = json.loads(told.stdout)["factors"]
    assert factors["products"] > 1.05
    plain = json.loads(run.invoke(app, _asked("predict", "--strategy", "tp=8", "--json")).stdout)
    bent = json.loads(
        run.invoke(app, _asked("predict", "--strategy", "tp=8", "--calibration", str(out), "--json")).stdout
    )
    assert bent["step_time_s"] > 1.05 * plain["step_time_s"]
    assert bent["question"]["calibrated"].startswith("calibrated with 2 measured steps of megatron-core (off ")
    planned = run.invoke(app, _asked("plan", "model", "--calibration", str(out)))
    assert planned.exit_code == 0, planned.output


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("nofile=3", "no such file"),
        ("tp=8=soon", "is not a number of seconds"),
        ("tp=8=-3", "is not a number of seconds"),
        ("tp=7=3", "strategy"),
    ],
)
def test_a_wrong_step_is_one_line(word: str, says: str) -> None:
    query = Query(model="llama3-8b", cluster="dgx-h100", gpus=16, batch=64, seq=8192)
    with pytest.raises(InputError) as error:
        calibration_of([word], query)
    assert says in str(error.value)


def test_a_file_without_factors_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("[model]\npreset = 'gpt2'\n")
    told = CliRunner().invoke(app, _asked("predict", "--strategy", "tp=8", "--calibration", str(path)))
    assert told.exit_code == 2
    assert "has no table [calibration]" in told.output


def test_a_row_without_seconds_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text('step,measured\n"tp=8",\n')
    query = Query(model="llama3-8b", cluster="dgx-h100", gpus=16, batch=64, seq=8192)
    with pytest.raises(InputError, match="is not a number of seconds, and no log"):
        calibration_of([str(path)], query)


def test_a_run_of_ours_bends_the_measured_rates(tmp_path: Path) -> None:
    """The next plan of a job predicts what the run measured, and says by how much it got better."""
    folder = _trained(tmp_path, 1.3)
    found = calibration_of([str(folder)], Query(), tmp_path / "own.toml")
    (run,) = found.steps
    assert (found.stack, run.error) == ("phalanx", pytest.approx(100 * (1 / 1.3 - 1)))
    assert abs(run.calibrated_error) < abs(run.error) / 2
    job = job_file.load(tmp_path / "job.toml", ())
    decision = decide(job, calibration=tmp_path / "own.toml")
    assert decision.plan.prediction["step_time_s"] == pytest.approx(run.calibrated_s)
    assert decision.plan.choices["calibrated"].startswith("calibrated with 1 measured steps of phalanx (off 23.1 %")
    plans.write(decision.plan, folder / "plan.json")
    with pytest.raises(InputError, match="counted twice"):
        calibration_of([str(folder)], Query())


def test_factors_of_another_stack_are_refused_for_a_job(tmp_path: Path) -> None:
    _trained(tmp_path, 1.3)
    (tmp_path / "own.toml").write_text('[calibration]\nproducts = 1.1\nstack = "megatron-core"\nsteps = 3\n')
    with pytest.raises(InputError, match="is of steps of megatron-core"):
        decide(job_file.load(tmp_path / "job.toml", ()), calibration=tmp_path / "own.toml")


def _trained(folder: Path, factor: float) -> Path:
    """Write a job on a described cluster, and the folder of a run whose steps took `factor` times the plan's."""
    (folder / "cluster.toml").write_text(to_toml(laptop(2), ""))
    (folder / "job.toml").write_text(
        '[model]\nfamily = "llama"\nvocab = 512\nhidden = 64\nlayers = 2\nheads = 4\nkv_heads = 4\nffn = 128\n'
        f'max_seq = 64\n[cluster]\nfile = "{folder / "cluster.toml"}"\n[job]\nglobal_batch = 8\nseq = 64\n'
        '[train]\ndata = "austen"\nsteps = 10\n[strategy]\ndp = 2\nzero = 1\n'
    )
    run = folder / "runs" / "own"
    run.mkdir(parents=True)
    decision = decide(job_file.load(folder / "job.toml", ()))
    plans.write(decision.plan, run / "plan.json")
    seconds = factor * decision.plan.prediction["step_time_s"]
    lines = [json.dumps({"step": i, "loss": 1.0, "step_time_s": seconds}) for i in range(10)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return run


def test_a_file_of_steps_that_is_no_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("step,measured\n" + "x" * 2**18 + ",1\n")
    with pytest.raises(InputError, match="is not CSV"):
        _rows(str(tmp_path / "steps.csv"))


@pytest.mark.parametrize("seed", range(6))
def test_the_spreads_are_the_likeliest_of_steps_that_come_one_after_the_other(seed: int) -> None:
    """The same posterior, by updates with a step at a time."""
    rng = np.random.default_rng(seed)
    spreads = np.array(list(PRIORS.values()))
    slopes = rng.uniform(0, 0.5, (5, len(spreads)))
    off = slopes @ (rng.normal(size=len(spreads)) * spreads * (1 + seed % 3)) + rng.normal(size=5) * 0.02 * (1 + seed)

    def after(wider: float, s: float) -> tuple[float, Floats, Floats]:
        unlikely = (np.log(s / calibration._USUAL) / calibration._SURE) ** 2 + (
            np.log(wider) / calibration._SELDOM
        ) ** 2
        mean, covariance = np.zeros(len(spreads)), np.diag((wider * spreads) ** 2)
        for slope, y in zip(slopes, off, strict=True):
            variance, miss = slope @ covariance @ slope + s**2, y - slope @ mean
            unlikely += np.log(variance) + miss**2 / variance
            gain = covariance @ slope / variance
            mean, covariance = mean + gain * miss, covariance - np.outer(gain, slope @ covariance)
        return float(unlikely), mean, covariance

    every = [after(wider, s) for wider in calibration._WIDER for s in calibration._NOISES]
    _, mean, covariance = min(every, key=lambda each: each[0])
    theta, spread = calibration._posterior(slopes, off)
    most = calibration._FAR * spreads
    np.testing.assert_allclose(theta, np.clip(mean, -most, most), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(spread, covariance, rtol=1e-7, atol=1e-12)
