"""The trainer's pipeline executor, which repeats the record of micro-batches that do the same (steady_state.py).

The executor goes through its full list of actions, with every message. Passes are executed, and their events and live
bytes recorded, for the first micro-batches of a chunk (of each kind, if some split their backward pass) and for the
last one. All passes between repeat a record, and leave as many bytes live as it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.observation.steady_state import SteadyState
from phalanx.runtime.model_parallel.pipeline import PASSES, Pipeline
from phalanx.runtime.tracing.instrument import Tracker
from phalanx.schedule.event import Event
from phalanx.schedule.pipeline.actions import Action, last_weight_grad_at

T = TypeVar("T")

_COUNTERS = 64
"""Bytes by which an event may differ between micro-batches: running sums that the first one allocates."""


@dataclass(frozen=True)
class PassRecord:
    """The record of a pass: its events, whose computes hold their own bytes; (change, peak) of live bytes `before`
    the first compute; and the `change` of live bytes over the pass."""

    events: tuple[Event, ...]
    before: tuple[int, int]
    change: int

    def same(self, other: PassRecord) -> bool:
        """Whether two micro-batches' passes did the same."""
        return len(self.events) == len(other.events) and all(map(_same, self.events, other.events))


def _same(a: Event, b: Event) -> bool:
    """Whether two events of different micro-batches are the same, up to `_COUNTERS` bytes."""
    alike = a.identity == b.identity._replace(micro_batch=a.micro_batch) and a.flops == b.flops
    return alike and max(abs(a.alloc - b.alloc), abs(a.free - b.free)) < _COUNTERS


