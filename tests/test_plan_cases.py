"""Published trainings: what was used is legal, takes what was measured, and what a search chooses is no slower."""

from __future__ import annotations

import pytest

from phalanx.plan import makespan, reasons, rules
from phalanx.plan.cases import CASES, question, sheet, strategy, study
from phalanx.schedule.stages import check

_MEASURED = [c for c in CASES if c.measured_s]


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_what_was_used_is_legal(case):
    p = question(case)
    check(strategy(case), p.model, p.job, case.gpus)


@pytest.mark.parametrize("case", _MEASURED, ids=[c.name for c in _MEASURED])
def test_what_was_used_takes_what_was_measured(case):
    p = question(case)
    (used,), (run,) = reasons.priced(p, [strategy(case)]), makespan.run(p, [strategy(case)])
    assert run.seconds(used.terms) == pytest.approx(case.measured_s, rel=0.10)
    assert used.fits


def test_the_search_is_no_slower_and_says_why():
    found = study(CASES[0])
    assert found.used.fits
    assert found.chosen_s is not None
    assert found.chosen_s <= found.used_s
    assert "less" in found.why
    (row,) = sheet([found]).rows
    assert row[2:4] == (CASES[0].measured_s, found.used_s)


@pytest.mark.parametrize("rule", rules.RULES, ids=[r.name for r in rules.RULES])
def test_rules_are_legal_on_their_gpus(rule):
    p = question(rule)
    check(strategy(rule), p.model, p.job, rule.gpus)


def test_plain_ddp_of_7b_does_not_fit_80_gb():
    """16 bytes a parameter are 112 GB, whatever is taught; ZeRO is what a search takes."""
    ddp, zero = rules.sheet(rules.RULES[1:3]).rows
    assert ddp[3] is None
    assert "needs" in str(ddp[7])
    assert zero[6] is not None
    assert zero[6] >= 0
