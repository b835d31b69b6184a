"""`phalanx observe` whose observing process is forked from one that has imported torch, not a new interpreter, which
takes seconds to import it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.commands import observe
from phalanx.verify.observation import worker
from support import forked_cli, in_process_cli
from support.fresh_process import in_fresh_process


def phalanx(here: Path, *words: str) -> tuple[int, str, str]:
    """Run `phalanx words` in the folder `here`; return (exit code, stdout, stderr)."""
    code, out, err = in_fresh_process(_run, here, words)
    return code, out, err


def _run(here: Path, words: Sequence[str]) -> tuple[int, str, str]:
    observe.subprocess.Popen = _Observer  # type: ignore[misc]
    return in_process_cli.phalanx(here, *words)


class _Observer(subprocess.Popen[bytes]):
    """A forked observer with the interface of Popen."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], stdout: int, pass_fds: Sequence[int]
    ) -> None:
        module, *self._argv = command[command.index("-m") + 1 :]
        assert module == worker.__name__
        self._environment, self._out = env, stdout
        super().__init__(command, pass_fds=pass_fds)

    def _execute_child(self, *_: Any) -> None:
        def work() -> None:
            forked_cli._become(self._environment, self._out)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # those of the command catch what it says
            sys.path.insert(0, "")  # as python -m does
            sys.argv = [worker.__name__, *self._argv]
            worker.main()

        self.pid = os.fork()
        if not self.pid:
            forked_cli._live(work)
        self._child_created = True
