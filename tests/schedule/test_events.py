"""What a recorded event may differ in from the predicted one, and what the messages of a recurrence grow with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from support.hybrids import hybrid

from phalanx.schedule.event import Event, Identity
from phalanx.schedule.layers import collectives, context
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.strategy.spec import Strategy

_EVENT = Event("p2p", "send", "B", "blocks.0", "pp", 2, 1, "bfloat16", 1, 2, 3, bytes=100)


@pytest.mark.parametrize("by", ["identity", "at_most", "routed"])
def test_a_recorded_event_differs_from_its_prediction_in_bytes_alone_and_where_they_are_open(by: str) -> None:
    predicted = _EVENT if by == "identity" else replace(_EVENT, **{by: True})
    sizes = {100: True, 99: by != "identity", 101: by == "routed"}
    assert {size: predicted.matches(replace(_EVENT, bytes=size)) for size in sizes} == sizes
    for name in Identity._fields[:-1]:
        value = getattr(_EVENT, name)
        other = replace(_EVENT, bytes=99, **{name: value + 1 if isinstance(value, int) else "other"})
        assert not predicted.matches(other), name


def test_an_event_of_another_unit_is_the_same_otherwise() -> None:
    every: dict[str, Any] = {f.name: getattr(_EVENT, f.name) for f in fields(Event)}
    full = Event(**every | {"flops": 5, "alloc": 6, "free": 7, "at_most": True, "routed": True})
    assert full.at("head", 9) == replace(full, unit="head", micro_batch=9)


@pytest.mark.parametrize("mixer", ["mamba", "delta", "lightning", "kda"])
def test_messages_of_a_recurrence_grow_with_tokens_and_their_type_and_return_in_turn(mixer: str) -> None:
    spec, s = hybrid(0, (mixer,)), Strategy(cp=2, ulysses=2)
    (runs,) = [
        x
        for x in collectives.communication(spec, Job(2, 4096), s, "blocks.0", "F", 2048)
        if isinstance(x, collectives.CoreRuns)
    ]

    def sent(tokens: int, dtype: Any, phase: Any) -> list[int]:
        found = context.communication(runs.op, runs.sublayer, s, dtype, phase, tokens)
        return [message.bytes for message in found]

    there, back = sent(1, "bfloat16", "F")
    assert there > back > 0
    assert sent(1, "bfloat16", "B") == [back, there]
    for dtype, size in DTYPE_BYTES.items():
        if dtype in ("float32", "float64", "bfloat16"):
            assert sent(7, dtype, "F") == [7 * there * size // 2, 7 * back * size // 2]
