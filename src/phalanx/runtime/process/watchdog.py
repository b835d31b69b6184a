"""The watchdog: finds late ranks, the ranks waiting for them, and since when, in the status pages of a host's ranks.

A rank is late for a collective when another rank of the group arrived there longer ago than the timeout and it did
not, which is how the collective itself defines a timeout. However long a rank computes, evaluates or compiles, it is
not late as long as no rank waits for it. The hanging rank is the one that others wait for and that waits for none. A
rank whose process is stopped is blamed first. It may have arrived and still keep others waiting, since its operations
in flight (an all-gather) make no progress; ranks that wait for those do not arrive anywhere either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.runtime.process.failure import cut_off, timed_out
from phalanx.runtime.process.status import Status, StatusEntry


@dataclass(frozen=True)
class Late:
    """`ranks` have not arrived at the collective `what`, where the `waiting` ranks have been since its time."""

    ranks: tuple[int, ...]
    what: StatusEntry
    waiting: tuple[int, ...]


def late(pages: dict[int, Status], now_s: float, overdue_s: float) -> Late | None:
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
    return Late(tuple(sorted(missing)), what, tuple(sorted(ranks)))


def stopped(pages: dict[int, Status], now_s: float, overdue_s: float) -> tuple[int, ...]:
    """Return the ranks whose process is stopped (SIGSTOP) and has reported nothing for `overdue_s` seconds."""
    return tuple(
        rank
        for rank, page in sorted(pages.items())
        if is_stopped(page.pid) and page.entries and now_s - page.entries[-1].time_s >= overdue_s
    )


def overdue(pages: dict[int, Status], now_s: float, overdue_s: float) -> tuple[tuple[int, ...], str]:
    """Return the ranks to blame for a lack of progress for `overdue_s` seconds, and a sentence about them."""
    who, halted = late(pages, now_s, overdue_s), stopped(pages, now_s, overdue_s)
    if who is not None and (not halted or set(who.ranks) & set(halted)):
        return who.ranks, describe_late(who, pages, now_s)
    return halted, describe_stopped(halted, pages, now_s)


def described_by_peers(
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
    return overdue(pages, now_s, overdue_s)[1]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped or traced; False if it is gone, or the system has no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def describe_late(late: Late, pages: dict[int, Status], now_s: float) -> str:
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
