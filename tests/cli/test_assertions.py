"""--assert, and `phalanx check`: exit code 1 and one line for each failure, with the figure."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from phalanx.answers.assertions import failures, parse
from phalanx.cli.app import app
from phalanx.spec.errors import InputError

ANSWER = {
    "question": {"gpus": 64},
    "step_time_s": 18.0,
    "step_time_low_s": 16.0,
    "step_time_high_s": 22.0,
    "tokens_per_s": 5000.0,
    "memory_bytes": 60 * 2**30,
    "mfu": 0.44,
    "fits": True,
    "best": {"step_time_s": 1.0, "bubble_share": 0.1},
    "tokens": 3e11,
    "tokens_low": 2e11,
    "tokens_high": 4e11,
    "sides": [{"loss": 1.0, "b": {"loss": 9.0}}, {"loss": 2.0, "b": {"loss": 8.0}}],
    "hfu": None,
}


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


ASK = "predict --model llama3-8b --cluster dgx-h100 --gpus 16 --batch 128 --seq 8192 --strategy tp=8,zero=1"


@pytest.mark.parametrize(
    "line",
    [
        "memory<75GiB, step<20s, mfu>0.4, fits",
        "memory_bytes<=60GiB",
        "step>17999ms, step_time<0.4min",
        "mfu>40%, tokens_per_s>=5000",
        "question.gpus=64, gpus==64",
        "best.step_time_s<2, bubble<20%",
        "best.step<step, step_time_low<=step, tokens>1e11",
        "b.loss<10, sides.1.loss<sides.2.loss, loss>0",
    ],
)
def test_what_holds_fails_nothing(line: str) -> None:
    assert failures(line, ANSWER) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("memory<50GiB", "memory<50GiB: memory_bytes is 60 GiB"),
        ("memory<60GiB", "memory<60GiB: memory_bytes is 60 GiB"),
        ("memory>60GiB", "memory>60GiB: memory_bytes is 60 GiB"),
        ("step<10s", "step<10s: step_time_s is 18 s (16 to 22 s likely)"),
        ("mfu>45%", "mfu>45%: mfu is 0.44"),
        ("hfu>0.1", "hfu>0.1: hfu has no value here"),
        ("tokens>1e12", "tokens>1e12: tokens is 3e+11 (2e+11 to 4e+11 likely)"),
        ("loss<2", "loss<2: sides.2.loss is 2"),
        ("sides.2.loss<sides.1.loss", "sides.2.loss<sides.1.loss: sides.2.loss is 2, sides.1.loss is 1"),
        ("step<best.step", "step<best.step: step_time_s is 18 s (16 to 22 s likely), best.step is 1 s"),
        ("gpus!=64", "gpus!=64: question.gpus is 64"),
    ],
)
def test_a_failure_says_the_figure(line: str, said: str) -> None:
    assert failures(line, ANSWER) == [said]
    assert failures(f"fits, {line}", ANSWER) == [said]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("memry<1GiB", "did you mean memory"),
        ("step<20GiB", "is no value of step_time_s"),
        ("memory<20s", "is not a size"),
        ("mfu", "is not true or false"),
        ("mfu<loss", "loss is no one number"),
        ("mfu<fits", "fits is no one number"),
        ("step<", "is no assertion"),
        ("", "asserts nothing"),
        ("1<step", "is no assertion"),
    ],
)
def test_what_is_no_assertion_is_one_line(line: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        failures(line, ANSWER)


def test_a_wrong_assertion_stops_before_the_question() -> None:
    result = invoke(*ASK.split(), "--assert", "step<<3")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert [a.name for a in parse("a<1, b")] == ["a", "b"]


def test_a_command_fails_with_its_assertion() -> None:
    assert invoke(*ASK.split(), "--assert", "fits, step<60s").exit_code == 0
    result = invoke(*ASK.split(), "--assert", "step<1ms")
    assert result.exit_code == 1
    assert "failed: step<1ms: step_time_s is" in result.stderr
    assert "likely" in result.stderr


COMPARED = "compare tp=8,zero=1 tp=4,zero=1 --model llama3-8b --cluster dgx-h100 --gpus 16 --batch 128 --seq 8192"
SERVED = (
    "serve plan --model llama3-8b --cluster dgx-h100 --gpus 1 --input 500 --output 50 --concurrency 2 --layout tp=1"
)
LASTING = "simulate goodput" + ASK.removeprefix("predict") + " --days 10 --trials 20"


@pytest.mark.parametrize(
    ("asked", "holds", "fails", "said"),
    [
        (COMPARED, "fits, step<60s", "sides.1.step<sides.2.step", ["sides.1.step_time_s is", "sides.2.step is"]),
        (COMPARED, "sides.2.step<sides.1.step", "step<1ms", ["sides.1.step_time_s", "sides.2.step_time_s"]),
        (LASTING, "effective>50%", "effective>99.99%", ["effective_share is", "likely"]),
        (SERVED, "ttft<9s, gpus<=8", "ttft<1us, tpot<1us", ["ttft_s is", "tpot_s is"]),
        ("simulate" + ASK.removeprefix("predict"), "step<60s", "step<1ms", ["step_time_s is"]),
    ],
)
def test_what_else_asserts(tmp_path: Path, asked: str, holds: str, fails: str, said: list[str]) -> None:
    file = tmp_path / "phalanx.toml"
    checks = (f'[checks.{name}]\nask = "{asked}"\nassert = "{text}"\n' for name, text in (("a", holds), ("b", fails)))
    file.write_text("".join(checks))
    result = invoke("check", str(file))
    assert result.exit_code == 1
    first, *others = result.stdout.splitlines()
    assert first == "ok  a"
    assert all(word in result.stdout for word in said), result.stdout
    assert others[0] == "FAILED  b"
    assert [file.name for file in tmp_path.iterdir()] == ["phalanx.toml"]


def test_checks_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "phalanx.toml"
    file.write_text(
        f'[checks.fits]\nask = "phalanx {ASK}"\nassert = "fits"\n'
        f'[checks.fast]\nask = "{ASK}"\nassert = "step<1ms"\n'
        '[checks.typo]\nask = "predict --modell llama3-8b"\n'
    )
    result = invoke("check", str(file))
    assert result.exit_code == 1
    assert [line.split()[0] for line in result.stdout.splitlines() if not line.startswith(" ")] == [
        "ok",
        "FAILED",
        "FAILED",
    ]
    assert "did you mean --model?" in result.stdout
    assert invoke("check", str(file), "--only", "fits").exit_code == 0
    assert not list(tmp_path.glob("plan.json"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[checks.a]\nask = "train job.toml"\n', "does not only compute"),
        ('[checks.a]\nask = "observe -- python x.py"\n', "does not only compute"),
        ('[checks.a]\nask = "lint x.sh"\nassert = "fits"\n', "has its own exit code"),
        ('[checks.a]\nasks = "lint x.sh"\n', "checks.a.ask: is missing"),
        ('[checks.a]\nask = "predict \'x"\n', "is no command line"),
        ("[check]\n", "has no [checks.NAME]"),
        ("x = \n", "is no TOML"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "phalanx.toml"
    file.write_text(text)
    result = invoke("check", str(file))
    assert result.exit_code == 2
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
