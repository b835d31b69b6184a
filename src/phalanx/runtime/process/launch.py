"""Launching local ranks.

Ctrl-C reaches only the launcher, which asks every rank to stop after its step by a signal that sets a flag. When a
rank fails, its status page and its last words say which rank it was, where, and during what; the others are stopped
(agent.py).

Ranks start as new processes and import torch each, at once; their launcher does without it. Forks of a launcher that
has imported torch would start no sooner; and since glibc reads its tunables and OpenMP its number of threads when a
process starts, forks would measure and train with the launcher's settings.
"""

import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from phalanx.runtime.process.agent import LAUNCHER_VARIABLE, SECRET_VARIABLE, Agent, Ranks
from phalanx.runtime.process.folder import private_folder
from phalanx.runtime.process.status import PAGE_BYTES
from phalanx.spec.errors import InputError

# Copies larger than a core's cache bypass it: what transport shm copies is read by other ranks, or much later.
_STREAMING = "glibc.cpu.x86_non_temporal_threshold=0x200000"
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a user ends a run."""


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
    command = (sys.executable, "-m", module, argument)
    with private_folder() as (folder, lock):
        needed = ranks * PAGE_BYTES
        if (free := shutil.disk_usage(folder).free) < needed:
            reason = f"{folder.parent} has {free:,} bytes left, {ranks} ranks need {needed:,}"
            raise InputError("TMPDIR", None, reason, "make room, or name another folder")
        started = Ranks(command, ranks, _environment(threads), max_restarts, (lock,))
        agent = Agent(started, folder, timeout_s, on_restart)
        with _forwarding_interrupts(agent, on_interrupt):
            succeeded = agent.run()
    if not succeeded:
        failure = RankFailure(agent.failure)
        failure.wrong_input = agent.wrong_input
        raise failure


def _environment(threads: int) -> dict[str, str]:
    """Return the environment variables that ranks with `threads` threads get in addition to the launcher's."""
    return {
        LAUNCHER_VARIABLE: str(os.getpid()),
        SECRET_VARIABLE: secrets.token_hex(32),
        # Gloo and NCCL listen too: only on this host's loopback.
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "NCCL_SOCKET_IFNAME": _LOOPBACK,
        "OMP_NUM_THREADS": str(threads),
        # A terminal of ASCII shows a text with question marks, and the rank trains on.
        "PYTHONIOENCODING": f"{getattr(sys.stdout, 'encoding', None) or 'utf-8'}:replace",
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", _STREAMING),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


@contextmanager
def _forwarding_interrupts(agent: Agent, on_interrupt: Callable[[], None] | None) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM and SIGHUP: the first asks the ranks to stop after their step, the second kills them."""
    asked = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked or on_interrupt is None or not agent.pages():
            agent.kill()
            raise KeyboardInterrupt
        asked = True
        on_interrupt()
        agent.ask_to_stop()

    # Under nohup a hangup is ignored.
    heeded = [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
