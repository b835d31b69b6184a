"""Run `phalanx` in a forked process, which saves the time of imports.

It is forked, as are its ranks, from the process that the pool's ranks come from (support/preload.py). Launcher and
ranks are real processes, with a parent, signals, exit codes and a session of their own. Few tests need a new
interpreter instead.
"""

from __future__ import annotations

import importlib
import os
import resource
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.lab import hosts as lab
from support.rank_pool import importing_as_here


def phalanx(here: Path, *words: str, **how: Any) -> tuple[int, str, str]:
    """Run `phalanx words` in the folder `here`; return (exit code, stdout, stderr). `how`: as for Launcher."""
    return Launcher(here, *words, **how).finish()


class Launcher:
    """A running `phalanx words`, of which the first may be several, with spaces between them.

    `environment` is added to this process's own. `instead` maps modules of ranks to modules that replace them. Files
    that it writes are limited to `largest` bytes. `grace_s` is how long ranks may take to end when asked to.
    `torchrun` holds options of torch's launcher, which then starts `phalanx words`, or a script if words begin with
    one. `namespace` is the host of the lab to run on. `before` is called in the new process, before the command.
    """

    def __init__(
        self,
        here: Path,
        *words: str,
        environment: Mapping[str, str] | None = None,
        instead: Mapping[str, str] | None = None,
        largest: int = resource.RLIM_INFINITY,
        grace_s: float | None = None,
        torchrun: Sequence[str] = (),
        namespace: str = "",
        before: Callable[[], object] | None = None,
    ) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["support.preload"])
        self._said = [here.parent / f"{here.name}{namespace}.{name}" for name in ("stdout", "stderr")]
        means = (dict(instead or {}), largest, grace_s, torchrun, namespace, before)
        given = (here, [*words[0].split(), *words[1:]], os.environ | dict(environment or {}), *means, self._said)
        self._process: BaseProcess = context.Process(target=_launcher, args=given)
        with importing_as_here():
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def running(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def said(self) -> str:
        """Return what it has written to stderr so far."""
        return self._said[1].read_text() if self._said[1].exists() else ""

    def finish(self, timeout_s: float = 180.0) -> tuple[int, str, str]:
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            raise AssertionError(f"still running after {timeout_s:g} s: {self._said[1].read_text()}")
        out, err = (path.read_text() for path in self._said)
        return code, out, err


def _launcher(
    here: Path,
    words: Sequence[str],
    environment: dict[str, str],
    instead: dict[str, str],
    largest: int,
    grace_s: float | None,
    torchrun: Sequence[str],
    namespace: str,
    before: Callable[[], object] | None,
    said: Sequence[Path],
) -> NoReturn:
    import tempfile

    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from phalanx.runtime.process import agent

    def work() -> None:
        tempfile.tempdir = None  # TMPDIR may differ here
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        os.chdir(here)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
        _become(environment, *(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in said))

        def start(command: Sequence[str], environment: Mapping[str, str], *_: Any) -> _Rank:  # a fork inherits all
            # python -m module argument, or a script instead
            module, *argv = command[command.index("-m" if "-m" in command else "-u") + 1 :]
            return _Rank(instead.get(module, module), argv, environment)

        agent._GRACE_S = agent._GRACE_S if grace_s is None else grace_s
        agent.start_process = start
        SubprocessHandler._popen = lambda _, *of: start(*of)  # type: ignore[method-assign]
        if namespace:
            lab.enter(namespace)
        if before:
            before()
        if torchrun:
            from torch.distributed.run import main

            main([*torchrun, *words] if words[0].endswith(".py") else [*torchrun, "-m", "phalanx", *words])
            return
        from support.in_process_cli import COMMAND

        COMMAND(words)

    _live(work)


class _Rank(subprocess.Popen[bytes]):
    """A forked rank with the interface of Popen."""

    def __init__(self, module: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._module, self._argv, self._environment = module, argv, environment
        super().__init__([module, *argv])

    def _execute_child(self, *_: Any) -> None:
        def work() -> None:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            _become(self._environment)
            sys.argv = [self._module, *self._argv]
            if self._module.endswith(".py"):
                runpy.run_path(self._module, run_name="__main__")
            else:
                importlib.import_module(self._module).main()

        self.pid = os.fork()
        if not self.pid:
            _live(work)
        self._child_created = True


def _become(environment: Mapping[str, str], out: int = 1, err: int = 2) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(out, 1)
    os.dup2(err, 2)


def _live(work: Callable[[], object]) -> NoReturn:
    """Run a forked process from start to exit, so that nothing of its parent continues in it."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
