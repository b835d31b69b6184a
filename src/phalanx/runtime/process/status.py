"""The status page: a small shared file per rank that says what the rank does, and what it has said of late.

When a rank dies or hangs it can no longer speak; the launcher reads its page. Writing is a copy into mapped memory:
about a microsecond, no system call.

    words     0: how often the rank has spoken; 1 + g: at how many collectives of its g-th group it has arrived
    slots     the last things said: number, seconds (of the host's monotonic clock), group or -1, number in the group
    about     pid, place, then one line of ranks for each group

A group's collectives are numbered on every rank alike, whatever else the ranks do: the lower number is behind.
"""

from __future__ import annotations

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
_SIZE = 32768
FOLDER_VARIABLE = "PHALANX_STATUS"
START_UP, MEETING = "start-up", "the meeting of all ranks"
"""What a rank says that has nothing to save yet."""


class StatusPage:
    """One rank's page, in the folder that the launcher names; without a launcher nothing is written."""

    def __init__(self, rank: int) -> None:
        self.doing = self.work = ""
        """What the rank said last; and what it said last of its own work, no collective."""
        self.among: tuple[int, ...] = ()
        """The ranks of the collective that it arrived at last, if it has said nothing since."""
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
            os.posix_fallocate(descriptor, 0, _SIZE)  # a full disk is an error here, and not a SIGBUS later
            self._page = mmap.mmap(descriptor, _SIZE)
            os.close(descriptor)
            self._write_about()

    def stand(self, coordinates: dict[str, int]) -> None:
        """Say where in the mesh this rank is."""
        self._place = ", ".join(f"{axis} {i}" for axis, i in coordinates.items()) or self._place
        self._write_about()

    def now(self, text: str) -> None:
        """Say what is being done."""
        self.doing = self.work = text
        self.among = ()
        if self._page is not None:
            self._say(text, -1, 0)

    def arrive(self, text: str, axis: str, ranks: Sequence[int]) -> None:
        """Say that this rank has arrived at a collective over an axis, which these ranks make together."""
        self.doing, self.among = text, tuple(ranks)
        if self._page is None:
            return
        key = axis, len(ranks), ranks[0], ranks[-1]  # of two that exchange a message either may have others
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = self._open_group(ranks)
        if group >= 0:
            self._arrived[group] += 1
            self._say(text, group, self._arrived[group])
            _WORD.pack_into(self._page, (1 + group) * _WORD.size, self._arrived[group])
        else:
            self._say(text, -1, 0)

    def __str__(self) -> str:
        return _named(self._rank, self._place)

    def _open_group(self, ranks: Sequence[int]) -> int:
        """The number of a new group; -1 where the page has no room for it: its collectives are not followed."""
        line = ",".join(map(str, ranks))
        if line in self._ranks:  # by the name of another axis
            return self._ranks.index(line)
        if len(self._ranks) == _GROUPS or len(self._about()) + len(line) + 2 > _SIZE - _ABOUT:
            return -1
        self._ranks.append(line)
        self._arrived.append(0)
        self._write_about()
        return len(self._ranks) - 1

    def _say(self, text: str, group: int, number: int) -> None:
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
    """This process's one page as that rank."""
    key = os.environ.get(FOLDER_VARIABLE), rank
    if key not in _pages:
        _pages[key] = StatusPage(rank)
    return _pages[key]


@dataclass(frozen=True)
class Said:
    """`time_s`: of the host's monotonic clock. A collective has the ranks that make it together, and its number among
    theirs, from 1."""

    time_s: float
    text: str
    ranks: tuple[int, ...] = ()
    number: int = 0


@dataclass(frozen=True)
class Status:
    """`said`: the last things, oldest first. `arrived`: collectives by the ranks that make them together."""

    rank: int
    pid: int
    place: str
    said: tuple[Said, ...]
    arrived: dict[tuple[int, ...], int]

    @property
    def doing(self) -> str:
        return self.said[-1].text if self.said else "starting"

    def __str__(self) -> str:
        return _named(self.rank, self.place)


def _named(rank: int, place: str) -> str:
    return f"rank {rank}" + (f" ({place})" if place else "")


def read(folder: Path) -> dict[int, Status]:
    """The pages of all ranks that have opened one."""
    found = {}
    for path in folder.glob("rank-*"):
        rank = int(path.name.removeprefix("rank-"))
        status = _parsed(rank, path.read_bytes())
        if status is not None:
            found[rank] = status
    return found


def _parsed(rank: int, page: bytes) -> Status | None:
    """A page as it was read, maybe in the middle of being written: what does not fit together is left out."""
    lines = page[_ABOUT:].split(b"\0")[0].decode(errors="replace").split("\n")
    if len(page) < _SIZE or len(lines) < 2 or not lines[0].isdigit():
        return None
    groups = [tuple(map(int, line.split(","))) for line in lines[2:]]
    (count,) = _WORD.unpack_from(page, 0)
    said = []
    for i in range(max(1, count - _SLOTS + 1), count + 1):
        at = _slot(i)
        number, time_s, group, length, nth = _SLOT.unpack_from(page, at)
        if number == i and group < len(groups):
            text = page[at + _SLOT.size : at + _SLOT.size + length].decode(errors="replace")
            said.append(Said(time_s, text, groups[group] if group >= 0 else (), nth))
    arrived = {ranks: _WORD.unpack_from(page, (1 + i) * _WORD.size)[0] for i, ranks in enumerate(groups)}
    return Status(rank, int(lines[0]), lines[1], tuple(said), arrived)


def words_file(folder: Path, rank: int) -> Path:
    """Where a rank that fails leaves its reason."""
    return folder / f"last-words-{rank}"


def words_of(folder: Path, rank: int) -> str:
    path = words_file(folder, rank)
    return path.read_text().strip() if path.exists() else ""
