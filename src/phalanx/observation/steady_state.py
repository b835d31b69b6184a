"""The steady state of a pipeline: of the many micro-batches that do the same in a chunk, few are executed.

The executor goes through its full list of actions, with every message. Passes are executed, and their events and live
bytes recorded, for the first micro-batches of a chunk (of each kind, if some split their backward pass) and for the
last one. Two successive executed passes must do the same; all passes between then and the last repeat their record,
and hold as many bytes as those did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.runtime.model_parallel.pipeline import PASSES, Pipeline
from phalanx.runtime.tracing.instrument import Tracker
from phalanx.schedule.event import Event
from phalanx.schedule.pipeline.actions import Action

T = TypeVar("T")

_COUNTERS = 64
"""Bytes by which an event may differ between micro-batches: running sums that the first one allocates."""


class Unsteady(Exception):
    """No executed pass can stand for those after it; the message names the pass."""


@dataclass(frozen=True)
class Pass:
    """The record of a pass: its events, whose computes hold their own bytes; (change, peak) of live bytes `before`
    the first compute; and the `change` of live bytes over the pass."""

    events: tuple[Event, ...]
    before: tuple[int, int]
    change: int

    def same(self, other: Pass) -> bool:
        """Whether two micro-batches' passes did the same."""
        return len(self.events) == len(other.events) and all(map(_same, self.events, other.events))


def _same(a: Event, b: Event) -> bool:
    """Whether two events of different micro-batches are the same, up to `_COUNTERS` bytes."""
    alike = a.identity == b.identity._replace(micro_batch=a.micro_batch) and a.flops == b.flops
    return alike and max(abs(a.alloc - b.alloc), abs(a.free - b.free)) < _COUNTERS


@dataclass
class Known:
    """The last executed pass of one kind through a chunk; `steady`: the one before it did the same."""

    last: Pass | None = None
    steady: bool = False

    def ran(self, one: Pass) -> None:
        """Take the next executed pass."""
        self.steady = self.last is not None and one.same(self.last)
        self.last = one


class Steady(Pipeline):
    """Executes the passes of the `first` micro-batches and of the last one, and repeats their record for the
    others."""

    def __init__(self, first: int, *args: Any) -> None:
        super().__init__(*args)
        self._real = _first(self.actions, first)
        self.ran = len({m for _, m in self._real})
        self._known: dict[tuple[str, int], Known] = {}
        self._repeated: dict[
            tuple[int, int], list[Tensor]
        ] = {}  # inputs of repeated forward passes, until their backward

    def _forward(self, action: Action, batch: Tensor) -> Tensor | None:
        _, chunk, m = action
        if (chunk, m) in self._real:
            return self._run_and_record(action, lambda: super(Steady, self)._forward(action, batch))
        steady = self._steady(action)
        live = self._meter.live
        self._begins(action, "forward")
        inputs = [self._arrived("F", chunk, m)] if chunk else []
        self._repeat(steady, m)
        last = chunk == self.schedule.chunks - 1
        if not last:
            self._meter.live -= prod(self.shapes[chunk]) * self.dtype.itemsize  # the record counts it already
            self._here["F", chunk, m] = torch.empty(
                self.shapes[chunk], dtype=self.dtype, device=self.comm.world.device
            )
        self._repeated[chunk, m] = inputs
        self._meter.live = live + steady.change
        return torch.zeros((), dtype=torch.float64, device=self.comm.world.device) if last else None

    def _backward(self, action: Action, seed: float, last: bool) -> None:
        kind, chunk, m = action
        if (chunk, m) not in self._repeated:
            self._run_and_record(action, lambda: super(Steady, self)._backward(action, seed, last))
            return
        steady = self._steady(action)
        live = self._meter.live
        self._begins(action, "backward")
        inputs = self._repeated.pop((chunk, m))
        if chunk < self.schedule.chunks - 1:
            inputs.append(self._arrived("B", chunk, m))
        self._repeat(steady, m)
        inputs.clear()  # the pass frees them
        if kind == "I":
            self._weights_due[chunk, m] = []
        if chunk:
            self._here["B", chunk, m] = torch.empty(
                self.shapes[chunk - 1], dtype=self.dtype, device=self.comm.world.device
            )
        self._meter.live = live + steady.change

    def _weights(self, action: Action, last: bool) -> None:
        _, chunk, m = action
        if self._weights_due[chunk, m]:
            self._run_and_record(action, lambda: super(Steady, self)._weights(action, last))
            return
        del self._weights_due[chunk, m]
        steady = self._steady(action)
        live = self._meter.live
        self._begins(action, "gradients of weights")
        self._repeat(steady, m)
        self._meter.live = live + steady.change

    @property
    def _meter(self) -> Tracker:
        meter = self.comm.recorder.meter
        assert isinstance(meter, Tracker)
        return meter

    def _of(self, action: Action) -> Known:
        return self._known.setdefault((action.kind, action.chunk), Known())

    def _steady(self, action: Action) -> Pass:
        known = self._of(action)
        if known.last is None or not known.steady:
            raise Unsteady(f"{action.kind} of chunk {action.chunk}: no two micro-batches do the same")
        return known.last

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
        if action.micro_batch < self.schedule.micro_batches - 1:  # the last one also completes gradients
            self._of(action).ran(Pass(tuple(events), before[-1], meter.live - live))
        return out

    @contextmanager
    def _before(self) -> Iterator[list[tuple[int, int]]]:
        """Yield a list that receives (change, peak) of live bytes until the first compute of a pass begins. They
        belong to the pass before too, so its own peak is kept."""
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

    def _repeat(self, steady: Pass, m: int) -> None:
        recorder, meter = self.comm.recorder, self._meter
        self._hold(*steady.before)
        for e in steady.events:
            if e.kind != "compute":
                recorder.collective(e.at(e.unit, m))
                continue
            recorder.compute(e.op, e.phase, e.unit, m, e.dtype)
            recorder.flops(e.flops)
            self._hold(e.alloc - e.free, e.alloc)
        meter.peak = max(meter.peak, meter.highest)

    def _hold(self, change: int, most: int) -> None:
        meter = self._meter
        meter.highest = max(meter.highest, meter.live + most)
        meter.peak = max(meter.peak, meter.highest)
        meter.live += change


def _first(actions: Sequence[Action], count: int) -> set[tuple[int, int]]:
    """Return the (chunk, micro-batch) to execute: of each chunk the first `count` among those with passes of the same
    kinds, and the last one."""
    kinds: dict[tuple[int, int], str] = {}
    for kind, chunk, m in actions:
        if kind in PASSES:
            kinds[chunk, m] = kinds.get((chunk, m), "") + kind
    chosen: set[tuple[int, int]] = set()
    seen: Counter[tuple[int, str]] = Counter()
    last: dict[int, int] = {}
    for (chunk, m), passes in sorted(kinds.items()):
        seen[chunk, passes] += 1
        if seen[chunk, passes] <= count:
            chosen.add((chunk, m))
        last[chunk] = m
    return chosen | set(last.items())
