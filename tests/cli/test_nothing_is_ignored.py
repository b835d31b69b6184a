"""An option that a form of a command does not read is refused by name, whatever its value."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from support.in_process_cli import phalanx

from phalanx.cli.app import app

_JOB = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "32", "--batch", "128", "--seq", "4096"]
_VALUES = {
    "model": "llama2-7b",
    "cluster": "dgx-h100",
    "gpus": "16",
    "batch": "64",
    "seq": "2048",
    "strategy": "tp=2",
    "stack": "nemo-24.11",
    "profile": "nemo-24.11",
    "precision": "bf16",
    "params": "7B",
    "tokens": "1T",
    "devices": "a100",
}
"""Values of options that other forms read; of the others their default, or 1."""

_FORMS = {
    "comm of parameters": (["comm", "--params", "7B"], {"params", "rate", "beside", "top_k"}),
    "comm of a strategy": (["comm", *_JOB, "--strategy", "tp=2"], {"stack", "precision", "options"}),
    "memory of parameters": (["memory", "--params", "7B"], {"params", "policy", "card"}),
    "memory of a strategy": (["memory", *_JOB, "--strategy", "tp=2"], {"stack", "precision", "options"}),
    "roofline of parameters": (["roofline", "--params", "7B"], {"params", "cluster", "seq"}),
    "roofline of systems": (["roofline"], {"model", "params"}),
    "scaling of parameters": (["scaling", "--params", "7B", "--tokens", "1T"], {"params", "tokens", "rate", "gpus"}),
    "scaling of a model": (["scaling", *_JOB], {"devices", "profile"}),
    "plan of all stacks": (
        ["plan", *_JOB, "--stack", "all"],
        {"source", "strategy", "precision", "where", "headroom"},
    ),
    "plan of a job": (["plan", "job.toml"], {"source", "strategy", "overrides", "choices", "out"}),
    "plan from a file": (
        ["plan", "--from", "run.sh", "--cluster", "dgx-h100"],
        {"source", "model", "gpus", "batch", "seq", "strategy", "stack", "precision", "where", "headroom", "out"},
    ),
}
_OF_OUTPUT = {"as_json", "as_csv", "plot", "help"}


@pytest.mark.parametrize("form", _FORMS)
def test_what_a_form_does_not_read_is_refused(tmp_path: Path, form: str) -> None:
    words, read = _FORMS[form]
    (tmp_path / "job.toml").write_text("")
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    tried = 0
    for option in command.params:
        name = str(option.name)
        if option.param_type_name != "option" or name in read | _OF_OUTPUT or set(option.opts) & set(words):
            continue
        given = [option.opts[0]]
        if not getattr(option, "is_flag", False):
            given.append(_VALUES.get(name, str(option.default or 1)))
        code, _, err = phalanx(tmp_path, *words, *given)
        assert code == 2, given
        assert err.startswith("error: "), (given, err)
        assert len(err.splitlines()) == 1, (given, err)
        assert any(word in err for word in (option.opts[0], "--params", "--serving")), (given, err)
        tried += 1
    assert tried > 2
