"""The status page: a small shared file per rank that says what the rank is doing and what it did last.

A rank that has died or hangs cannot report anything; the launcher reads its page instead. Writing is a copy into
mapped memory: about a microsecond, no system call.

    words     0: how many entries the rank has written; 1 + g: how many collectives of its g-th group it has reached
    slots     the last entries: number, seconds (of the host's monotonic clock), group or -1, number in the group
    about     pid, place, then one line of ranks for each group

Every rank of a group numbers the group's collectives alike, so the rank with the lower number is behind.
"""

import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_WORD = struct.Struct("<Q")
_SLOT = struct.Struct("<QdhHQ")  # number, seconds, group, bytes of text, number in the group
_GROUPS = 63
_SLOTS = 64
_SLOT_BYTES = 256
_ABOUT = (1 + _GROUPS) * _WORD.size + _SLOTS * _SLOT_BYTES
PAGE_BYTES = 32768
FOLDER_VARIABLE = "PHALANX_STATUS"
START_UP, MEETING = "start-up", "the rendezvous of all ranks"
"""Entry of a rank that has nothing to save yet."""


class StatusPage:
    """One rank's status page, in the folder that the launcher names; without a launcher nothing is written."""

    def __init__(self, rank: int) -> None:
        self.doing = self.work = ""
        """The last entry, and the last one about the rank's work rather than a collective."""
        self.among: tuple[int, ...] = ()
        """The ranks of the latest collective, if nothing else was recorded since; otherwise empty."""
        self._rank = rank
        self._page: mmap.mmap | None = None
        self._count = 0
        self._place = ""
        self._groups: dict[tuple[str, int, int, int], int] = {}
        self._ranks: list[str] = []
        self._arrived: list[int] = []
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder:
            descriptor = os.open(Path(folder) / f"rank-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
            os.posix_fallocate(
                descriptor, 0, PAGE_BYTES
            )  # a full disk raises an error here instead of a SIGBUS later
            self._page = mmap.mmap(descriptor, PAGE_BYTES)
            os.close(descriptor)
            self._write_about()

    def stand(self, coordinates: dict[str, int]) -> None:
        """Record this rank's mesh coordinates, for messages about it."""
        self._place = ", ".join(f"{axis} {i}" for axis, i in coordinates.items()) or self._place
        self._write_about()

    def now(self, text: str) -> None:
        """Record what this rank is doing now."""
        self.doing = self.work = text
        self.among = ()
        if self._page is not None:
            self._append(text, -1, 0)

    def arrive(self, text: str, axis: str, ranks: Sequence[int]) -> None:
        """Record that this rank has arrived at a collective of `ranks` over an axis."""
        self.doing, self.among = text, tuple(ranks)
        if self._page is None:
            return
        key = axis, len(ranks), ranks[0], ranks[-1]  # on a pipeline axis, pairs of ranks exchange messages
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = self._open_group(ranks)
        if group >= 0:
            self._arrived[group] += 1
            self._append(text, group, self._arrived[group])
            _WORD.pack_into(self._page, (1 + group) * _WORD.size, self._arrived[group])
        else:
            self._append(text, -1, 0)

    def __str__(self) -> str:
        return _rank_name(self._rank, self._place)

    def _open_group(self, ranks: Sequence[int]) -> int:
        """Return the number of a new group, or -1 if the page is full: its collectives are then not tracked."""
        line = ",".join(map(str, ranks))
        if line in self._ranks:  # the same ranks under another axis's name
            return self._ranks.index(line)
        if len(self._ranks) == _GROUPS or len(self._about()) + len(line) + 2 > PAGE_BYTES - _ABOUT:
            return -1
        self._ranks.append(line)
        self._arrived.append(0)
        self._write_about()
        return len(self._ranks) - 1

    def _append(self, text: str, group: int, number: int) -> None:
        """Write an entry into the next slot; the count goes last, so that a reader never sees half of it."""
        assert self._page is not None
        self._count += 1
        at = _slot(self._count)
        line = text.encode()[: _SLOT_BYTES - _SLOT.size]
        _SLOT.pack_into(self._page, at, self._count, time.monotonic(), group, len(line), number)
        self._page[at + _SLOT.size : at + _SLOT.size + len(line)] = line
        _WORD.pack_into(self._page, 0, self._count)

    def _about(self) -> bytes:
        return "\n".join([str(os.getpid()), self._place, *self._ranks]).encode()

    def _write_about(self) -> None:
        if self._page is not None:
            about = self._about()
            self._page[_ABOUT : _ABOUT + len(about) + 1] = about + b"\0"


def _slot(count: int) -> int:
    return (1 + _GROUPS) * _WORD.size + count % _SLOTS * _SLOT_BYTES


_pages: dict[tuple[str | None, int], StatusPage] = {}


def page(rank: int) -> StatusPage:
    """Return this process's status page as that rank, created once."""
    key = os.environ.get(FOLDER_VARIABLE), rank
    if key not in _pages:
        _pages[key] = StatusPage(rank)
    return _pages[key]


@dataclass(frozen=True)
class StatusEntry:
    """A rank's report at `time_s` of the host's monotonic clock. The entry of a collective has the ranks that take
    part and its number among their collectives, from 1."""

    time_s: float
    text: str
    ranks: tuple[int, ...] = ()
    number: int = 0


@dataclass(frozen=True)
class Status:
    """A parsed status page: the last entries, oldest first, and the number of collectives reached, by group of
    ranks."""

    rank: int
    pid: int
    place: str
    entries: tuple[StatusEntry, ...]
    arrived: dict[tuple[int, ...], int]

    @property
    def doing(self) -> str:
        """The rank's last report."""
        return self.entries[-1].text if self.entries else "starting"

    def __str__(self) -> str:
        return _rank_name(self.rank, self.place)


def _rank_name(rank: int, place: str) -> str:
    return f"rank {rank}" + (f" ({place})" if place else "")


def read(folder: Path) -> dict[int, Status]:
    """Read the pages of all ranks that have opened one."""
    statuses: dict[int, Status] = {}
    for path in folder.glob("rank-*"):
        rank = int(path.name.removeprefix("rank-"))
        status = _parse(rank, path.read_bytes())
        if status is not None:
            statuses[rank] = status
    return statuses


def _parse(rank: int, page: bytes) -> Status | None:
    """Parse a page that may have been read while it was written: inconsistent entries are left out."""
    lines = page[_ABOUT:].split(b"\0")[0].decode(errors="replace").split("\n")
    if len(page) < PAGE_BYTES or len(lines) < 2 or not lines[0].isdecimal():
        return None
    groups = [tuple(map(int, line.split(","))) for line in lines[2:]]
    (count,) = _WORD.unpack_from(page, 0)
    entries: list[StatusEntry] = []
    for i in range(max(1, count - _SLOTS + 1), count + 1):
        at = _slot(i)
        number, time_s, group, length, nth = _SLOT.unpack_from(page, at)
        if number == i and group < len(groups):
            text = page[at + _SLOT.size : at + _SLOT.size + length].decode(errors="replace")
            entries.append(StatusEntry(time_s, text, groups[group] if group >= 0 else (), nth))
    arrived = {ranks: _WORD.unpack_from(page, (1 + i) * _WORD.size)[0] for i, ranks in enumerate(groups)}
    return Status(rank, int(lines[0]), lines[1], tuple(entries), arrived)


def words_file(folder: Path, rank: int) -> Path:
    """Return the file in which a failing rank leaves its reason."""
    return folder / f"last-words-{rank}"


def words_of(folder: Path, rank: int) -> str:
    """Return the reason that a failed rank left; empty if it left none."""
    path = words_file(folder, rank)
    return path.read_text().strip() if path.exists() else ""
