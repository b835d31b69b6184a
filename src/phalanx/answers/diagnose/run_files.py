"""A run's files, recognized by their content: traces, logs, a run's folder; and a step's seconds or rate as words."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from phalanx.answers.diagnose.stated_rate import StatedRate, stated_rate
from phalanx.runs.folder import metrics
from phalanx.spec.documents import read_log
from phalanx.spec.errors import InputError
from phalanx.traces import kineto, memory_snapshot, nccl, nsys
from phalanx.traces.memory_snapshot import MemoryUse
from phalanx.traces.nccl import InspectedCollective, NcclLog
from phalanx.traces.rank_trace import RankTrace


@dataclass(frozen=True)
class RunFiles:
    """The content of a run's files, and what the user stated in words."""

    traces: tuple[RankTrace, ...] = ()
    logs: tuple[Path, ...] = ()
    silent: frozenset[Path] = frozenset()
    """Logs that need not print the time of a step: NCCL's."""
    stated: tuple[StatedRate, ...] = ()
    """The step's seconds or rates, in words."""
    plan: Path | None = None
    memory: tuple[MemoryUse, ...] = ()
    collectives: tuple[InspectedCollective, ...] = ()
    nccl: NcclLog | None = None
    notes: tuple[str, ...] = ()
    between_s: float = 0.0
    """Seconds between two steps of a run of ours, on average: saving, evaluation."""


def read_files(words: Sequence[str]) -> RunFiles:
    """Read files and folders, each by its content, and words such as 4.3s and 230TFLOP/s. Raises InputError."""
    traces: list[RankTrace] = []
    logs: list[Path] = []
    silent: set[Path] = set()
    memory: list[MemoryUse] = []
    collectives: list[InspectedCollective] = []
    notes: list[str] = []
    stated: list[StatedRate] = []
    plan = log = None
    between_s = 0.0
    for word in words:
        if (rate := stated_rate(word)) is not None:
            stated.append(rate)
            continue
        path = Path(word)
        if (path / "plan.json").is_file():
            plan = plan or path
            between_s = _between(path)
        for file in _within(path):
            head = _head(file)
            if head.startswith(nsys.HEAD):
                traces += nsys.read(file)
            elif head[:1] == b"\x80" or b'"segments"' in head:
                memory += memory_snapshot.read(file)
            elif nccl.is_dump(text := head.decode("utf-8", "replace")):
                with file.open(encoding="utf-8", errors="replace") as lines:
                    calls, odd = nccl.read_dump(lines)
                collectives += calls
                notes.append(
                    f"{file}: {sum(c.calls for c in calls):,} collectives" + f"; {odd} lines measure none" * bool(odd)
                )
            elif _PLAN.match(head):
                plan = plan or file
            elif head.startswith(_GZIP) or (_JSON.match(head) and not _is_lines(file, head)):
                traces += kineto.read(file)
            elif nccl.is_log(text):
                log = nccl.read_log(read_log(file, "log"))
                ways = ", ".join(f"{count} {name}" for name, count in log.links.items())
                notes.append(f"{file}: NCCL's connections: {ways or 'none'}")
                logs.append(file)
                silent.add(file)
            else:
                logs.append(file)
    return RunFiles(
        tuple(_number_ranks(traces)),
        tuple(logs),
        frozenset(silent),
        tuple(stated),
        plan,
        tuple(memory),
        tuple(collectives),
        log,
        tuple(notes),
        between_s,
    )


def _between(run: Path) -> float:
    """Return the mean seconds between two steps of a run, without the first; 0 where none are recorded."""
    said = [row.get("between_s") for row in metrics(run)[1:]]
    seconds = [s for s in said if isinstance(s, float) and 0 <= s < inf]
    return sum(seconds) / len(seconds) if seconds else 0.0


def _within(path: Path) -> list[Path]:
    """Return a file itself, a run's trace and metrics, or a folder's traces. Raises InputError for one without."""
    if not path.is_dir():
        return [path]
    if (path / "plan.json").is_file():
        return [file for name in ("metrics.jsonl", "trace.json") if (file := path / name).is_file()]
    files = sorted(f for pattern in ("*.json", "*.json.gz") for f in path.glob(pattern))
    if not files:
        raise InputError("FILE", str(path), "has no trace (*.json, *.json.gz)", "name the files")
    return files


def _head(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise InputError("FILE", str(path), "is not a regular file")
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except OSError as error:
        raise InputError("FILE", str(path), f"cannot be read ({error.strerror})") from None


_GZIP = b"\x1f\x8b"
_PLAN = re.compile(rb'\s*\{\s*"version"\s*:\s*\d+\s*,\s*"model"\s*:')
"""The first bytes of a plan.json (spec/files/plan.py)."""
_JSON = re.compile(rb'\s*(\{\s*"|\[\s*[{\]])')


def _is_lines(file: Path, head: bytes) -> bool:
    """Whether a file of JSON has a record on each of its lines, as logs of trainers have."""
    first, end, _ = head.partition(b"\n")
    try:
        record = json.loads(first) if end else None
    except ValueError:
        record = None
    return file.suffix == ".jsonl" or (isinstance(record, dict) and "traceEvents" not in record)


def _number_ranks(traces: list[RankTrace]) -> list[RankTrace]:
    """Return several traces with a rank each, in order where none is known. Raises InputError for two of one rank."""
    known = [t.rank for t in traces if t.rank is not None]
    if len(known) != len(set(known)):
        twice = next(rank for rank in known if known.count(rank) > 1)
        files = [t.file for t in traces if t.rank == twice]
        raise InputError("FILE", files[1], f"is of rank {twice}, as {files[0]} is", "give one trace of each rank")
    return [t if t.rank is not None or len(traces) == 1 else replace(t, rank=i) for i, t in enumerate(traces)]
