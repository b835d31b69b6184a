"""The process of `phalanx observe` forked from the one that the pool's ranks come from, which has imported torch.

A new interpreter takes seconds for that. Its code (phalanx.observation.program.worker) and its streams are the same.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from support.rank_pool import importing_as_here


class Forked:
    """What the command asks of subprocess.Popen."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], stdout: int, env: Mapping[str, str]) -> None:
        assert command[:3] == [sys.executable, "-m", "phalanx.observation.program.worker"]
        context = get_context("forkserver")
        context.set_forkserver_preload(["support.preload"])
        (result,) = pass_fds
        streams = [Connection(os.dup(number)) for number in (stdout, 2, result)]
        task = json.loads(command[3])
        self._process: Any = context.Process(target=_observe, args=(task, os.getcwd(), dict(env), streams))
        with importing_as_here():
            self._process.start()
        for stream in streams:
            stream.close()

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def terminate(self) -> None:
        self._process.terminate()


def _observe(task: dict[str, Any], folder: str, environment: dict[str, str], streams: list[Connection]) -> None:
    from phalanx.observation.program import worker

    out, err, result = (stream.fileno() for stream in streams)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    task |= {"parent": os.getppid(), "result": os.dup(result)}
    sys.argv = ["worker", json.dumps(task)]
    try:
        worker.main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    os._exit(0)
