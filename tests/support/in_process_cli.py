"""Run the command line in this process, which has already made the imports that take a new one seconds.

Ranks are still processes; all output is captured at the file descriptors."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any

import typer

from phalanx.cli.app import app

COMMAND: Any = typer.main.get_command(app)
"""Made once with all commands, also for the processes that are forked (support/preload.py)."""
list(COMMAND.commands.values())


def phalanx(here: Path, *words: str, command: Callable[[list[str]], Any] = COMMAND) -> tuple[int, str, str]:
    """Run `phalanx words`, or another command, in the folder `here`; return (exit code, stdout, stderr).

    The first of `words` may be several, with spaces between them.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with chdir(here), _caught(1, out), _caught(2, err), redirect_stdout(out), redirect_stderr(err):
            try:
                command([*" ".join(words[:1]).split(), *words[1:]])
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
        return code, _text(out), _text(err)


@contextmanager
def _caught(descriptor: int, file: IO[str]) -> Iterator[None]:
    before = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        file.flush()
        os.dup2(before, descriptor)
        os.close(before)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def text_of(here: Path, *words: str, run: Callable[..., tuple[int, str, str]] = phalanx, **how: Any) -> str:
    """Return what `phalanx words` prints, which must succeed. `run`: that of support/forked_cli.py, with `how`."""
    code, out, err = run(here, *words, **how)
    assert code == 0, err
    return out


def json_of(here: Path, *words: str, run: Callable[..., tuple[int, str, str]] = phalanx, **how: Any) -> Any:
    """Return the JSON that `phalanx words` prints."""
    return json.loads(text_of(here, *words, run=run, **how))


def error_of(here: Path, *words: str, run: Callable[..., tuple[int, str, str]] = phalanx, **how: Any) -> str:
    """Return the one line by which `phalanx words` refuses its input."""
    code, _, err = run(here, *words, **how)
    assert (code, err.count("\n"), err[:7]) == (2, 1, "error: "), (words, err)
    return err
