"""One table of pipeline schedules: no row without a fact, no schedule without a row."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest

from phalanx.cost.ledger.pipeline_formulas import bubble, evaluate_by_schedule, micro_batches_in_flight
from phalanx.schedule.pipeline.actions import splits
from phalanx.schedule.pipeline.schedules import SCHEDULES, ScheduleFacts, build, table
from phalanx.schedule.pipeline.stages import rank_of, splits_backward
from phalanx.spec.strategy.spec import Schedule, Strategy

ROWS = list(SCHEDULES.values())
FACTS = [f.name for f in fields(ScheduleFacts)]


@pytest.mark.parametrize("fact", FACTS)
def test_a_row_without_a_fact_cannot_be_made(fact: str) -> None:
    facts: dict[str, Any] = {name: getattr(SCHEDULES["1f1b"], name) for name in FACTS}
    with pytest.raises(TypeError, match=f"lacks {fact}"):
        ScheduleFacts(**facts | {fact: None})
    del facts[fact]
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{fact}'"):
        ScheduleFacts(**facts)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_absent_from_the_table_is_named_when_the_table_is_made(name: str) -> None:
    rest = [row for row in ROWS if row.name != name]
    with pytest.raises(TypeError, match=f"'{name}' is a Schedule .* but has no row"):
        table(rest)
    with pytest.raises(TypeError, match=f"'{name}' has a row but is no Schedule"):
        table(ROWS, [row.name for row in rest])


def test_a_schedule_has_one_row_and_counterparts_name_each_other() -> None:
    assert tuple(table(ROWS)) == tuple(SCHEDULES) == get_args(Schedule)
    with pytest.raises(TypeError, match="'zb-v' has 2 rows"):
        table([*ROWS, SCHEDULES["zb-v"]])
    with pytest.raises(TypeError, match="'gpipe' names '1f1b' as its counterpart, which does not name it"):
        table([replace(row, counterpart="1f1b") if row.name == "gpipe" else row for row in ROWS])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_facts_of_a_row_are_those_of_the_schedule_that_it_builds(name: Any) -> None:
    ranks, m, facts = 4, 12, SCHEDULES[name]
    s = build(name, ranks, m)
    assert s.chunks == facts.chunks * ranks
    assert splits(s) == facts.split_backward == splits_backward(Strategy(pp=ranks, schedule=name))
    assert s.rank_of == rank_of(Strategy(pp=ranks, schedule=name, virtual=2 if facts.takes_virtual else 1))
    for columns in ((12, 4, 2), (np.array([12, 3]), np.array([4, 4]), np.array([2, 2]))):
        number = list(SCHEDULES).index(name)
        m_, p, v = columns
        waits = evaluate_by_schedule(number, "least_wait", m_, p, v)
        for fact, values in (("bubble", bubble(number, m_, p, v)), ("least_wait", waits)):
            np.testing.assert_array_equal(values, getattr(facts, fact)(m_, p, v) + 0 * p)
        for rank, held in zip(facts.in_flight(m_, p), micro_batches_in_flight(number, m_, p), strict=True):
            np.testing.assert_array_equal(held, rank + 0 * p)
