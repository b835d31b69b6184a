"""Life cycle of a launched rank: it joins the others and works; if it fails it leaves its reason, and if its launcher
dies it exits."""

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from phalanx.runtime.process import status
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.agent import LAUNCHER_VARIABLE, RESTARTS_VARIABLE
from phalanx.runtime.process.environment import World
from phalanx.runtime.process.failure import cut_off, reason, timed_out
from phalanx.runtime.process.launch import STOPS, RankFailure
from phalanx.spec.errors import InputError


class StopFlag:
    """True once this rank has been asked to stop: by SIGUSR1, SIGTERM, SIGINT or SIGHUP, or by its launcher's death.
    The ranks agree on it once a step."""

    def __init__(self) -> None:
        self._asked = False
        self._parent = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
        for number in (signal.SIGUSR1, *STOPS):
            signal.signal(number, self._ask)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True

    def __bool__(self) -> bool:
        return self._asked or os.getppid() != self._parent


def is_restarted() -> bool:
    """Whether this rank was started again after a failure."""
    return int(os.environ.get(RESTARTS_VARIABLE, "0")) > 0


def run_rank(world: World, timeout_s: float, work: Callable[[], object], orderly: bool = False) -> NoReturn:
    """Run a launched rank from start to end: join the world, work, leave it, exit.

    A failure writes its reason where the launcher finds it. When the launcher dies, the rank exits too; `orderly`
    work, which holds a StopFlag, has `timeout_s` seconds to do so. The process skips the cleanup of Python and C++:
    after a failure other threads may hang in a collective that will never end, and after success torch's
    background threads, torn down in no fixed order, now and then abort the process.
    """
    parent = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
    following = threading.Thread(target=_follow, args=(parent, timeout_s if orderly else 0.0), daemon=True)
    following.start()
    code = 0
    try:
        page = status.page(world.rank)
        page.now(status.START_UP)
        page.arrive(status.MEETING, "world", range(world.size))
        worlds.join(world, timeout_s)
        work()
        worlds.leave()
    except Exception as error:
        _last_words(world.rank, error)
        code = 2 if isinstance(error, InputError) else 1
    _end(code, parent)


@contextmanager
def naming_rank(world: World) -> Iterator[None]:
    """Turn an exception in a rank that torchrun or srun started into a RankFailure that names the rank. None of our
    launchers reads the status page of such a rank, so the message must name it. InputError passes unchanged."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if os.environ.get("PHALANX_TRACEBACK"):
            traceback.print_exception(error)
        raise RankFailure(_named(world, error)) from None


@contextmanager
def naming_collective(world: World, remedy: str) -> Iterator[None]:
    """Turn a collective's timeout or lost connection into a RuntimeError that names the rank and the collective, with
    a remedy. Other exceptions, as a user's own, pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        if not (timed_out(str(error)) or cut_off(str(error))):
            raise
        raise RuntimeError(f"{_named(world, error)}; {remedy}") from None


def _named(world: World, error: Exception) -> str:
    """Return a failure in one line: the rank, what it was doing, why, and who did not arrive."""
    page, why = status.page(world.rank), reason(error)
    late = worlds.absent_ranks(world, page.among) if timed_out(why) or cut_off(why) else ()
    if late:
        why += f"; {worlds.name_ranks(late)} did not arrive"
    return f"{page} failed during {page.doing or 'start-up'}: {why}"


def _follow(parent: int, grace_s: float) -> None:
    """Exit when the launcher has been gone for `grace_s` seconds."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(grace_s)
    _end(1, parent)


def _end(code: int, parent: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader is gone
            stream.flush()
    folder = os.environ.get(status.FOLDER_VARIABLE)
    if folder and os.getppid() != parent:  # no other process is left to remove the status pages
        shutil.rmtree(Path(folder).parent, ignore_errors=True)
    os._exit(code)


def _last_words(rank: int, error: BaseException) -> None:
    folder = os.environ.get(status.FOLDER_VARIABLE)
    try:
        if folder:
            status.words_file(Path(folder), rank).write_text(reason(error))
    except OSError as full:  # the launcher's folder: its disk is full, or it is gone
        print(f"rank {rank}: {reason(error)}; {folder} takes no more ({full.strerror})", file=sys.stderr)
    if not folder or os.environ.get("PHALANX_TRACEBACK"):
        traceback.print_exception(error)
