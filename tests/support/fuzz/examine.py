"""Runs a case in this process or in a forked one, under limits of CPU time and memory."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from support.fuzz.commands import Case
from support.fuzz.evidence import call
from support.fuzz.rule import MEMORY, SECONDS, Outcome
from support.fuzz.short_work import short_work
from support.in_process_cli import COMMAND, phalanx


class _Hang(BaseException):
    pass


def here(case: Case, folder: Path) -> Outcome:
    """Run a case in this process, in `folder`."""
    start = time.process_time()
    stopped = ""
    code, out, err = 1, "", ""
    with _files(case, folder), _limits(), short_work():
        try:
            command = partial(call, command=COMMAND) if case.kind == "tool call" else COMMAND
            code, out, err = phalanx(folder, *case.words, command=command)
        except _Hang:
            stopped = "hang"
        except MemoryError:
            stopped = "memory"
        except Exception:  # what would end the program with a traceback
            err = traceback.format_exc()
    return Outcome(code, out, err, time.process_time() - start, stopped)


def forked(case: Case, folder: Path) -> Outcome:
    """Run a case in a process of its own, forked from this one, in a copy of `folder`."""
    copy = folder.with_name(f"{folder.name}.case")
    shutil.copytree(folder, copy, symlinks=True)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(read)
        try:
            with os.fdopen(write, "wb") as end:
                pickle.dump(here(case, copy), end)
        finally:
            os._exit(0)
    os.close(write)
    limit = time.monotonic() + 4 * SECONDS  # a busy machine is slow; the CPU time counts
    signal.signal(signal.SIGALRM, lambda *_: _kill(child))
    signal.alarm(max(1, int(limit - time.monotonic())))
    with os.fdopen(read, "rb") as end:
        content = end.read()
    signal.alarm(0)
    _kill(child)
    _, status = os.waitpid(child, 0)
    shutil.rmtree(copy, ignore_errors=True)
    if content:
        return pickle.loads(content)
    return Outcome(-1, "", "", 4 * SECONDS, "hang" if time.monotonic() >= limit else f"died ({status})")


def _kill(child: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


@contextmanager
def _files(case: Case, folder: Path) -> Iterator[None]:
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    try:
        yield
    finally:
        for name in case.files:
            (folder / name).unlink(missing_ok=True)


@contextmanager
def _limits() -> Iterator[None]:
    """Limit CPU time, and the memory that is allocated beyond what this process has."""

    def end(_: int, __: FrameType | None) -> None:
        raise _Hang

    before = signal.signal(signal.SIGPROF, end)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024
