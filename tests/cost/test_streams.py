"""A step on two streams: what waits for what, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.cost.step.expand import expand
from phalanx.planning.lookup import model_named
from phalanx.schedule.event import Event
from phalanx.schedule.layout import Layout
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.textbook.gallery.data_parallel import Timed, exposed_seconds, gathered_bytes, with_times


def _events(line: str, layers: int = 3) -> tuple[Event, ...]:
    strategy = make_strategy(line)
    assert strategy is not None
    model = replace(model_named("llama3-8b")[0], layers=layers)
    return expand(Layout(model, Job(4, 64, Precision("bfloat16")), strategy).stage_view()).events


def _unit(event: Event) -> float:
    """One second for each pass and each collective."""
    return 0.0 if event.phase == "opt" else 1.0


def _times(line: str) -> list[Timed]:
    return with_times(_events(line), _unit)


def test_without_prefetching_every_gather_is_exposed() -> None:
    """ZeRO-3 of 5 units: a gather before each pass but the head's backward one, and what follows the last pass."""
    of = _times("dp=4,zero=3,prefetch=0")
    gathers = [t for t in of if t.event.op == "all_gather"]
    assert len(gathers) == 9
    for t in gathers:  # nothing computes meanwhile
        assert all(c.end <= t.start or c.start >= t.end for c in of if c.event.kind == "compute")
    assert exposed_seconds(of) > exposed_seconds(_times("dp=4,zero=3,prefetch=1"))


def test_prefetching_hides_a_gather_behind_the_pass_before() -> None:
    """Passes and collectives of one second each: after the first gather the forward pass never waits."""
    forward = [t for t in _times("dp=4,zero=3,prefetch=1") if t.event.op == "forward"]
    assert [(t.start, t.end) for t in forward] == [(i + 1.0, i + 2.0) for i in range(5)]


def test_buckets_are_reduced_while_the_backward_pass_goes_on() -> None:
    """Of one bucket all is exposed; of several only the last, where each is as short as a pass."""
    whole = _times("dp=4,zero=0,bucket=100000")
    assert exposed_seconds(whole) == pytest.approx(1.0)
    reduced = [t for t in whole if t.event.op == "all_reduce" and t.event.phase == "B"]
    assert len(reduced) == 1
    parts = with_times(_events("dp=4,zero=0,bucket=900"), lambda e: _unit(e) / (4 if e.kind == "collective" else 1))
    assert exposed_seconds(parts) < 1.0


def test_gathered_parameters_are_freed_when_their_pass_ends() -> None:
    of = _times("dp=4,zero=3,prefetch=0")
    points = gathered_bytes(of)
    largest = max(t.event.bytes for t in of if t.event.op == "all_gather")
    assert max(held for _, held in points) == largest  # one unit at a time
    assert points[-1][1] == 0
    ahead = max(held for _, held in gathered_bytes(_times("dp=4,zero=3,prefetch=1")))
    assert largest < ahead <= 2 * largest
