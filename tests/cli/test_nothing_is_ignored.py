"""An option that a form of a command does not read is refused by name, whatever its value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import COMMAND, error_of, phalanx

_ASKED = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "32", "--batch", "128", "--seq", "4096"]
_SERVED = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8"]
_VALUES = {
    "model": "llama2-7b",
    "cluster": "dgx-h100",
    "gpus": "16",
    "batch": "64",
    "seq": "2048",
    "strategy": "tp=2",
    "stack": "nemo-24.11",
    "precision": "bf16",
    "params": "7B",
    "tokens": "1T",
    "devices": "a100",
    "op": "all_reduce",
    "ttft": "1s",
    "tpot": "30ms",
    "speculate": "3:0.7",
    "adapters": "32:4",
    "layout": "tp=2",
    "out": "out.json",
    "overrides": "job.seq=128",
    "rank": "1",
    "axis": "tp",
}
"""Values of options that other forms read; of the others their default, or 1."""

_FORMS = {
    "plan of all stacks": (
        ["plan", "model", *_ASKED, "--stack", "all"],
        {"strategy", "precision", "where", "headroom", "report"},
    ),
    "serve plan of a trace": (
        ["serve", "plan", *_SERVED, "--trace", "requests.csv"],
        {
            *("deadline", "survive", "large_ep"),
            "ttft",
            "tpot",
            "percentile",
            "objective",
            "engine",
            "weights",
            "cache",
            "mode",
            "layout",
            "chunk",
            "reuse",
            "slots",
            "strict",
            "memory",
            "speculate",
            "adapters",
            "graphs",
            "price",
            "rates",
            "requests",
            "seed",
            "launch",
            "out",
        },
    ),
    "verify of a plan": (["verify", "plan.json"], {"device", "report"}),
    "verify of a job": (
        ["verify", "job.toml"],
        {"strategy", "cluster", "overrides", "device", "report"},  # --gpus goes with --strategy
    ),
    "verify of a configuration": (
        ["verify", "run.sh"],
        {"strategy", "model", "cluster", "gpus", "batch", "seq", "precision", "device", "report"},
    ),
    "cluster simulate that stops no job": (
        ["cluster", "simulate", "--trace", "jobs.csv", "--cluster", "6x8", "--policy", "fifo", "--policy", "easy"],
        {"nodes", "leaf", "oversubscription", "placement", "elastic", "preempt", "skip_bad"},
    ),
}
_OF_OUTPUT = {"as_json", "json", "as_csv", "csv", "plot", "help"}


@pytest.mark.parametrize("form", _FORMS)
def test_what_a_form_does_not_read_is_refused(tmp_path: Path, form: str) -> None:
    words, read = _FORMS[form]
    (tmp_path / "job.toml").write_text("")
    (tmp_path / "run.sh").write_text("torchrun pretrain_gpt.py --num-layers 2")
    command = COMMAND
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    tried = 0
    for option in command.params:
        name = str(option.name)
        if option.param_type_name != "option" or name in read | _OF_OUTPUT or set(option.opts) & set(words):
            continue
        given = [option.opts[0]]
        if not getattr(option, "is_flag", False):
            given.append(_VALUES.get(name, str(option.default or 1)))
        err = error_of(tmp_path, *words, *given)
        against = tuple(f"error: {word}" for word in words if word.startswith("--"))  # which excludes the option
        assert err.startswith(f"error: {option.opts[0]}") or (err.startswith(against) and given[0] in err), (
            given,
            err,
        )
        assert len(err.splitlines()) == 1, (given, err)
        tried += 1
    assert tried


_MEANT = {
    ("tables", "comm", "params"): ["--params", "7B"],
    ("tables", "comm", "strategy"): [*_ASKED, "--strategy", "tp=2"],
    ("tables", "memory", "params"): ["--params", "7B"],
    ("tables", "memory", "model"): ["--model", "llama3-8b"],
    ("tables", "memory", "strategy"): [*_ASKED, "--strategy", "tp=2"],
    ("tables", "roofline", "params"): ["--params", "7B"],
    ("tables", "roofline", "chips"): ["--save", "csv"],
    ("tables", "roofline", "strategy"): [*_ASKED, "--strategy", "tp=2"],
    ("tables", "scaling", "params"): ["--params", "7B", "--tokens", "1T"],
    ("tables", "scaling", "model"): _ASKED,
    ("plan", "model"): _ASKED,
    ("plan", "job"): ["job.toml"],
    ("plan", "improve"): ["--from", "run.sh", "--cluster", "dgx-h100"],
}
"""Of each form words that mean it where no form is named."""


def _forms(command: tuple[str, ...]) -> Any:
    found = COMMAND
    for word in command:
        found = found.commands[word]
    return found.commands


def _options(command: tuple[str, ...], form: str) -> set[str]:
    return {name for p in _forms(command)[form].params for name in p.opts if name[:2] == "--"}


@pytest.mark.parametrize("name", ["gpus", "batch", "seq"])
def test_a_count_of_nothing_is_not_taken_for_none(tmp_path: Path, name: str) -> None:
    given = {"gpus": 8, "batch": 8, "seq": 4096, name: 0}
    words = [word for option, value in given.items() for word in (f"--{option}", str(value))]
    code, out, err = phalanx(tmp_path, "predict --model llama3-8b --cluster dgx-h100", *words)
    assert (code, out, err) == (2, "", f"error: --{name} = 0: must be at least 1\n")


def test_an_option_that_is_not_read_is_shown_as_it_was_given(tmp_path: Path) -> None:
    words = ("plan --model llama3-8b --cluster dgx-h100 --gpus 8 --batch 8 --seq 4096", "--stack", "all")
    for option, said in ((("--deadline", "4.5"), " = 4.5"), (("--lengths", "a:1"), " = 'a:1'"), (("--goodput",), "")):
        err = phalanx(tmp_path, *words, *option)[2]
        assert err.startswith(f"error: {option[0]}{said}: needs a single stack"), err


def test_every_form_is_meant_by_some_words() -> None:
    grouped = {words[:-1] for words in _MEANT}
    assert set(_MEANT) == {(*command, form) for command in grouped for form in _forms(command)}


@pytest.mark.parametrize("words", _MEANT)
def test_an_option_of_another_form_is_refused_by_name(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The remedy says which form has it. Where no form is named the option may mean another one, which then refuses
    the words of this one; chips has none of its own."""
    command, form = words[:-1], words[-1]
    others = {option for name in _forms(command) for option in _options(command, name)}
    assert others > _options(command, form)
    for option in sorted(others - _options(command, form)):
        code, out, err = phalanx(tmp_path, *words, *_MEANT[words], option, "1")
        assert (code, out, len(err.splitlines())) == (2, "", 1), option
        assert err.startswith(f"error: {option}: no such option of "), err
        assert f" {' '.join(words)}; it is of " in err, err
        if form != "chips":
            code, out, err = phalanx(tmp_path, *command, *_MEANT[words], option, "1")
            assert (code, out, len(err.splitlines())) == (2, "", 1), option


_RUN = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 \\
  --ffn-hidden-size 128 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 \\
  --tensor-model-parallel-size 2 --bf16 --vocab-size 512 --swiglu --disable-bias-linear --normalization RMSNorm
"""


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize("option", ["--batch", "--seq", "--gpus"])
def test_a_number_beside_a_configuration_is_not_taken_for_none(tmp_path: Path, option: str, value: str) -> None:
    """0 meant what the file says."""
    (tmp_path / "run.sh").write_text(_RUN)
    on = ("--cluster", "dgx-h100")
    assert phalanx(tmp_path, "predict run.sh", *on)[0] == 0
    forms = (
        ("predict", "run.sh", *on),
        ("lint", "run.sh", *on),
        ("verify", "run.sh"),
        ("plan", "--from", "run.sh", *on),
        ("compare", "run.sh", "tp=4", *on),
        ("read", "run.sh", "--out", "plan.json", *on),
    )
    for words in forms:
        code, _, err = phalanx(tmp_path, *words, option, value)
        assert (code, err) == (2, f"error: {option} = {value}: must be at least 1\n"), words
