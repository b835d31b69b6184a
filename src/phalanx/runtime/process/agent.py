"""torch's elastic agent for the ranks of this host, with a watchdog.

The agent checks every 50 ms whether a rank has failed, and less often whether one keeps the others waiting
(watchdog.py). On a failure it names the culprit in one sentence and ends all ranks: with SIGTERM, then with SIGKILL
after a few seconds. A rank that did not arrive, has not begun, or whose process is stopped is killed at once. torch's
agent restarts the ranks while restarts are left; every attempt has its own status pages. After wrong input there is
no restart, for it would fail again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from phalanx.runtime.process import status, watchdog
from phalanx.runtime.process.status import Status
from phalanx.runtime.process.world import STORE_VARIABLE

WRONG_INPUT = 2
"""Exit code of a rank whose input is wrong (InputError)."""
MONITOR_S = 0.05
_CHECK_PAGES_S = (0.25, 5.0)  # between reads of the status pages: a fiftieth of the timeout, within these bounds
_GRACE_S = 8.0  # after SIGTERM: enough to finish a checkpoint that is being written
_DEATH_S = 5.0  # how long a killed process may take to disappear

OnRestart = Callable[[int, str], None]


class Agent(LocalElasticAgent):
    """Runs the ranks of this host, ends them all when one fails, and restarts them while restarts are left.

    `failure` describes the last failure in one sentence. `on_restart` is called with the number of a restart and the
    failure that caused it.
    """

    def __init__(self, spec: WorkerSpec, folder: Path, timeout_s: float, on_restart: OnRestart) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder / "logs")))
        self.failure = ""
        self.wrong_input = False  # whether the last failure was an InputError
        self._stopping = False
        self._folder, self._timeout_s, self._on_restart = folder, timeout_s, on_restart
        self._attempt = -1
        self._checked_s = 0.0
        self._pids: dict[int, int] = {}

    def pages(self) -> dict[int, Status]:
        """Return the status pages of this attempt, by rank."""
        return status.read(self._attempt_folder) if self._attempt >= 0 else {}

    def ask_to_stop(self) -> None:
        """Ask every rank to stop after its current step. No restart follows."""
        self._remaining_restarts, self._stopping = 0, True
        for page in self.pages().values():
            _signal(page.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill every rank now. No restart follows."""
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
        os.environ[STORE_VARIABLE] = str(self._attempt_folder / "store")
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._pids = {worker_group.workers[local].global_rank: pid for local, pid in started.items()}
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stopping:  # asked again each time, for ranks that a restart was starting when the request came
            self.ask_to_stop()
        late: tuple[int, ...] = ()
        why = ""
        ended = _codes(self._pids)
        if not any(ended.values()):
            late, why = self._overdue()
        if why or any(ended.values()):
            self._conclude(late, why)
        elif len(ended) < len(self._pids):  # a rank that fails from here on is described in the next round
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _overdue(self) -> tuple[tuple[int, ...], str]:
        """Return the ranks that have kept others waiting for longer than the timeout, and a sentence about them."""
        now_s = time.monotonic()
        if now_s - self._checked_s < min(max(self._timeout_s / 50, _CHECK_PAGES_S[0]), _CHECK_PAGES_S[1]):
            return (), ""
        self._checked_s = now_s
        pages = self.pages()
        late = watchdog.late(pages, now_s, self._timeout_s)
        if late is not None:
            return late.ranks, watchdog.describe_late(late, pages, now_s)
        if watchdog.late(pages, now_s, 0.0) is not None:  # somebody is waited for, and still has time
            return (), ""
        stopped = watchdog.stopped(pages, now_s, self._timeout_s)
        return stopped, watchdog.describe_stopped(stopped, pages, now_s)

    def _conclude(self, late: tuple[int, ...], why: str) -> None:
        """Name the rank that failed and end all others. The `late` ranks are killed at once; `why` describes them."""
        pages = self.pages()
        ended = _codes(self._pids)
        words = {rank: status.words_of(self._attempt_folder, rank) for rank in self._pids}
        why = why or watchdog.described_by_peers(pages, words, ended, time.monotonic(), self._timeout_s)
        sent: dict[int, signal.Signals] = {}
        for rank, pid in self._pids.items():
            if rank not in ended:
                hopeless = rank in late or watchdog.is_stopped(pid)
                idle = rank not in pages or pages[rank].doing in (status.START_UP, status.MEETING)
                sent[rank] = signal.SIGKILL if hopeless or idle else signal.SIGTERM
                _signal_all(pid, sent[rank])
        if not self._all_end(_GRACE_S):
            for rank in self._pids.keys() - _codes(self._pids).keys():
                sent[rank] = signal.SIGKILL
        for pid in self._pids.values():  # and the processes that the ranks started themselves
            _signal_all(pid, signal.SIGKILL)
        self._all_end(_DEATH_S)
        codes = {rank: code for rank, code in _codes(self._pids).items() if code and code != -sent.get(rank, 0)}
        if not why:
            rank = _first(self._attempt_folder, codes)
            why = _describe(self._attempt_folder, pages, rank, codes[rank])
            if codes[rank] == WRONG_INPUT:
                self._remaining_restarts, self.wrong_input = 0, True
        self.failure = why

    def _all_end(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while len(_codes(self._pids)) < len(self._pids):
            if time.monotonic() > deadline:
                return False
            time.sleep(MONITOR_S / 5)
        return True


def _codes(pids: dict[int, int]) -> dict[int, int]:
    """Return the exit codes of the ranks that have ended, negative for signals.

    The processes are not reaped (WNOWAIT): torch's agent still has to wait for them.
    """
    codes: dict[int, int] = {}
    for rank, pid in pids.items():
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # torch's agent has reaped it, after a success
            codes[rank] = 0
            continue
        if ended is not None:
            codes[rank] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return codes


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _signal_all(pid: int, number: signal.Signals) -> None:
    """Signal a rank and the processes it has started: each rank leads a process group."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        _signal(pid, number)


def _first(folder: Path, codes: dict[int, int]) -> int:
    """Return the rank that failed first.

    A killed rank precedes any other, for its peers only notice that it is gone; otherwise the rank whose last words
    are the oldest.
    """

    def order(rank: int) -> tuple[bool, float]:
        words = status.words_file(folder, rank)
        return codes[rank] >= 0, words.stat().st_mtime if words.exists() else float("inf")

    return min(codes, key=order)


def _describe(folder: Path, pages: dict[int, Status], rank: int, code: int) -> str:
    reason = status.words_of(folder, rank) or f"ended with {_exit(code)}"
    if rank not in pages:
        return f"rank {rank} failed before it could report what it was doing: {reason}"
    return f"{pages[rank]} failed during {pages[rank].doing}: {reason}"


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    by = " (sent by a user, or by the kernel when memory ran out)" if code == -signal.SIGKILL else ""
    return signal.Signals(-code).name + by
