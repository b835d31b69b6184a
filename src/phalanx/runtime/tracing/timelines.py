"""The times of a step's passes (when each unit's forward and backward ran, and the optimizer), and the timelines of
all ranks as one file for Perfetto and chrome://tracing.

forward     of a unit: from the call of its module until that returns
backward    of a unit: from the arrival of its output's gradient until that of the preceding unit's arrives, or until
            the backward pass of the model ends

In Chrome's trace-event format a rank is a process and a track one of its threads. The spans of a thread may nest but
not overlap, so concurrent collectives of an axis get rows of their own. Ranks are aligned by their hosts' clocks:
across hosts the alignment is as exact as those clocks. Reference: "Trace Event Format", Google, 2016.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from phalanx.runtime.comm.recorder import RunningPass
from phalanx.runtime.comm.timeline import COMPUTE, WAITING, CommTimeline, Span
from phalanx.runtime.tracing.unit_hooks import unit_hooks
from phalanx.spec.files.plan import write_json


class _Watch:
    """Turns the beginnings and ends of passes into spans on a timeline; one pass runs at a time."""

    def __init__(self, timeline: CommTimeline) -> None:
        self.timeline = timeline
        self.current: tuple[str, dict[str, Any], float] | None = None

    def begin(self, op: str, unit: str = "", micro_batch: int | None = None) -> None:
        self.end()
        detail: dict[str, Any] = {"op": op} | ({"unit": unit, "micro_batch": micro_batch} if unit else {})
        self.current = (f"{op} {unit}".strip(), detail, perf_counter())

    def begin_backward(self, unit: str, micro_batch: int) -> None:
        if self.current is None:  # the first unit of this backward pass
            Variable._execution_engine.queue_callback(self.end)
        self.begin("backward", unit, micro_batch)

    def end(self) -> None:
        if self.current is not None:
            name, detail, start = self.current
            self.timeline.passes.append(Span(name, COMPUTE, start, perf_counter(), detail))
            self.current = None


@contextmanager
def passes(
    units: dict[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    timeline: CommTimeline,
    now: Callable[[], RunningPass],
) -> Iterator[None]:
    """Record the passes of a step on its timeline: each unit's forward and backward, and the optimizer."""
    watch = _Watch(timeline)

    def after(unit: str, _: nn.Module, out: Tensor) -> None:
        watch.end()
        if out.requires_grad:
            out.register_hook(lambda _: watch.begin_backward(unit, now().micro_batch))

    hooks: list[Any] = [
        optimizer.register_step_pre_hook(lambda *_: watch.begin("optimizer")),
        optimizer.register_step_post_hook(lambda *_: watch.end()),
    ]
    try:
        with unit_hooks(units, lambda unit, _: watch.begin("forward", unit, now().micro_batch), after):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class RankTimeline:
    """One rank's spans. `place`: its coordinates in words; `clock_ns` plus a span's time is the time of day."""

    rank: int
    place: str
    clock_ns: int
    spans: tuple[Span, ...]


def rank_timeline(rank: int, coordinates: dict[str, int], spans: Sequence[Span]) -> RankTimeline:
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
