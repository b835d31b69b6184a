"""Summaries of choices count what they sum up: fields that differ, what fits, what could not be searched."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from phalanx.answers import validate
from phalanx.answers.validate import RecipeScore, SweepScore, _regret, _summary_of_recipes, _summary_of_sweeps, score
from phalanx.spec.errors import InputError
from phalanx.spec.model.presets import PRESETS
from phalanx.spec.strategy.spec import Strategy
from phalanx.validate import collectives, from_row, records

SWEEP = SweepScore("q", "f", 5, 0.9, 0.1, None, "dp=2", False, 1)
RECIPE = RecipeScore("q", "f", "megatron-core", False, "tp=2", "tp=4", 0.9, 0.1, "", True, 0.5, {"tp": (4, 2)})


def test_sweeps_are_summed_up() -> None:
    scores = [SWEEP, replace(SWEEP, spearman=None, regret=0.3, regret_left_out=0.2, chosen_out_of_memory=True)]
    scores.append(replace(SWEEP, spearman=0.7, regret=0.0, regret_left_out=0.4, strategies=7, refused=0))
    found = _summary_of_sweeps(scores)
    assert (found["n"], found["strategies"], found["refused"], found["chosen_out_of_memory"]) == (3, 17, 2, 1)
    assert (found["spearman_median"], found["regret_median"]) == pytest.approx((0.8, 0.1))
    assert (found["regret_p90"], found["regret_p90_left_out"]) == pytest.approx((0.26, 0.38))
    assert _summary_of_sweeps([])["regret_median"] is None


def test_recipes_are_summed_up() -> None:
    scores = [RECIPE, replace(RECIPE, ratio=None, fits=False, option="offload", differs={})]
    scores.append(replace(RECIPE, ratio=1.1, option="offload", differs={"tp": (4, 2), "pp": (1, 2)}))
    found = _summary_of_recipes(scores)
    assert (found["n"], found["fields_that_differ"]) == (3, {"tp": 2, "pp": 1})
    assert (found["ratio_p10"], found["ratio_median"], found["ratio_p90"]) == pytest.approx((0.92, 1.0, 1.08))
    assert found["said_to_fit"] == pytest.approx(2 / 3)
    assert found["said_to_fit_by_option"] == {
        "none": {"n": 1, "said_to_fit": 1.0},
        "offload": {"n": 2, "said_to_fit": 0.5},
    }
    assert [each["ratio"] for each in found["each"]] == [0.9, None, 1.1]
    assert _summary_of_recipes([])["said_to_fit"] is None


def test_a_regret_is_what_the_predicted_best_takes_longer() -> None:
    a, b, c = (Strategy(dp=n) for n in (1, 2, 4))
    measured = {a: 2.0, b: 1.0, c: 3.0}
    assert _regret({a: 1.0, b: 2.0, c: 3.0}, measured) == 1.0
    assert _regret({a: 9.0, b: 2.0, c: 3.0}, measured) == 0.0


def test_recipes_that_cannot_be_searched_are_counted_by_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a recipe is scored or left out, with the reason; progress is said at the tenth and the last."""
    rows = [row for row in records.load(records.RUNS) if "nemo" in row.family][:40]
    taken: list[Any] = []

    def scored(c: Any) -> RecipeScore:
        taken.append(c)
        if len(taken) % 3 == 0:
            raise InputError("strategy", "x", "has more chunks than blocks")
        return replace(RECIPE, moe=c.row.moe)

    monkeypatch.setattr(validate, "score_recipe", scored)
    monkeypatch.setattr(validate, "score_sweep", lambda s, links: SWEEP)
    said: list[str] = []
    found = score(rows, said.append)
    assert len(taken) > 3
    refused = [n for reason, n in found["left_out"].items() if "more chunks than blocks" in reason]
    assert refused == [len(taken) // 3]
    of_kinds = [found["recipes"][kind]["n"] for kind in ("dense", "moe")]
    assert sum(of_kinds) == len(taken) - refused[0]
    assert of_kinds[1] == sum(c.row.moe for i, c in enumerate(taken, 1) if i % 3)
    assert said[-1] == f"recipes: {len(taken)} of {len(taken)} searched"
    assert len(said) == -(-len(taken) // 10)


def test_rows_of_deepseek_have_the_experts_of_its_preset() -> None:
    rows = [row for row in records.load(records.RUNS) if row["model"] == "deepseek-v3"]
    found = {c.model.experts for c in from_row.cases(rows[:3])[0]}
    known = PRESETS["deepseek-v3"]["experts"]
    (experts,) = found
    assert experts is not None
    assert {name: getattr(experts, name) for name in known} == known | {"dense_layers": tuple(known["dense_layers"])}


def test_networks_of_clouds_are_told_from_others() -> None:
    clouds: dict[bool, set[str]] = {True: set(), False: set()}
    for row in records.load(records.COLLECTIVES, ("hardware", "collective")):
        with suppress(collectives.Unspecified):
            clouds[collectives.point(row).cloud].add(row["interconnect"])
    assert all("EFA" in links or "TCPXO" in links for links in clouds[True])
    assert not any("EFA" in links for links in clouds[False])
    assert all(clouds.values())
