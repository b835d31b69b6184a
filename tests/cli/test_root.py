"""The command line imports no command but the one that it runs, and lists all without importing any."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.in_process_cli import error_of

from phalanx.cli.app import COMMANDS, app
from phalanx.cli.forms import Entry


def _after(words: str) -> tuple[str, set[str]]:
    """Run `phalanx words` in a new interpreter; return its output and what was imported."""
    code = f"import sys; sys.argv = ['phalanx', *{words.split()}]; from phalanx.__main__ import main\n"
    code += "try: main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    out, _, modules = done.stdout.strip().rpartition("\n")
    return out, set(modules.split())


def test_help_lists_every_command_under_its_panel_and_imports_none() -> None:
    out, imported = _after("--help")
    panels = out.split("\n\n")
    for entry in COMMANDS:
        (panel,) = (lines for lines in panels if lines.startswith(f"{entry.panel}:"))
        assert f"  {entry.name} " in panel
        assert entry.help in panel, "in one line"
    assert imported.isdisjoint(str(entry.target).partition(":")[0] for entry in COMMANDS)
    assert imported.isdisjoint(("rich", "numpy", "pydantic", "yaml", "torch"))


def test_a_command_is_imported_alone() -> None:
    _, imported = _after("pipeline --help")
    modules = {str(entry.target).partition(":")[0] for entry in COMMANDS}
    assert modules & imported == {"phalanx.cli.schedules"}


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_the_table_names_what_there_is(entry: Entry) -> None:
    command: Any = entry.command()
    assert command.name == entry.name
    assert command.help


def _commands(command: Any) -> Iterator[Any]:
    """Yield the commands that a command or group consists of."""
    for name in getattr(command, "commands", ()):
        yield from _commands(command.commands[name])
    if not hasattr(command, "commands"):
        yield command


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_help_is_wrapped_by_the_terminal_and_shows_no_value_for_a_flag(entry: Entry) -> None:
    for command in _commands(entry.command()):
        assert all("\n" not in paragraph for paragraph in command.help.split("\n\n")), command.help
        flags = [p for p in command.params if getattr(p, "is_flag", False)]
        assert not [p.name for p in flags if p.display_type_rich(typer.Context(command))]


def test_a_wrong_name_is_told_from_what_there_is() -> None:
    group: Any = typer.main.get_command(app)
    assert list(group.commands) == [entry.name for entry in COMMANDS]
    done = subprocess.run([sys.executable, "-m", "phalanx", "trian"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: command = 'trian': no such command; did you mean train?\n")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("serve-plan", "serve plan"),
        ("place", "cluster place"),
        ("goodput", "simulate goodput"),
        ("report", "runs report"),
        ("doctor", "check machine"),
        ("memory", " serve memory`"),
        ("memory", " tables memory`"),
    ],
)
def test_a_command_of_a_group_is_found_by_its_name_alone(tmp_path: Path, word: str, meant: str) -> None:
    assert meant in error_of(tmp_path, word, "x")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        *(("measure stesp a.sh=4", "steps"), ("check machin", "machine"), ("simulate gooput --days 3", "goodput")),
        *(("plan jobb", "job"), ("train swep", "sweep"), ("tables memory modle", "model")),
    ],
)
def test_a_misspelt_form_is_not_taken_for_a_file(tmp_path: Path, line: str, meant: str) -> None:
    assert f"did you mean {meant}?" in error_of(tmp_path, line)
    word = next(word for word in line.split() if f"'{word}'" in error_of(tmp_path, line))
    (tmp_path / word).write_text("a file of this name")
    assert "no such command" not in error_of(tmp_path, line)
