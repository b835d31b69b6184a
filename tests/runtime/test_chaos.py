"""A sample of what `make chaos` does by the hour (tests/chaos)."""

from __future__ import annotations

import pytest
from chaos.cases import FAMILIES, FILES, PHASES, Case, every, world
from chaos.run import Broken, Runs, Skipped
from support.struck_runs import folder_of_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, measured: None) -> Runs:
    return Runs(folder_of_runs(tmp_path_factory.mktemp("chaos")))


SAMPLE = (Case("data parallel", "launcher", "SIGKILL", "optimizer"), Case("data parallel", "files", "full disk"))
LONG = (
    Case("data parallel", 1, "clock", "forward"),
    Case("data parallel", "launcher", "SIGSTOP", "saving"),
    *(Case("data parallel", "files", name) for name in FILES if name != "full disk"),
)


@pytest.mark.parametrize("case", [*SAMPLE, *(pytest.param(c, marks=pytest.mark.long) for c in LONG)], ids=str)
def test_a_case_holds(runs: Runs, case: Case) -> None:
    try:
        runs.examine(case)
    except Skipped as reason:
        pytest.skip(str(reason))


@pytest.mark.long
def test_a_case_can_fail(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that continues otherwise than the one left alone is noticed."""
    reference = runs.reference("data parallel")
    monkeypatch.setitem(runs._references, "data parallel", [*reference[:-1], (8, 0.0, 0.0, None)])
    with pytest.raises(Broken, match="steps differ"):
        runs.examine(Case("data parallel", "launcher", "SIGINT", "forward"))


def test_every_case_names_ranks_that_exist() -> None:
    cases = every()
    assert {case.family for case in cases} == FAMILIES.keys()
    assert {case.phase for case in cases} - {""} == PHASES.keys()
    assert all(case.victim < world(case.family) for case in cases if isinstance(case.victim, int))
    assert len(set(cases)) == len(cases)
