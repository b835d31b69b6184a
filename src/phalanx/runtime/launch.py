"""Local ranks, started and watched through torch's elastic agent.

Ctrl-C reaches only the launcher: it asks every rank to stop after its step, by a signal that sets a flag. When a
rank fails, its status page and its own last words say who, where and during what; the others are stopped.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from phalanx.runtime import status
from phalanx.runtime import world as worlds
from phalanx.runtime.world import World

LAUNCHER_VARIABLE = "PHALANX_LAUNCHER"
_SHUTDOWN_S = 10
# Copies of more than a core's cache write around it: what transport shm copies is read by others, or much later.
_STREAMING = "glibc.cpu.x86_non_temporal_threshold=0x200000"
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RankFailure(RuntimeError):
    """A rank died; the message names it, its coordinates and its event."""


def launch(
    module: str, argument: str, ranks: int, threads: int, on_interrupt: Callable[[], None] | None = None
) -> None:
    """Run `python -m module argument` as local ranks and wait.

    With `on_interrupt` the first Ctrl-C asks the ranks to stop by themselves, in order (they hold a StopFlag);
    without it Ctrl-C ends them and raises KeyboardInterrupt. Raises RankFailure.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="phalanx-"))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        signals_to_handle="SIGQUIT",
        shutdown_timeout=_SHUTDOWN_S,
    )
    environment = {
        status.FOLDER_VARIABLE: str(folder),
        LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", _STREAMING),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    try:
        with _environment(environment), _forwarding_interrupts(folder, on_interrupt):
            elastic_launch(config, sys.executable)("-m", module, argument)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        raise RankFailure(_describe(folder, *_first(folder, codes))) from None
    except SignalException as error:
        raise RankFailure(f"the launcher was stopped by {signal.Signals(error.sigval).name}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _words(folder: Path, rank: int) -> Path:
    return folder / f"last-words-{rank}"


def _words_of(folder: Path, rank: int) -> str:
    path = _words(folder, rank)
    return path.read_text().strip() if path.exists() else ""


def _first(folder: Path, codes: dict[int, int]) -> tuple[int, int]:
    """Which of the failed ranks failed first, with its exit code: one that was killed, for its peers only notice
    that it is gone; else the one that spoke first."""

    def order(rank: int) -> tuple[bool, float]:
        words = _words(folder, rank)
        return codes[rank] >= 0, words.stat().st_mtime if words.exists() else float("inf")

    rank = min(codes, key=order)
    return rank, codes[rank]


def _describe(folder: Path, rank: int, code: int) -> str:
    """What is known of the first rank that failed, and of one that it waited for in vain."""
    pages = status.read(folder)
    waited = next((p for p in pages.values() if "imed out" in _words_of(folder, p.rank)), None)
    if waited is not None:
        # One that is stopped or hangs could say nothing, where those that waited for it did; or it said less before.
        silent = [page for page in pages.values() if not _words_of(folder, page.rank)]
        late = min(silent or pages.values(), key=lambda page: page.count)
        if silent or late.count < waited.count:
            return f"{late} did not arrive: last seen during {late.doing}; {waited} waited for it in {waited.doing}"
    if rank not in pages:
        return f"rank {rank} ended with {_exit(code)} before it could say what it does"
    page = pages[rank]
    reason = _words_of(folder, rank) or f"ended with {_exit(code)}"
    return f"{page} failed during {page.doing}: {reason}"


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _forwarding_interrupts(folder: Path, on_interrupt: Callable[[], None] | None) -> Iterator[None]:
    """First Ctrl-C (or SIGTERM, SIGHUP): ask the ranks to stop after their step. Second: end them now."""
    asked = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        pages = status.read(folder)
        if asked or not pages or on_interrupt is None:
            for page in pages.values():
                _signal(page.pid, signal.SIGKILL)
            raise KeyboardInterrupt
        asked = True
        on_interrupt()
        for page in pages.values():
            _signal(page.pid, signal.SIGUSR1)

    previous = {number: signal.signal(number, handle) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


class StopFlag:
    """Set by SIGUSR1, SIGTERM, SIGINT or SIGHUP, or when the launcher is gone; the ranks agree on it once a step."""

    def __init__(self) -> None:
        self._asked = False
        self._parent = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
        for number in (signal.SIGUSR1, *_STOPS):
            signal.signal(number, self._ask)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True

    def __bool__(self) -> bool:
        return self._asked or os.getppid() != self._parent


def run_rank(world: World, timeout_s: float, work: Callable[[], object]) -> NoReturn:
    """The whole life of a rank that the launcher started: join, work, part, end.

    A failure leaves its reason where the launcher finds it. The process ends without Python's and C++'s own
    tidying up: after a failure other threads may hang in a collective that will never end, and after success
    torch's background threads, taken apart in no fixed order, now and then abort the process.
    """
    code, parent = 0, os.getppid()
    try:
        worlds.join(world, timeout_s)
        work()
        worlds.leave()
    except Exception as error:
        _last_words(world.rank, error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getppid() != parent:  # nobody is left to clear the status pages away
        shutil.rmtree(os.environ.get(status.FOLDER_VARIABLE, ""), ignore_errors=True)
    os._exit(code)


def _last_words(rank: int, error: BaseException) -> None:
    folder = os.environ.get(status.FOLDER_VARIABLE)
    if folder:
        text = str(error).strip().splitlines() or [""]
        _words(Path(folder), rank).write_text(f"{type(error).__name__}: {text[0]}")
    if not folder or os.environ.get("PHALANX_TRACEBACK"):
        traceback.print_exception(error)