class RepeatingPipeline(Pipeline):
    """Executes the passes of the `first` micro-batches of a kind and of the last one, and repeats their record for
    the others."""

    def __init__(self, first: int, *args: Any) -> None:
        super().__init__(*args)
        completing = last_weight_grad_at(self.actions).items()
        self._last = {(chunk, self.actions[at].micro_batch) for chunk, at in completing}
        self._executed = _first_and_last(self.actions, self._last, first)
        self.ran = len({m for _, m in self._executed})
        self._steady = SteadyState[PassRecord](PassRecord.same)
        self._inputs: dict[tuple[int, int], list[Tensor]] = {}
        """Inputs of repeated forward passes, until their backward pass."""

    def _forward(self, action: Action, batch: Tensor) -> Tensor | None:
        _, chunk, m = action
        if (chunk, m) in self._executed:
            return self._run_and_record(action, lambda: super(RepeatingPipeline, self)._forward(action, batch))
        last = chunk == self.schedule.chunks - 1
        with self._repeated(action, "forward") as repeat:
            inputs = [self._arrived("F", chunk, m)] if chunk else []
            repeat()
            if not last:
                self._meter.live -= prod(self.shapes[chunk]) * self.dtype.itemsize  # the record counts it already
                self._here["F", chunk, m] = self._stage_input(chunk)
            self._inputs[chunk, m] = inputs
        return torch.zeros((), dtype=torch.float64, device=self.comm.world.device) if last else None

    def _backward(self, action: Action, seed: float, last: bool) -> None:
        kind, chunk, m = action
        if (chunk, m) not in self._inputs:
            self._run_and_record(action, lambda: super(RepeatingPipeline, self)._backward(action, seed, last))
            return
        with self._repeated(action, "backward") as repeat:
            inputs = self._inputs.pop((chunk, m))
            if chunk < self.schedule.chunks - 1:
                inputs.append(self._arrived("B", chunk, m))
            repeat()
            inputs.clear()  # the pass frees them
            if kind == "I":
                self._weights_due[chunk, m] = []
            if chunk:
                self._here["B", chunk, m] = self._stage_input(chunk - 1)

    def _weights(self, action: Action, last: bool) -> None:
        _, chunk, m = action
        if self._weights_due[chunk, m]:
            self._run_and_record(action, lambda: super(RepeatingPipeline, self)._weights(action, last))
            return
        del self._weights_due[chunk, m]
        with self._repeated(action, "gradients of weights") as repeat:
            repeat()

    @property
    def _meter(self) -> Tracker:
        meter = self.comm.recorder.meter
        assert isinstance(meter, Tracker)
        return meter

    def _stage_input(self, chunk: int) -> Tensor:
        return torch.empty(self.shapes[chunk], dtype=self.dtype, device=self.comm.world.device)

    @contextmanager
    def _repeated(self, action: Action, name: str) -> Iterator[Callable[[], None]]:
        """Begin a pass that is not executed, and yield a function that repeats its record. The record includes the
        caller's allocations inside the block."""
        _, record = self._steady.repeat((action.kind, action.chunk))
        live = self._meter.live
        self._begins(action, name)
        yield lambda: self._repeat(record, action.micro_batch)
        self._meter.live = live + record.change

    def _run_and_record(self, action: Action, run: Callable[[], T]) -> T:
        recorder, meter = self.comm.recorder, self._meter
        begin, live = len(recorder.events), meter.live
        with self._before() as before:
            out = run()
        events = list(recorder.events[begin:])
        at = max((i for i, e in enumerate(events) if e.kind == "compute"), default=None)
        if at is not None:  # the last compute is still open
            began = recorder.began
            events[at] = replace(events[at], alloc=meter.highest - began, free=meter.highest - meter.live)
        if (action.chunk, action.micro_batch) not in self._last:  # which also completes gradients
            record = PassRecord(tuple(events), before[-1], meter.live - live)
            self._steady.add((action.kind, action.chunk), record)
        return out

    @contextmanager
    def _before(self) -> Iterator[list[tuple[int, int]]]:
        """Yield a list that receives (change, peak) of live bytes until the first compute of a pass begins. These
        bytes count in the pass before as well, so its peak is restored."""
        recorder, meter = self.comm.recorder, self._meter
        live, highest, compute = meter.live, meter.highest, recorder.compute
        measured: list[tuple[int, int]] = []
        meter.highest = live

        def first(*args: Any) -> None:
            measured.append((meter.live - live, meter.highest - live))
            meter.highest = max(meter.highest, highest)
            del recorder.compute
            compute(*args)

        recorder.compute = first  # type: ignore[method-assign, assignment]
        try:
            yield measured
        finally:
            if not measured:
                del recorder.compute

    def _repeat(self, record: PassRecord, m: int) -> None:
        recorder, meter = self.comm.recorder, self._meter
        self._allocate(*record.before)
        for e in record.events:
            if e.kind != "compute":
                recorder.collective(e.at(e.unit, m))
                continue
            recorder.compute(e.op, e.phase, e.unit, m, e.dtype)
            recorder.flops(e.flops)
            self._allocate(e.alloc - e.free, e.alloc)
        meter.peak = max(meter.peak, meter.highest)

    def _allocate(self, change: int, most: int) -> None:
        meter = self._meter
        meter.highest = max(meter.highest, meter.live + most)
        meter.peak = max(meter.peak, meter.highest)
        meter.live += change


def _first_and_last(
    actions: Sequence[Action], last: AbstractSet[tuple[int, int]], count: int
) -> set[tuple[int, int]]:
    """Return the (chunk, micro-batch) pairs to execute: `last`, and in each chunk and pass the first `count` of those
    micro-batches that have the same kinds of passes. A user's schedule need not take micro-batches in turn."""
    kinds: dict[tuple[int, int], str] = {}
    passes = [action for action in actions if action.kind in PASSES]
    for kind, chunk, m in passes:
        kinds[chunk, m] = kinds.get((chunk, m), "") + kind
    executed, seen = set(last), Counter[tuple[str, int, str]]()
    for kind, chunk, m in passes:
        key = kind, chunk, kinds[chunk, m]
        seen[key] += 1
        if seen[key] <= count:
            executed.add((chunk, m))
    return executed
