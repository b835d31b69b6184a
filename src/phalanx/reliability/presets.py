"""Published failure counts, restart times and storage rates (data/*.toml), and the failure rates of a job by them or
by a log of the user's own job.
"""

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from phalanx.spec.documents import csv_of, read_packed
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.rows import Rows, record

_DATA = Path(__file__).parent / "data"
HARDWARE = ("gpu", "host", "nic", "switch")
"""Components whose failure takes a node out."""
UNEXPECTED = (*HARDWARE, "software", "silent")
COMPONENTS = (*UNEXPECTED, "planned")


@dataclass(frozen=True)
class FailureCounts:
    """Interruptions by component, counted over `hours` of `gpus` GPUs in `nodes` nodes."""

    name: str
    source: str
    gpus: int
    nodes: int
    hours: float
    gpu: int = 0
    host: int = 0
    nic: int = 0
    switch: int = 0
    software: int = 0
    silent: int = 0
    """Corruption that no error reports: found later, by a check."""
    planned: int = 0
    """Stops for maintenance, before which the job saves."""
    chip: str = ""
    family: str = ""

    def count(self, component: str) -> int:
        """Return how many interruptions a component caused."""
        return int(getattr(self, component))

    def rate(self, component: str, gpus: int, nodes: int) -> float:
        """Return a component's failures per second of a job: hosts by the node, all others by the GPU."""
        scale = nodes / self.nodes if component == "host" else gpus / self.gpus
        return self.count(component) * scale / (self.hours * 3600)

    def per_s(self, gpus: int, nodes: int) -> float:
        """Return the unexpected failures per second of a job."""
        return sum(self.rate(component, gpus, nodes) for component in UNEXPECTED)


@dataclass(frozen=True)
class RestartKind:
    """How a job comes back: seconds until a failure is detected, and then until its checkpoint begins to load."""

    name: str
    note: str
    source: str
    detect_s: float
    hardware_s: float
    """After a failure that takes a node out, with a spare at hand."""
    software_s: float


@dataclass(frozen=True)
class StorageRates:
    """Where checkpoints go: bytes/s of one node alone and of all together, and how nodes slow each other down."""

    name: str
    source: str
    write_bytes_per_s_per_node: float
    read_bytes_per_s_per_node: float
    contention: float
    """Share of a node's bandwidth that each further node costs."""
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None

    def write(self, nodes: int) -> float:
        """Return the bytes/s that nodes write together."""
        return self._shared(nodes, self.write_bytes_per_s_per_node, self.write_bytes_per_s)

    def read(self, nodes: int) -> float:
        """Return the bytes/s that nodes read together."""
        return self._shared(nodes, self.read_bytes_per_s_per_node, self.read_bytes_per_s)

    def _shared(self, nodes: int, each: float, most: float | None) -> float:
        """Gunther 1993, without coherence: n b / (1 + contention (n - 1)), at most what the storage has."""
        return min(nodes * each / (1 + self.contention * (nodes - 1)), most or float("inf"))


FAILURES = Rows(_DATA / "failures.toml", record(FailureCounts, "name"))
RESTARTS = Rows(_DATA / "restarts.toml", record(RestartKind, "name"))
STORAGE = Rows(_DATA / "storage.toml", record(StorageRates, "name"))
DEFAULT_FAILURES = "llama3-h100"


def restart_named(name: str) -> RestartKind:
    """Return a kind of restart. Raises InputError."""
    if name not in RESTARTS:
        raise InputError("restart", name, "is not a kind of restart", nearest(name, RESTARTS))
    return RESTARTS[name]


def storage_named(name: str) -> StorageRates:
    """Return a storage. Raises InputError."""
    if name not in STORAGE:
        raise InputError("storage", name, "is not a storage", nearest(name, STORAGE))
    return STORAGE[name]


def failures_for(device: str, without: Callable[[FailureCounts], bool] = lambda _: False) -> FailureCounts:
    """Return the preset for a device, among those for which `without` is false: the one of median rate counted on its
    chip, else DEFAULT_FAILURES, else the one of median rate of all."""
    others = [row for row in FAILURES.values() if not without(row)]
    same = [row for row in others if row.chip and device.upper().startswith(row.chip)]
    default = [row for row in others if row.name == DEFAULT_FAILURES]
    ordered = sorted(same or default or others, key=lambda row: row.per_s(8, 1))
    return ordered[len(ordered) // 2]


def failures_named(name: str, gpus: int, nodes: int) -> FailureCounts:
    """Return a preset's counts, or a log's (.csv), of a job on `gpus` GPUs. Raises InputError."""
    if name.lower().endswith(".csv"):
        return _of_log(Path(name), gpus, nodes)
    if name not in FAILURES:
        remedy = f"{nearest(name, FAILURES)}, or a log of your job: a .csv with the columns hours and component"
        raise InputError("failures", name, "is no preset of failure rates", remedy)
    return FAILURES[name]


def _of_log(path: Path, gpus: int, nodes: int) -> FailureCounts:
    """Count the events of a log with the columns `hours` (since the start) and `component`; a last row with the
    component `end` gives the log's length. Raises InputError."""
    with csv_of(path, "failures"):
        rows = list(csv.DictReader(StringIO(read_packed(path, "failures"), newline="")))
    if not rows or not {"hours", "component"} <= set(rows[0]):
        raise InputError("failures", str(path), "lacks the columns hours and component, or rows", "add them")
    counts: Counter[str] = Counter()
    last = 0.0
    for number, row in enumerate(rows, 2):
        component = (row["component"] or "").strip()
        try:
            last = max(last, float(row["hours"] or ""))
        except ValueError:
            raise InputError("failures", row["hours"], f"is no number of hours, in line {number} of {path}") from None
        if component not in (*COMPONENTS, "end"):
            reason = f"is no component, in line {number} of {path}"
            raise InputError("failures", component, reason, nearest(component, (*COMPONENTS, "end")))
        counts[component] += 1
    if not 0 < last < 1e7:
        raise InputError("failures", str(path), "spans no time", "give hours since the start, and a last row `end`")
    known = FailureCounts(str(path), f"{path}: a log of {last:,.0f} h", gpus, nodes, last)
    by: dict[str, Any] = {name: counts[name] for name in COMPONENTS}
    return replace(known, **by)
