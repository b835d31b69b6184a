"""Reads Nsight Systems' SQLite export (`nsys export --type sqlite`): kernels, copies, and NVTX ranges.

Each process is a rank, in the order of their identifiers. Times are nanoseconds, kept as seconds. Reference: Nsight
Systems User Guide, "SQLite Schema Reference".
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import numpy as np

from phalanx.spec.errors import InputError
from phalanx.traces.rank_trace import KINDS, TRACKS, RankTrace, TraceColumns, TracedCollective, Track, kind_of, op_of

HEAD = b"SQLite format 3\0"
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD"}
"""CUpti_ActivityMemcpyKind."""
_PROCESS = 2**24
"""A globalTid is its globalPid plus the thread, below this."""
_Row = tuple[Track, str, int, int, int]
"""Track, name, start and end in ns, process."""


def read(path: Path) -> list[RankTrace]:
    """Return the traces of the processes in an export. Raises InputError for a database of another program."""
    columns, processes = TraceColumns(), []
    try:
        # Immutable: no journal is written, and no lock is taken.
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)) as base:
            tables = {str(name) for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not {"CUPTI_ACTIVITY_KIND_KERNEL", "StringIds"} <= tables:
                remedy = "expected `nsys export --type sqlite` of a run with --trace=cuda,nvtx"
                raise InputError("trace", str(path), "has no table of kernels", remedy)
            for where, name, start, end, process in _rows(base, tables):
                kind = kind_of(name, where)
                if kind < 0 or end < start:
                    continue
                call = TracedCollective(op_of(name)) if KINDS[kind] == "communication" else None
                columns.add(name, kind, TRACKS.index(where), start / 1e9, end / 1e9, call)
                processes.append(process)
            device = _device(base, tables)
    except (sqlite3.Error, OverflowError, TypeError, UnicodeDecodeError) as error:
        raise InputError("trace", str(path), f"cannot be read as nsys's export ({error})") from None
    kernels = np.array(columns.where, dtype=np.int8) == TRACKS.index("device")
    if not kernels.any():
        raise InputError("trace", str(path), "has no kernels", "profile steps of the training with --trace=cuda,nvtx")
    own = np.array(processes)
    ranks = np.unique(own[kernels])
    numbers = [None] if len(ranks) == 1 else range(len(ranks))
    return [
        columns.trace(str(path), number, None, device, (), own == process)
        for number, process in zip(numbers, ranks, strict=True)
    ]


def _rows(base: sqlite3.Connection, tables: set[str]) -> Iterator[_Row]:
    kernel = "CUPTI_ACTIVITY_KIND_KERNEL"
    has = {str(row[1]) for row in base.execute(f"PRAGMA table_info({kernel})")}
    name = "demangledName" if "demangledName" in has else "shortName"
    process = "k.globalPid" if "globalPid" in has else "k.deviceId"
    query = f"SELECT s.value, k.start, k.end, {process} FROM {kernel} k JOIN StringIds s ON s.id = k.{name}"
    for value, start, end, pid in base.execute(query):
        yield "device", str(value), int(start), int(end), int(pid)
    if "CUPTI_ACTIVITY_KIND_MEMCPY" in tables:
        query = f"SELECT k.copyKind, k.start, k.end, {process} FROM CUPTI_ACTIVITY_KIND_MEMCPY k"
        for kind, start, end, pid in base.execute(query):
            yield "device", f"Memcpy {_COPIES.get(kind, '')}", int(start), int(end), int(pid)
    if "NVTX_EVENTS" in tables:
        query = (
            "SELECT coalesce(e.text, s.value), e.start, e.end, e.globalTid FROM NVTX_EVENTS e "
            "LEFT JOIN StringIds s ON s.id = e.textId WHERE e.end IS NOT NULL"
        )
        for value, start, end, thread in base.execute(query):
            pid = int(thread) // _PROCESS * _PROCESS if "globalPid" in has else 0
            yield "host", str(value), int(start), int(end), pid


def _device(base: sqlite3.Connection, tables: set[str]) -> str:
    row = base.execute("SELECT name FROM TARGET_INFO_GPU").fetchone() if "TARGET_INFO_GPU" in tables else None
    return str(row[0]) if row else ""
