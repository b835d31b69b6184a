"""An observation that a file holds: what has no meaning is refused by its place, not found by whoever shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from phalanx.schedule.observation import BackwardStart, Holder, Observation, RankObservation
from phalanx.schedule.observation_file import from_json, to_json
from phalanx.spec.errors import InputError

HELD = (Holder("activations", "0", 8),)
RANK = RankObservation(
    *(0, 1, "", 2, (), {("F", "0"): 16}, {}, 8, "F", "0", HELD, 0, (), 1, ("SGD",)), {}, (), (), (), ()
)
SEEN = Observation(
    "train.py", 1, {}, "gpu", "2.13", (replace(RANK, backward_starts=(BackwardStart("B", (0,), HELD),)),)
)


def test_what_was_written_is_read() -> None:
    assert from_json(json.dumps(to_json(SEEN))) == SEEN


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("peak_phase",), "Z", "ranks.0.peak_phase: should be 'F', 'B', 'I', 'W' or 'opt'"),
        (("flops", 0, 0), "f", "ranks.0.flops.0.0: should be 'F', 'B'"),
        (("backward_starts", 0, "phase"), "", "backward_starts.0.phase: should be 'F'"),
        (("backward_starts", 0, "micro_batches"), [], "backward_starts.0.micro_batches: tuple should have"),
        (("holders", 0, "bytes"), -1, "holders.0.bytes: should be greater than or equal to 0"),
        (("rank",), 1, "rank 1 of a world of 1"),
    ],
)
def test_what_has_no_meaning_is_refused_by_its_place(place: tuple[Any, ...], value: object, message: str) -> None:
    content = json.loads(json.dumps(to_json(SEEN)))
    at = content["ranks"][0]
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(InputError) as refusal:
        from_json(json.dumps(content))
    assert message in str(refusal.value)
