"""Asks a question in an empty folder, and returns what is answered there: exit code, JSON or text, and files."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.in_process_cli import phalanx as run

import phalanx.cli

HERE = Path(__file__).parent
# Programs that are observed are processes with another working folder.
os.environ["PYTHONPATH"] = str(Path(phalanx.cli.__file__).parents[2])
INPUTS = HERE / "inputs"
Answer = dict[str, Any]
"""`code`; `answer`: JSON or lines of text; `files`: the same of each file written, by name."""

PAGES = (".html", ".svg")
_INVISIBLE = re.compile(r"<(script|style|title|desc)\b.*?</\1>|<[^>]*>", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)


def questions() -> list[str]:
    """The lines of questions.txt: commands as they are typed after `phalanx`, the last of which is the question."""
    return [line for line in (HERE / "questions.txt").read_text().splitlines() if line and not line.startswith("#")]


def answer(question: str) -> Answer:
    """Run a question's commands; those before the last are run once for all questions that begin with them."""
    *before, last = question.split(" && ")
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "here"
        shutil.copytree(prepared(" && ".join(before)), here, symlinks=True)
        found = {path: path.stat().st_mtime_ns for path in _files(here)}
        words = [sys.executable if word == "python" else word for word in shlex.split(last)]
        code, out, err = run(here, *words)
        written = {
            str(path.relative_to(here)): _content(path)
            for path in _files(here)
            if found.get(path) != path.stat().st_mtime_ns
        }
        if code == 2:
            out = err
        return _without(folder, {"code": code, "answer": _parsed(out), "files": written})


@functools.cache
def prepared(commands: str) -> Path:
    """Return a folder in which these commands have been run; `in` is the folder of inputs."""
    here = Path(tempfile.mkdtemp(prefix="phalanx-net-"))
    (here / "in").symlink_to(INPUTS)
    for command in filter(None, commands.split(" && ")):
        code, _, err = run(here, *shlex.split(command))
        assert code in (0, 1), f"phalanx {command}: {err}"
    return here


def numbers(text: str) -> list[float]:
    """Return the numbers that stand in a text."""
    return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]


def _files(here: Path) -> Iterator[Path]:
    return (path for path in sorted(here.rglob("*")) if path.is_file() and not path.is_symlink())


def _content(path: Path) -> Any:
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return f"{path.stat().st_size} bytes"
    if path.suffix in PAGES:
        return _INVISIBLE.sub("\n", text).split("\n")
    return _parsed(text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.splitlines()


def _without(folder: str, found: Any) -> Any:
    """Replace the temporary folder in all texts."""
    if isinstance(found, dict):
        return {key.replace(folder, "FOLDER"): _without(folder, value) for key, value in found.items()}
    if isinstance(found, list):
        return [_without(folder, value) for value in found]
    return found.replace(folder, "FOLDER") if isinstance(found, str) else found
