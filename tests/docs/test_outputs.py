"""What the pages show as the output of a command is what it prints.

Every indented block that begins with `$ phalanx` is run, unless it measures or trains. `$ cat FILE` shows a file that
a command wrote, or a user's, which is written as it is shown. Of each line shown, every part between dots (`...`) is
in the output, whitespace aside. Seconds of a search are not compared."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_cli import phalanx as forked
from support.in_process_cli import phalanx

ROOT = Path(__file__).parents[2]
_ELSEWHERE = ("train", "parity", "runs", "validate", "observe", "ui")
"""Commands that train or measure, or run for minutes or until they are stopped: other tests hold what they do."""
_MEASURED = (
    "--device cuda",
    " local",
    "job.toml",
    "examples/experts.toml",
    "runs/",
    "quickstart.toml --strategy tp=2,micro",
)
_REPEATED = (("accuracy.md", "verify"),)
"""Commands that another page runs too."""
_SECONDS = re.compile(r"\b(in )?[\d.]+ s\b(?=[:,]| of| \()|\(\d+ s\)")


def _blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (command, lines shown below it) of every command on a page."""
    command, shown = "", []
    for line in [*page.read_text().splitlines(), ""]:
        text = line.strip()
        if re.match(r" {4}( {2})?\$ (phalanx|cat) ", line):
            if command:
                yield command, shown
            command, shown = text.removeprefix("$ phalanx "), []
        elif command.endswith("\\"):
            command = f"{command[:-1].rstrip()} {text}"
        elif command and (line.startswith("    ") or not text):
            shown.append(text)
        elif command:
            yield command, shown
            command, shown = "", []


def _squeezed(text: str) -> str:
    return re.sub(r"[\s│─]+", " ", _SECONDS.sub("", text)).strip()


def _parts(command: str, line: str) -> list[str]:
    """Return what of a line must be printed; of `verify` not what was recorded, which follows torch's version."""
    if command.startswith("verify"):
        line = re.sub(r"(\([\d,]+ B\)).*", r"\1", line.partition("(off by")[0])
        line = "..." if line.startswith("throughout") else line
    return [_squeezed(part) for part in line.split("...")]


_SLOW = (
    "verify --model llama3",
    "verify --model mixtral",
    "verify examples/llama3_8b.toml",
    "verify quickstart.toml",
    "verify --serving",
    "serve verify",
    "serve validate",
    "collectives prove",
    "learn cases",
)
"""Commands that take seconds: for `make long`, which runs whole pages."""
PAGES = [
    ROOT / "README.md",
    ROOT / "SKILL.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/course").glob("*.md")),
]


def _name(page: Path) -> str:
    return f"course {page.name}" if page.parent.name == "course" else page.name


def _slow(page: Path) -> bool:
    return any(command.startswith(_SLOW) for command, _ in _blocks(page))


@pytest.mark.parametrize(
    ("page", "whole"),
    [
        *(pytest.param(page, False, id=_name(page)) for page in PAGES),
        *(
            pytest.param(page, True, id=f"{_name(page)} whole", marks=pytest.mark.long)
            for page in PAGES
            if _slow(page)
        ),
    ],
)
def test_a_page_shows_what_its_commands_print(tmp_path: Path, page: Path, whole: bool) -> None:
    """Commands of a page follow each other in one folder, so that one reads the plan that another wrote."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "examples", tmp_path, dirs_exist_ok=True)
    wrong = []
    for line, shown in _blocks(page):
        command = line.partition(" #")[0].strip()
        if command.startswith("$ cat "):
            file = tmp_path / command.removeprefix("$ cat ")
            if not file.exists():
                file.write_text("\n".join(shown))
            printed = _squeezed(file.read_text())
            wrong += [f"{command}: {part!r}" for text in shown for part in _parts("", text) if part not in printed]
            continue
        if (page.name, command.split()[0]) in _REPEATED or (not whole and command.startswith(_SLOW)):
            continue
        if command.split()[0] in _ELSEWHERE or any(word in command for word in _MEASURED):
            continue
        # torch's autograd engine knows the devices of its first backward pass only, which this process may have had.
        run = forked if "--device cuda" in command else phalanx
        words, _, file = command.partition(" > ")
        _, out, err = run(tmp_path, *shlex.split(words))
        if file:
            (tmp_path / file).write_text(out)
        printed = _squeezed(f"{out}\n{err}")
        for text in shown:
            wrong += [f"phalanx {command}: {part!r}" for part in _parts(command, text) if part not in printed]
    assert not wrong, f"{page.name} shows what is not printed:\n" + "\n".join(wrong)
