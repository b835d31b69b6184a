"""Launching local ranks through torch's elastic agent (agent.py), and the life of a launched rank.

Ctrl-C reaches only the launcher, which asks every rank to stop after its step by a signal that sets a flag. When a
rank fails, its status page and its last words say which rank it was, where, and during what; the others are stopped.

Ranks start as new processes and import torch each. A fork of the launcher, which has imported it for its agent, would
begin 2 s earlier, but glibc reads its tunables and OpenMP its number of threads as a process starts, so a fork would
measure and train with those of the launcher; and the agent's store has threads by then, of which a fork keeps none.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from phalanx.runtime.process import status
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.failure import cut_off, reason, timed_out
from phalanx.runtime.process.objects import SECRET_VARIABLE
from phalanx.runtime.process.world import World
from phalanx.spec.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from phalanx.runtime.process.agent import Agent

LAUNCHER_VARIABLE = "PHALANX_LAUNCHER"
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"  # torch's agent sets it
# Copies larger than a core's cache bypass it: what transport shm copies is read by other ranks, or much later.
_STREAMING = "glibc.cpu.x86_non_temporal_threshold=0x200000"
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RankFailure(RuntimeError):
    """A rank failed. The message names it, its mesh coordinates and what it was doing.

    `wrong_input`: it failed with an InputError.
    """

    wrong_input = False


def launch(
    module: str,
    argument: str,
    ranks: int,
    threads: int,
    on_interrupt: Callable[[], None] | None = None,
    timeout_s: float = 300.0,
    max_restarts: int = 0,
    on_restart: Callable[[int, str], None] = lambda number, failure: None,
) -> None:
    """Run `python -m module argument` as `ranks` local ranks with `threads` threads each, and wait for them.

    With `on_interrupt`, the first Ctrl-C calls it and asks the ranks to stop after their step (they hold a StopFlag);
    without it, Ctrl-C kills them and raises KeyboardInterrupt. A rank that keeps others waiting for `timeout_s`
    seconds counts as failed. After a failure all ranks are restarted, at most `max_restarts` times; `on_restart` is
    called with the number of the restart and the failure. Raises RankFailure when no restart is left.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="phalanx-"))
    environment = {
        status.FOLDER_VARIABLE: str(folder),  # the agent sets one for each attempt
        LAUNCHER_VARIABLE: str(os.getpid()),
        SECRET_VARIABLE: secrets.token_hex(32),
        # Gloo and NCCL listen, too: only where this host hears.
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "NCCL_SOCKET_IFNAME": _LOOPBACK,
        "OMP_NUM_THREADS": str(threads),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", _STREAMING),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # we handle the others
    }
    agents: list[Agent] = []  # the agent, once there is one
    try:
        with _environment(environment), _forwarding_interrupts(agents, on_interrupt):
            from phalanx.runtime.process.agent import Agent

            spec = _spec(module, argument, ranks, max_restarts, folder)
            agents.append(Agent(spec, folder, timeout_s, on_restart))
            failed = agents[0].run().is_failed()
    except SignalException as error:
        raise RankFailure(f"the launcher was stopped by {signal.Signals(error.sigval).name}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if failed:
        failure = RankFailure(agents[0].failure)
        failure.wrong_input = agents[0].wrong_input
        raise failure


def _spec(module: str, argument: str, ranks: int, max_restarts: int, folder: Path) -> WorkerSpec:
    """Describe to torch's agent what to start: ranks of a single node, which has no other to meet."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from phalanx.runtime.process.agent import MONITOR_S
    from phalanx.runtime.process.rendezvous import LocalRendezvous

    return WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=("-m", module, argument),
        rdzv_handler=LocalRendezvous(),
        max_restarts=max_restarts,
        monitor_interval=MONITOR_S,
        local_addr="localhost",
        # With a GPU for each rank, torch pins the rank to the cores near its GPU.
        numa_options=LaunchConfig(1, 1, ranks, DefaultLogsSpecs(str(folder / "logs"))).numa_options,
    )


@contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    """Add to the environment for as long as ranks run, and leave it as it was. A store that is still named there, and
    whose file is gone, would keep the ranks of a later torchrun waiting for ever."""
    before = {name: os.environ.get(name) for name in (*extra, status.FOLDER_VARIABLE, worlds.STORE_VARIABLE)}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _forwarding_interrupts(agents: list[Agent], on_interrupt: Callable[[], None] | None) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM and SIGHUP: the first asks the ranks to stop after their step, the second kills them.

    `agents` holds the agent once there is one.
    """
    asked = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked or on_interrupt is None or not agents or not agents[0].pages():
            for agent in agents:
                agent.kill()
            raise KeyboardInterrupt
        asked = True
        on_interrupt()
        agents[0].ask_to_stop()

    # Under nohup a hangup is ignored.
    heeded = [n for n in _STOPS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopFlag:
    """True once this rank has been asked to stop: by SIGUSR1, SIGTERM, SIGINT or SIGHUP, or by its launcher's death.

    The ranks agree on it once a step.
    """

    def __init__(self) -> None:
        self._asked = False
        self._parent = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
        for number in (signal.SIGUSR1, *_STOPS):
            signal.signal(number, self._ask)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True

    def __bool__(self) -> bool:
        return self._asked or os.getppid() != self._parent


def restarted() -> bool:
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
def named(world: World) -> Iterator[None]:
    """Turn an exception in a rank that torchrun or srun started into a RankFailure that names the rank.

    No launcher of ours reads the status page of such a rank, so it must name itself. InputError passes unchanged.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if os.environ.get("PHALANX_TRACEBACK"):
            traceback.print_exception(error)
        page, why = status.page(world.rank), reason(error)
        late = worlds.absent(world, page.among) if timed_out(why) or cut_off(why) else ()
        if late:
            why += f"; {worlds.described(late)} did not arrive"
        raise RankFailure(f"{page} failed during {page.doing or 'start-up'}: {why}") from None


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
    if folder and os.getppid() != parent:  # nobody else is left to remove the status pages
        shutil.rmtree(Path(folder).parent, ignore_errors=True)
    os._exit(code)


def _last_words(rank: int, error: BaseException) -> None:
    folder = os.environ.get(status.FOLDER_VARIABLE)
    if folder:
        status.words_file(Path(folder), rank).write_text(reason(error))
    if not folder or os.environ.get("PHALANX_TRACEBACK"):
        traceback.print_exception(error)
