"""torch's elastic agent for the ranks of this host, with a watchdog.

It looks every 50 ms whether a rank has failed, and more rarely whether one keeps the others waiting
(runtime/watchdog.py). Then one sentence names it, and all end: asked by SIGTERM, killed after a few seconds; a rank
that did not arrive, has not begun, or whose process is stopped, is killed at once. torch's agent starts them again
while restarts are left; every attempt has status pages of its own. Wrong input mends itself in no restart.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from phalanx.runtime.process import status, watchdog
from phalanx.runtime.process.failure import timed_out
from phalanx.runtime.process.status import Status

WRONG_INPUT = 2
"""Exit code of a rank that was given what it cannot use."""
MONITOR_S = 0.05
_LOOK_S = (0.25, 5.0)  # between looks at the pages: a fiftieth of the timeout, within these bounds
_GRACE_S = 8.0  # for what hears SIGTERM; a checkpoint half written may become whole
_DEATH_S = 5.0  # how long a killed process may take to go

OnRestart = Callable[[int, str], None]


class Agent(LocalElasticAgent):
    """`failure`: the sentence on the last failure. `on_restart` is told the number of a restart, and why."""

    def __init__(self, spec: WorkerSpec, folder: Path, timeout_s: float, on_restart: OnRestart) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder / "logs")))
        self.failure = ""
        self.wrong_input = False  # whether that is what the failure was
        self._stopping = False
        self._folder, self._timeout_s, self._on_restart = folder, timeout_s, on_restart
        self._attempt = -1
        self._looked_s = 0.0
        self._pids: dict[int, int] = {}

    def pages(self) -> dict[int, Status]:
        """What the ranks of this attempt say."""
        return status.read(self._attempt_folder) if self._attempt >= 0 else {}

    def ask_to_stop(self) -> None:
        """That every rank stops after its step. There is no restart after that."""
        self._remaining_restarts, self._stopping = 0, True
        for page in self.pages().values():
            _signal(page.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End every rank now."""
        self._remaining_restarts = 0
        for pid in self._pids.values():
            _signal_all(pid, signal.SIGKILL)

    @property
    def _attempt_folder(self) -> Path:
        return self._folder / f"attempt-{self._attempt}"

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        self._pids = {}
        if self._attempt:
            self._on_restart(self._attempt, self.failure)
        self._attempt_folder.mkdir()
        os.environ[status.FOLDER_VARIABLE] = str(self._attempt_folder)
        started = super()._start_workers(worker_group)
        self._pids = {worker_group.workers[local].global_rank: pid for local, pid in started.items()}
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stopping:  # ranks of a restart that was under way when it was asked for hear of it too
            self.ask_to_stop()
        late, why = (), ""
        if not any(_codes(self._pids).values()):
            late, why = self._overdue()
        if why or any(_codes(self._pids).values()):
            self._conclude(late, why)
        return super()._monitor_workers(worker_group)

    def _overdue(self) -> tuple[tuple[int, ...], str]:
        """Ranks that keep others waiting for longer than the timeout, and the sentence that says so."""
        now_s = time.monotonic()
        if now_s - self._looked_s < min(max(self._timeout_s / 50, _LOOK_S[0]), _LOOK_S[1]):
            return (), ""
        self._looked_s = now_s
        pages = self.pages()
        late = watchdog.late(pages, now_s, self._timeout_s)
        if late is not None:
            return late.ranks, watchdog.describe_late(late, pages, now_s)
        if watchdog.late(pages, now_s, 0.0) is not None:  # who is waited for has its time
            return (), ""
        stopped = watchdog.stopped(pages, now_s, self._timeout_s)
        return stopped, watchdog.describe_stopped(stopped, pages, now_s)

    def _conclude(self, late: tuple[int, ...], why: str) -> None:
        """Say who failed and end the others. `late` are killed for `why`."""
        pages = self.pages()
        before = _codes(self._pids)
        why = why or self._waited_in_vain(pages, list(before))
        sent: dict[int, signal.Signals] = {}
        for rank, pid in self._pids.items():
            if rank not in before:
                hopeless = rank in late or watchdog.is_stopped(pid)
                idle = rank not in pages or pages[rank].doing in (status.START_UP, status.MEETING)
                sent[rank] = signal.SIGKILL if hopeless or idle else signal.SIGTERM
                _signal_all(pid, sent[rank])
        if not self._all_end(_GRACE_S):
            for rank in self._pids.keys() - _codes(self._pids).keys():
                sent[rank] = signal.SIGKILL
        for pid in self._pids.values():  # what a rank has started itself goes with it
            _signal_all(pid, signal.SIGKILL)
        self._all_end(_DEATH_S)
        codes = {rank: code for rank, code in _codes(self._pids).items() if code and code != -sent.get(rank, 0)}
        if not why:
            rank = _first(self._attempt_folder, codes)
            why = _describe(self._attempt_folder, pages, rank, codes[rank])
            if codes[rank] == WRONG_INPUT:
                self._remaining_restarts, self.wrong_input = 0, True
        self.failure = why

    def _waited_in_vain(self, pages: dict[int, Status], ended: list[int]) -> str:
        """The sentence on a rank for which others have waited until their collective gave up, a moment before the
        watchdog would have; empty where they ended for another reason."""
        words = " ".join(status.words_of(self._attempt_folder, rank) for rank in ended)
        if not timed_out(words):
            return ""
        now_s, overdue_s = time.monotonic(), self._timeout_s / 2
        late = watchdog.late(pages, now_s, overdue_s)
        if late is not None:
            return watchdog.describe_late(late, pages, now_s)
        return watchdog.describe_stopped(watchdog.stopped(pages, now_s, overdue_s), pages, now_s)

    def _all_end(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while len(_codes(self._pids)) < len(self._pids):
            if time.monotonic() > deadline:
                return False
            time.sleep(MONITOR_S / 5)
        return True


def _codes(pids: dict[int, int]) -> dict[int, int]:
    """Exit codes of the ranks that have ended, negative for signals; torch's agent still finds them there."""
    found = {}
    for rank, pid in pids.items():
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # torch's agent has seen it end well
            found[rank] = 0
            continue
        if ended is not None:
            found[rank] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _signal_all(pid: int, number: signal.Signals) -> None:
    """To a rank and what it has started: each leads a group of its own."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        _signal(pid, number)


def _first(folder: Path, codes: dict[int, int]) -> int:
    """Which of the failed ranks failed first: one that was killed, for its peers only notice that it is gone; else
    the one that spoke first."""

    def order(rank: int) -> tuple[bool, float]:
        words = status.words_file(folder, rank)
        return codes[rank] >= 0, words.stat().st_mtime if words.exists() else float("inf")

    return min(codes, key=order)


def _describe(folder: Path, pages: dict[int, Status], rank: int, code: int) -> str:
    reason = status.words_of(folder, rank) or f"ended with {_exit(code)}"
    if rank not in pages:
        return f"rank {rank} failed before it could say what it does: {reason}"
    return f"{pages[rank]} failed during {pages[rank].doing}: {reason}"


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    by = " (sent by somebody, or by the system for want of memory)" if code == -signal.SIGKILL else ""
    return signal.Signals(-code).name + by
