"""The tutorial's commands run, in its order and in one folder, and print what the page shows."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_cli import phalanx as forked
from support.in_process_cli import phalanx

ROOT = Path(__file__).parents[2]
_TRAINS = ("train", "parity")


def _commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (command, lines shown below it)."""
    command, shown = "", []
    for line in [*page.splitlines(), ""]:
        if line.startswith("    $ ") or not line.startswith("    "):
            if command:
                yield command, shown
            command, shown = line.removeprefix("    $ ") if line.startswith("    $ ") else "", []
        elif command:
            shown.append(line.strip())


def _squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.usefixtures("measured")
def test_the_tutorial(tmp_path: Path) -> None:
    here = tmp_path / "repository"
    here.mkdir()
    shutil.copytree(ROOT / "examples", here / "examples")
    commands = list(_commands((ROOT / "docs" / "tutorial.md").read_text()))
    assert len(commands) >= 10
    for command, shown in commands:
        words = command.split()
        if words[0] != "phalanx":
            subprocess.run(["bash", "-c", command], cwd=here, check=True)
            continue
        run = forked if words[1] in _TRAINS else phalanx
        code, out, err = run(here, *words[1:])
        expected = 2 if shown[0].startswith("error: ") else int("findings" in shown[-1])
        assert code == expected, f"{command}: {err}"
        printed = _squeezed(f"{out}\n{err}")
        parts = [_squeezed(part) for line in shown for part in line.split("...")]
        missing = [part for part in parts if part not in printed]
        assert not missing, f"{command} does not print {missing}:\n{printed}"
