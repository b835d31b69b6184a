"""Schedules run in rounds, under many costs at once, against the simulation action by action."""

from __future__ import annotations

import random

import numpy as np
import pytest

from phalanx.cost.ledger import pipeline_formulas
from phalanx.cost.ledger.pipeline_formulas import KINDS, sort_into_rounds
from phalanx.schedule.pipeline.schedules import SCHEDULES, build
from phalanx.schedule.pipeline.simulate import run


@pytest.mark.parametrize("name", SCHEDULES)
def test_rounds_take_as_long_as_the_actions_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_formulas, "_ROOM", 200)  # several parts, too
    draw, facts = random.Random(name), SCHEDULES[name]
    for _ in range(12):
        ranks, m = draw.randint(1, 9), draw.randint(1, 30)
        virtual = draw.randint(2, 4) if facts.takes_virtual else None
        if facts.refusal(ranks, m):
            continue
        s = build(name, ranks, m, virtual)
        seconds = np.array([[[draw.random() for _ in range(4)] for _ in range(s.chunks)] for _ in KINDS])
        transfer = np.array([0.0, draw.random(), 0.1 * draw.random(), 2.0])
        found = sort_into_rounds(s).makespans(seconds, transfer)
        for i in range(4):
            costs = {kind: seconds[k, :, i].tolist() for k, kind in enumerate(KINDS)}
            assert found[i] == max(own[-1][1] for own in run(s, costs, float(transfer[i])))
