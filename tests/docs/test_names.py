"""Commands that pages name exist, with the options that are given to them, and so do files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from phalanx.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_NAMED = re.compile(r"(?:`|^ +(?:\$ )?|-m )phalanx ([a-z][^`\n]*)", re.MULTILINE)
APP = typer.main.get_command(app)


def _wrong(words: list[str]) -> str | None:
    """Return what of a command does not exist."""
    command: Any = APP
    while words and (commands := getattr(command, "commands", None)):
        name = words[0].strip(".,")
        if name in commands:
            words.pop(0)
        elif (rule := getattr(command, "rule", None)) is None:
            return f"no command {name}"
        else:
            name = rule(words)  # the form that the words mean
        command = commands[name]
    options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
    given = [word.partition("=")[0].rstrip(".,") for word in words if re.match(r"--[a-z]", word)]
    return next((f"no option {name} of {command.name}" for name in given if name not in options), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_exists(page: Path) -> None:
    named = [
        line.partition(" #")[0].split(" -- ")[0] for line in _NAMED.findall(page.read_text().replace("\\\n", " "))
    ]
    assert not (wrong := {line: found for line in named if (found := _wrong(line.split()))}), wrong


def test_a_command_that_is_gone_is_found() -> None:
    assert _wrong(["plans", "job.toml"]) == "no command plans"
    assert _wrong(["plan", "job.toml", "--stak", "all"]) == "no option --stak of job"
    assert _wrong(["plan", "--model", "gpt2", "--stack", "all"]) is None


_FILE = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|toml|json|csv|md|slurm|sh)|[\w.-]+/(?:[\w.-]+/)+)`")
_WRITTEN = {"gpu/gpu.md", "gpu/cluster.toml", "frameworks/NAME/facts.toml"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_a_page_exists(page: Path) -> None:
    folders = (ROOT, ROOT / "src" / "phalanx", page.parent)
    named = set(_FILE.findall(page.read_text())) - _WRITTEN
    assert [name for name in sorted(named) if not any((folder / name).exists() for folder in folders)] == []
