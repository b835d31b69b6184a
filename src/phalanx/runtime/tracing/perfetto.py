"""The timelines of all ranks as one file for Perfetto and chrome://tracing.

In Chrome's trace-event format a rank is a process and a track one of its threads. The spans of a thread may nest but
not overlap, so concurrent collectives of an axis get rows of their own. Ranks are aligned by their hosts' clocks:
across hosts the alignment is as exact as those clocks. Reference: "Trace Event Format", Google, 2016.
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
    """One rank's spans. `place`: its coordinates in words; `clock_ns` plus a span's time is the time of day."""

    rank: int
    place: str
    clock_ns: int
    spans: tuple[Span, ...]


def of_rank(rank: int, coordinates: dict[str, int], spans: Sequence[Span]) -> RankTimeline:
    """Bundle this process's spans so that another process can write them."""
    place = ", ".join(f"{axis} {i}" for axis, i in coordinates.items())
    return RankTimeline(rank, place, time.time_ns() - time.perf_counter_ns(), tuple(spans))


def write(path: Path, ranks: Sequence[RankTimeline], about: dict[str, Any]) -> None:
    """Write the timelines of ranks as one file, atomically. `about` describes the run."""
    begin = min((_ns(s.start) + r.clock_ns for r in ranks for s in r.spans), default=0)
    events = [event for r in ranks for event in _events(r, begin)]
    write_json(path, {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events})


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _events(timeline: RankTimeline, begin_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the trace events of one rank, with times in microseconds as the format wants."""
    place = f" ({timeline.place})" if timeline.place else ""
    process = {"ph": "M", "pid": timeline.rank}
    yield {**process, "name": "process_name", "args": {"name": f"rank {timeline.rank}{place}"}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": timeline.rank}}
    for number, (name, spans) in enumerate(rows(timeline.spans).items()):
        thread = {**process, "tid": number}
        yield {**thread, "name": "thread_name", "args": {"name": name}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}
        for span in spans:
            start, stop = _ns(span.start), _ns(span.stop)
            times = {"ts": (start + timeline.clock_ns - begin_ns) / 1e3, "dur": (stop - start) / 1e3}
            yield {**thread, "ph": "X", "name": span.name, "cat": span.track, **times, "args": span.detail}


def rows(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Sort spans into rows: compute, waiting, then each axis, in as many rows as it has concurrent spans."""
    by_row: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda s: s.start):
        row, number = span.track, 1
        while row in by_row and by_row[row][-1].stop > span.start:
            number += 1
            row = f"{span.track} ({number})"
        by_row.setdefault(row, []).append(span)
    return {name: by_row[name] for name in sorted(by_row, key=lambda n: (n != COMPUTE, n != WAITING, n))}
