"""The limits of searches that docs/planning.md states are those of the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from phalanx.planning import budget, search
from phalanx.planning.explain import lint
from phalanx.planning.search import best_first, lower_bounds, planner

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "planning.md").read_text().split())


def test_limits() -> None:
    keep = inspect.signature(planner.answer).parameters["keep"].default
    for said in (
        f"`optimal` is {budget.OPTIMAL} tokens per active parameter",
        f"at most {100 * planner._SLACK:.0f} % slower than the fastest",
        f"must leave free, {100 * search.HEADROOM:.0f} % by default",
        f"up to {planner._FRONT} times the shortest step",
        f"when {best_first.SHOWN} that fit are faster than all others are expected to be, or after "
        f"{best_first._PATIENCE} prices; if nothing fits, after {best_first._MOST},",
        f"(for a pipeline, {100 * (1 - lower_bounds._UNEQUAL):.0f} % below its expected time)",
        f"Beyond {best_first._LARGE:,} strategies",
        f"choose {best_first._FIRST} strategies and the best of each family",
        f"among the {keep * planner._EACH} best of all",
    ):
        assert said in PAGE, said


def test_all_lints_are_named() -> None:
    names = set(re.findall(r'Finding\(\s*"([a-z0-9-]+)"', inspect.getsource(lint)))
    sentence = PAGE[PAGE.index("There are sixteen lints") : PAGE.index("In the tests each has a corrected twin")]
    assert names == set(re.findall(r"`([a-z0-9-]+)`", sentence)) - {"plan"}
    assert len(names) == 16
