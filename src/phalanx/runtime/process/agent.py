"""The agent of a local launcher: it starts the ranks of this host, watches over them, and restarts them.

Every 50 ms it checks whether a rank has failed, and less often whether one keeps the others waiting. On
a failure it names the culprit in one sentence and ends all ranks: with SIGTERM, then with SIGKILL after a few
seconds. A rank that did not arrive, has not started, or whose process is stopped is killed at once. While restarts
are left, all ranks start again; every attempt has its own status pages. After wrong input there is no restart, since
it would fail again.

Under torchrun torch's elastic agent does this, for many hosts. It is not used here because importing torch takes two
seconds, during which no rank would start.

Late ranks, those waiting for them, and since when, are found in the status pages of a host's ranks. A rank is late
for a collective when another rank of the group arrived there longer ago than the timeout and it did not, which is how
the collective itself defines a timeout. However long a rank computes, evaluates or compiles, it is not late as long
as no rank waits for it. The hanging rank is the one that others wait for and that waits for none. A rank whose
process is stopped is blamed first. It may have arrived and still keep others waiting, since its operations in flight
(an all-gather) make no progress; ranks that wait for those do not arrive anywhere either.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.runtime.process import status
from phalanx.runtime.process.failure import cut_off, timed_out
from phalanx.runtime.process.status import Status, StatusEntry


@dataclass(frozen=True)
class LateRanks:
    """The `ranks` that have not arrived at the collective `what`, and the ranks that are `waiting` for them there."""

    ranks: tuple[int, ...]
    what: StatusEntry
    waiting: tuple[int, ...]


def late_ranks(pages: dict[int, Status], now_s: float, overdue_s: float) -> LateRanks | None:
    """Return the ranks that have kept others waiting for longer than `overdue_s` seconds, or None."""
    # By collective (ranks, number): its entry, the ranks that wait there, the ranks that are missing.
    unmet: dict[tuple[tuple[int, ...], int], tuple[StatusEntry, list[int], set[int]]] = {}
    for rank, page in pages.items():
        for e in page.entries:
            if not e.ranks or now_s - e.time_s < overdue_s:
                continue
            missing = {r for r in e.ranks if r not in pages or pages[r].arrived.get(e.ranks, 0) < e.number}
            if missing:
                unmet.setdefault((e.ranks, e.number), (e, [], missing))[1].append(rank)
    if not unmet:
        return None
    waiting = {rank for _, ranks, _ in unmet.values() for rank in ranks}
    halted = {rank for rank, page in pages.items() if is_stopped(page.pid)}
    # A rank that itself waits is not to blame; if all wait for each other, the oldest collective is reported.
    roots = [(what, ranks, missing & halted) for what, ranks, missing in unmet.values() if missing & halted]
    roots = roots or [
        (what, ranks, missing - waiting) for what, ranks, missing in unmet.values() if missing - waiting
    ]
    what, ranks, missing = min(roots or unmet.values(), key=lambda row: row[0].time_s)
    return LateRanks(tuple(sorted(missing)), what, tuple(sorted(ranks)))


def stopped_ranks(pages: dict[int, Status], now_s: float, overdue_s: float) -> tuple[int, ...]:
    """Return the ranks whose process is stopped (SIGSTOP) and has reported nothing for `overdue_s` seconds."""
    return tuple(
        rank
        for rank, page in sorted(pages.items())
        if is_stopped(page.pid) and page.entries and now_s - page.entries[-1].time_s >= overdue_s
    )


def overdue_ranks(pages: dict[int, Status], now_s: float, overdue_s: float) -> tuple[tuple[int, ...], str]:
    """Return (the ranks to blame if nothing has progressed for `overdue_s` seconds, a sentence about them); empty if
    none is."""
    who, halted = late_ranks(pages, now_s, overdue_s), stopped_ranks(pages, now_s, overdue_s)
    if who is not None and (not halted or set(who.ranks) & set(halted)):
        return who.ranks, describe_late(who, pages, now_s)
    return halted, describe_stopped(halted, pages, now_s)


def describe_by_peers(
    pages: dict[int, Status], words: Mapping[int, str], ended: Mapping[int, int], now_s: float, timeout_s: float
) -> str:
    """Describe the rank that others waited for until a collective of theirs timed out, from their last `words`.

    That happens just before the watchdog would have noticed. A rank whose collective timed out closes its connections
    before it says why, so the first that is heard may be a peer that complains of its connection. Empty if the ranks
    failed for another reason; `ended` has exit codes, negative for signals.
    """
    said = [text for text in words.values() if text]
    if any(timed_out(text) for text in said):
        overdue_s = timeout_s / 2
    elif said and all(cut_off(text) for text in said) and not any(code < 0 for code in ended.values()):
        overdue_s = 0.9 * timeout_s  # a peer may also have died: only ranks that are nearly late are to blame
    else:
        return ""
    return overdue_ranks(pages, now_s, overdue_s)[1]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped or traced; False if it is gone, or the system has no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def describe_late(late: LateRanks, pages: dict[int, Status], now_s: float) -> str:
    """Return one sentence: which ranks did not arrive where, their last reports, and which ranks have waited how
    long."""
    names = " and ".join(_name(rank, pages) for rank in late.ranks)
    seen = [_last_seen(pages.get(rank), now_s) for rank in late.ranks]
    if len(late.ranks) > 1:
        seen = [f"rank {rank} {text}" for rank, text in zip(late.ranks, seen, strict=True)]
    have = "has" if len(late.ranks) == 1 else "have"
    who, wait = ("rank", "has") if len(late.waiting) == 1 else ("ranks", "have")
    return (
        f"{names} {have} not arrived at {late.what.text}: {', '.join(seen)}; "
        f"{who} {', '.join(map(str, late.waiting))} {wait} been waiting for {now_s - late.what.time_s:.1f} s"
    )


def describe_stopped(ranks: tuple[int, ...], pages: dict[int, Status], now_s: float) -> str:
    """Return one sentence: which stopped ranks make no progress, though no rank waits for them."""
    return "; ".join(f"{_name(rank, pages)} makes no progress: {_last_seen(pages[rank], now_s)}" for rank in ranks)


def _name(rank: int, pages: dict[int, Status]) -> str:
    return str(pages[rank]) if rank in pages else f"rank {rank}"


def _last_seen(page: Status | None, now_s: float) -> str:
    if page is None or not page.entries:
        return "has reported nothing yet"
    note = " (its process is stopped)" if is_stopped(page.pid) else ""
    return f"last seen in {page.doing}, {now_s - page.entries[-1].time_s:.1f} s ago{note}"


LAUNCHER_VARIABLE = "PHALANX_LAUNCHER"
"""Environment variable: the launcher's process, with which its ranks end."""
SECRET_VARIABLE = "PHALANX_SECRET"
"""Environment variable: the secret with which the ranks of a run sign messages (objects.py)."""
STORE_VARIABLE = "PHALANX_STORE"
"""Environment variable: the rendezvous file of a local launcher's ranks."""
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable: the number of the attempt, as torchrun names it."""
WRONG_INPUT = 2
"""Exit code of a rank whose input is wrong (InputError)."""
MONITOR_S = 0.05
_CHECK_PAGES_S = (0.25, 5.0)  # between reads of the status pages: a fiftieth of the timeout, within these bounds
_GRACE_S = 8.0  # after SIGTERM: enough to finish a checkpoint that is being written
_DEATH_S = 5.0  # how long a killed process may take to disappear

OnRestart = Callable[[int, str], None]


@dataclass(frozen=True)
class Ranks:
    """The ranks that an agent starts: `count` processes that run `command`, with `environment` added to the agent's;
    they inherit the descriptors in `inherited`."""

    command: Sequence[str]
    count: int
    environment: Mapping[str, str]
    max_restarts: int = 0
    inherited: tuple[int, ...] = ()


class Agent:
    """Runs the ranks of this host, ends all when one fails, and restarts them while restarts remain.

    `failure` describes the last failure in one sentence. `on_restart` is called with the number of a restart and the
    failure that caused it.
    """

    def __init__(self, ranks: Ranks, folder: Path, timeout_s: float, on_restart: OnRestart) -> None:
        self.failure = ""
        self.wrong_input = False  # whether the last failure was an InputError
        self._stopping = False
        self._ranks, self._folder, self._timeout_s, self._on_restart = ranks, folder, timeout_s, on_restart
        self._remaining_restarts = ranks.max_restarts
        self._attempt = -1
        self._checked_s = 0.0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def run(self) -> bool:
        """Run all ranks to their end; return whether the last attempt succeeded."""
        try:
            while True:
                self._start()
                if self._succeeds():
                    return True
                if not self._remaining_restarts:
                    return False
                self._remaining_restarts -= 1
        finally:
            self.kill()
            self._reap()

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

    @property
    def _pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def _start(self) -> None:
        """Start an attempt: all ranks, each as the leader of a process group."""
        self._attempt += 1
        if self._attempt:
            self._on_restart(self._attempt, self.failure)
        self._attempt_folder.mkdir()
        common = {
            **os.environ,
            **self._ranks.environment,
            status.FOLDER_VARIABLE: str(self._attempt_folder),
            STORE_VARIABLE: str(self._attempt_folder / "store"),
            RESTARTS_VARIABLE: str(self._attempt),
            "WORLD_SIZE": str(self._ranks.count),
            "LOCAL_WORLD_SIZE": str(self._ranks.count),
        }
        for rank in range(self._ranks.count):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._processes[rank] = start_process(self._ranks.command, own, self._ranks.inherited)

    def _succeeds(self) -> bool:
        """Watch over an attempt until all its ranks have ended; return whether all went well."""
        while True:
            time.sleep(MONITOR_S)
            if self._stopping:  # asked again each time, for ranks that a restart was starting when the request came
                self.ask_to_stop()
            ended = _codes(self._pids)
            failed = any(ended.values())
            late, why = ((), "") if failed else self._overdue()
            if failed or why:
                self._conclude(late, why)
            elif len(ended) < len(self._pids):
                continue
            self._reap()
            return not (failed or why)

    def _reap(self) -> None:
        """Wait for the processes of an attempt, which have ended or were killed."""
        for process in self._processes.values():
            process.wait()
        self._processes = {}

    def _overdue(self) -> tuple[tuple[int, ...], str]:
        """Return the ranks that have kept others waiting for longer than the timeout, and a sentence about them."""
        now_s = time.monotonic()
        if now_s - self._checked_s < min(max(self._timeout_s / 50, _CHECK_PAGES_S[0]), _CHECK_PAGES_S[1]):
            return (), ""
        self._checked_s = now_s
        pages = self.pages()
        waited_for = late_ranks(pages, now_s, 0.0) is not None
        if waited_for and late_ranks(pages, now_s, self._timeout_s) is None:  # who still has time
            return (), ""
        return overdue_ranks(pages, now_s, self._timeout_s)

    def _conclude(self, late: tuple[int, ...], why: str) -> None:
        """Set `failure` to a sentence about the rank that failed, and end all others. `late` ranks are killed at
        once; `why` is the sentence about them, if there are any."""
        pages = self.pages()
        ended = _codes(self._pids)
        words = {rank: status.words_of(self._attempt_folder, rank) for rank in self._pids}
        why = why or describe_by_peers(pages, words, ended, time.monotonic(), self._timeout_s)
        sent: dict[int, signal.Signals] = {}
        for rank, pid in self._pids.items():
            if rank not in ended:
                hopeless = rank in late or is_stopped(pid)
                idle = rank not in pages or pages[rank].doing in (status.START_UP, status.MEETING)
                sent[rank] = signal.SIGKILL if hopeless or idle else signal.SIGTERM
                _signal_all(pid, sent[rank])
        if not self._all_end(_GRACE_S):
            for rank in self._pids.keys() - _codes(self._pids).keys():
                sent[rank] = signal.SIGKILL
        for pid in self._pids.values():  # including processes started by the ranks
            _signal_all(pid, signal.SIGKILL)
        self._all_end(_DEATH_S)
        codes = {rank: code for rank, code in _codes(self._pids).items() if code and code != -sent.get(rank, 0)}
        if not why:
            rank = _first_failed(self._attempt_folder, codes)
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


def start_process(
    command: Sequence[str], environment: Mapping[str, str], inherited: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, where no Ctrl-C reaches it."""
    return subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=inherited)


def _codes(pids: dict[int, int]) -> dict[int, int]:
    """Return the exit codes of the ranks that have ended, negative for signals. The processes are not reaped
    (WNOWAIT), so that their pids are not reused while they may still be signalled."""
    codes: dict[int, int] = {}
    for rank, pid in pids.items():
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
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


def _first_failed(folder: Path, codes: dict[int, int]) -> int:
    """Return the rank that failed first. A killed rank precedes any other, for its peers only notice that it is gone;
    otherwise the rank whose last words are the oldest."""

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
