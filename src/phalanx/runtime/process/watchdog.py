"""Who is waited for, who waits, and since when: read from the status pages of a host's ranks.

A rank is late for a collective when another of its group arrived there longer ago than the timeout and it did not:
just what the collective itself calls a timeout. However long a rank computes, evaluates or compiles, it is not late
as long as nobody waits for it. The one who hangs is the one who is waited for and does not itself wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.runtime.process.status import Said, Status


@dataclass(frozen=True)
class Late:
    """`ranks` did not arrive at `what`, where the `waiting` ranks have been since it was said."""

    ranks: tuple[int, ...]
    what: Said
    waiting: tuple[int, ...]


def late(pages: dict[int, Status], now_s: float, overdue_s: float) -> Late | None:
    """Who has kept others waiting for longer than `overdue_s`; None where nobody has."""
    owed: dict[tuple[tuple[int, ...], int], tuple[Said, list[int], set[int]]] = {}  # by collective: by whom to whom
    for rank, page in pages.items():
        for said in page.said:
            if not said.ranks or now_s - said.time_s < overdue_s:
                continue
            missing = {r for r in said.ranks if r not in pages or pages[r].arrived.get(said.ranks, 0) < said.number}
            if missing:
                owed.setdefault((said.ranks, said.number), (said, [], missing))[1].append(rank)
    if not owed:
        return None
    waiting = {rank for _, ranks, _ in owed.values() for rank in ranks}
    # Whoever waits for one that waits is not told of; where all wait for each other, the first is.
    roots = [(what, ranks, missing - waiting) for what, ranks, missing in owed.values() if missing - waiting]
    what, ranks, missing = min(roots or owed.values(), key=lambda found: found[0].time_s)
    return Late(tuple(sorted(missing)), what, tuple(sorted(ranks)))


def stopped(pages: dict[int, Status], now_s: float, overdue_s: float) -> tuple[int, ...]:
    """Ranks whose process was stopped (SIGSTOP), and has said nothing for longer than `overdue_s`."""
    return tuple(
        rank
        for rank, page in sorted(pages.items())
        if is_stopped(page.pid) and page.said and now_s - page.said[-1].time_s >= overdue_s
    )


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except (OSError, IndexError):  # it has ended, or the system has no such files
        return False


def describe_late(found: Late, pages: dict[int, Status], now_s: float) -> str:
    """Who did not arrive where, what it was last seen in, and who waits since when: one sentence."""
    names = " and ".join(_name(rank, pages) for rank in found.ranks)
    seen = [_last_seen(pages.get(rank), now_s) for rank in found.ranks]
    if len(found.ranks) > 1:
        seen = [f"rank {rank} {text}" for rank, text in zip(found.ranks, seen, strict=True)]
    have = "has" if len(found.ranks) == 1 else "have"
    who, wait = ("rank", "waits") if len(found.waiting) == 1 else ("ranks", "wait")
    return (
        f"{names} {have} not arrived at {found.what.text}: {', '.join(seen)}; "
        f"{who} {', '.join(map(str, found.waiting))} {wait} for {now_s - found.what.time_s:.1f} s"
    )


def describe_stopped(ranks: tuple[int, ...], pages: dict[int, Status], now_s: float) -> str:
    """The same of ranks that nobody waits for."""
    return "; ".join(f"{_name(rank, pages)} does not go on: {_last_seen(pages[rank], now_s)}" for rank in ranks)


def _name(rank: int, pages: dict[int, Status]) -> str:
    return str(pages[rank]) if rank in pages else f"rank {rank}"


def _last_seen(page: Status | None, now_s: float) -> str:
    if page is None or not page.said:
        return "has not said anything yet"
    halted = " (its process is stopped)" if is_stopped(page.pid) else ""
    return f"last seen in {page.doing}, {now_s - page.said[-1].time_s:.1f} s ago{halted}"
