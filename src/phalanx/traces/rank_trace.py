"""What ran on one rank and when: activities as columns, whichever profiler recorded them.

An activity has a kind (kinds.toml), a start and a stop in seconds, and whether the device ran it. Communication also
has a TracedCollective: the operation, its group and its bytes. TraceColumns keep a trace of a gigabyte in some
hundred megabytes.
"""

from __future__ import annotations

import re
import tomllib
from array import array
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Track = Literal["device", "op", "host", "span"]
KINDS = (
    *("communication", "attention", "experts", "products", "copy", "memory", "forward", "backward"),
    *("step", "optimizer", "loading", "checkpoint", "allocation", "launch", "waiting"),
)
"""waiting: a rank's own record of a collective that blocks it; forward, backward: passes of a unit, in a trace that
does not record operators."""
TRACKS: tuple[Track, ...] = ("device", "op", "host", "span")
"""device: kernels; op: operators on the CPU; host: annotations and calls of the driver; span: a device's
annotations."""


@dataclass(frozen=True)
class TracedCollective:
    """One kind of communication: its operation, group and bytes, where the trace says them."""

    op: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send; "" if unknown."""
    group: str = ""
    """The name or description of its process group, or the mesh axis."""
    ranks: tuple[int, ...] = ()
    size: int = 0
    """Ranks in the group; 0 if unknown."""
    bytes: int = 0
    """As nccl-tests counts: the gathered buffer of all-gather and reduce-scatter."""


@dataclass(frozen=True)
class RankTrace:
    """The activities of one rank, in columns of equal length, in the order of their starts."""

    file: str
    rank: int | None
    world: int | None
    device: str
    """Name of the device; "" if the trace does not say."""
    start: Floats
    stop: Floats
    kind: npt.NDArray[np.int8]
    """Index into KINDS."""
    where: npt.NDArray[np.int8]
    """Index into TRACKS."""
    name: npt.NDArray[np.int32]
    """Index into `names`."""
    call: npt.NDArray[np.int32]
    """Index into `calls`; -1 where it is no communication."""
    names: tuple[str, ...]
    calls: tuple[TracedCollective, ...]
    notes: tuple[str, ...] = ()
    """What could not be used, in words."""

    def of(self, kind: str, where: Track | None = None) -> npt.NDArray[np.bool_]:
        """Return the mask of the activities of a kind, and of a place if given."""
        mask: npt.NDArray[np.bool_] = self.kind == KINDS.index(kind)
        return mask if where is None else mask & (self.where == TRACKS.index(where))

    @property
    def on_device(self) -> npt.NDArray[np.bool_]:
        """Which activities computed, communicated or copied: kernels, or on the CPU its operators, or a
        program's own record of its passes and waits."""
        device: npt.NDArray[np.bool_] = self.where == TRACKS.index("device")
        ops: npt.NDArray[np.bool_] = self.where == TRACKS.index("op")
        return device if device.any() else ops | self.of("communication")


@dataclass
class TraceColumns:
    """Growing columns of activities, from which RankTraces are made."""

    start: array[float] = field(default_factory=lambda: array("d"))
    stop: array[float] = field(default_factory=lambda: array("d"))
    kind: array[int] = field(default_factory=lambda: array("b"))
    where: array[int] = field(default_factory=lambda: array("b"))
    name: array[int] = field(default_factory=lambda: array("i"))
    call: array[int] = field(default_factory=lambda: array("i"))
    names: dict[str, int] = field(default_factory=dict)
    calls: dict[TracedCollective, int] = field(default_factory=dict)

    def add(
        self, name: str, kind: int, where: int, start: float, stop: float, call: TracedCollective | None = None
    ) -> None:
        """Append an activity."""
        self.start.append(start)
        self.stop.append(stop)
        self.kind.append(kind)
        self.where.append(where)
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.call.append(-1 if call is None else self.calls.setdefault(call, len(self.calls)))

    def trace(
        self,
        file: str,
        rank: int | None,
        world: int | None = None,
        device: str = "",
        notes: tuple[str, ...] = (),
        part: npt.NDArray[np.bool_] | None = None,
    ) -> RankTrace:
        """Return the trace of one rank, by default of all activities."""
        start, stop = np.array(self.start), np.array(self.stop)
        keep = np.arange(len(start)) if part is None else np.flatnonzero(part)
        keep = keep[np.argsort(start[keep], kind="stable")]
        return RankTrace(
            file,
            rank,
            world,
            device,
            start[keep],
            stop[keep],
            np.array(self.kind, dtype=np.int8)[keep],
            np.array(self.where, dtype=np.int8)[keep],
            np.array(self.name, dtype=np.int32)[keep],
            np.array(self.call, dtype=np.int32)[keep],
            tuple(self.names),
            tuple(self.calls),
            notes,
        )


@cache
def _rows() -> tuple[tuple[int, frozenset[str], re.Pattern[str]], ...]:
    rows = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text())["row"]
    return tuple((KINDS.index(r["kind"]), frozenset(r["of"]), re.compile(r["pattern"], re.I)) for r in rows)


@cache
def kind_of(name: str, where: Track) -> int:
    """Return the kind of an activity, as an index into KINDS; -1 if it is of no interest."""
    return next((kind for kind, of, pattern in _rows() if where in of and pattern.search(name)), -1)


_OPS = (
    ("all_reduce", re.compile(r"all_?reduce", re.I)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all_gather", re.compile(r"all_?gather", re.I)),
    ("all_to_all", re.compile(r"all_?to_?all", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
    ("send", re.compile(r"send|recv", re.I)),
)


def op_of(name: str) -> str:
    """Return the operation of a kernel or call of communication; "" if its name does not say."""
    return next((op for op, pattern in _OPS if pattern.search(name)), "")
