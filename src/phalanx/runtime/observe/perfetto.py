"""Timelines of all ranks in one file that Perfetto and chrome://tracing show.

Chrome's trace-event format: a rank is a process, a track a thread of it. Within a thread spans may only lie one in
another, so collectives of one axis that run beside each other get rows of their own. Hosts are aligned by their
clocks: between hosts the picture is as true as those are.
Reference: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.runtime.comm.timeline import COMPUTE, WAITING, Span
from phalanx.spec.files.plan import write_json


@dataclass(frozen=True)
class RankTimeline:
    """One rank's spans. `place`: its coordinates in words; `clock_ns`: what its times lack of the time of day."""

    rank: int
    place: str
    clock_ns: int
    spans: tuple[Span, ...]


def of_rank(rank: int, coordinates: dict[str, int], spans: Sequence[Span]) -> RankTimeline:
    """This process's spans, ready to be told to another."""
    place = ", ".join(f"{axis} {i}" for axis, i in coordinates.items())
    return RankTimeline(rank, place, time.time_ns() - time.perf_counter_ns(), tuple(spans))


def write(path: Path, ranks: Sequence[RankTimeline], about: dict[str, Any]) -> None:
    """Write the file whole or not at all. `about`: what is said of the run."""
    begin = min((_ns(s.start) + r.clock_ns for r in ranks for s in r.spans), default=0)
    events = [event for r in ranks for event in _events(r, begin)]
    write_json(path, {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events})


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _events(given: RankTimeline, begin_ns: int) -> Iterator[dict[str, Any]]:
    """Times in the format are microseconds."""
    place = f" ({given.place})" if given.place else ""
    process = {"ph": "M", "pid": given.rank}
    yield {**process, "name": "process_name", "args": {"name": f"rank {given.rank}{place}"}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": given.rank}}
    for number, (name, spans) in enumerate(rows(given.spans).items()):
        thread = {**process, "tid": number}
        yield {**thread, "name": "thread_name", "args": {"name": name}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}
        for span in spans:
            start, stop = _ns(span.start), _ns(span.stop)
            times = {"ts": (start + given.clock_ns - begin_ns) / 1e3, "dur": (stop - start) / 1e3}
            yield {**thread, "ph": "X", "name": span.name, "cat": span.track, **times, "args": span.detail}


def rows(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Spans by row: compute, waiting, then each axis, in as many rows as it has spans at once."""
    found: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda s: s.start):
        row, beside = span.track, 1
        while row in found and found[row][-1].stop > span.start:
            beside += 1
            row = f"{span.track} ({beside})"
        found.setdefault(row, []).append(span)
    return {name: found[name] for name in sorted(found, key=lambda n: (n != COMPUTE, n != WAITING, n))}
