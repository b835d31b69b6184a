"""The choices to which predictions lead, against published runs: the guard on every change of prices."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from phalanx.answers.validate import price_expert, question, score_recipe, score_sweep
from phalanx.cli.app import app
from phalanx.spec.strategy.spec import Strategy
from phalanx.validate import records
from phalanx.validate.choices import (
    MODULES,
    OFFLOAD,
    SOME_BLOCKS,
    SWEEP_SIZE,
    PublishedSweep,
    _question,
    _scaled,
    differences,
    is_timed,
    memory_option,
    options_of,
    overlaps_experts,
    question_name,
    recipes,
    sweeps,
)
from phalanx.validate.from_row import Case, cases


@pytest.fixture(scope="module")
def usable() -> list[Case]:
    return cases(records.load(records.RUNS))[0]


@pytest.fixture(scope="module")
def questions(usable: list[Case]) -> list[PublishedSweep]:
    return sweeps(usable)


# family, links: least median rank correlation, most regret in the median and at the 90 % quantile, most sweeps whose
# chosen strategy ran out of memory. Today's level: to be tightened as prices improve.
_BOUNDS = {
    ("hf-ultrascale", "cluster"): (0.96, 0.0, 0.05, 0),
    # Two, dp=32 and dp=64 with micro-batches of 4, ran out of memory where 8 GPUs held 68 GiB of 76 with the same.
    ("hf-ultrascale", "datasheet"): (0.82, 0.0, 0.13, 2),
    ("vtrain", "cluster"): (0.96, 0.0, 0.14, 0),
}


@pytest.mark.parametrize(("family", "links"), _BOUNDS)
def test_the_choice_among_measured_strategies(questions: list[PublishedSweep], family: str, links: str) -> None:
    scores = [score_sweep(s, links) for s in questions if s.family == family]
    rank_correlation, median, p90, out_of_memory = _BOUNDS[family, links]
    assert len(scores) >= 15
    assert np.median([s.spearman for s in scores if s.spearman is not None]) >= rank_correlation
    assert np.median([s.regret for s in scores]) <= median
    assert np.percentile([s.regret for s in scores], 90) <= p90
    assert sum(s.chosen_out_of_memory for s in scores) <= out_of_memory


def test_a_sweep_is_one_question(questions: list[PublishedSweep]) -> None:
    for s in questions:
        assert len({c.strategy for c in s.runs if is_timed(c)}) >= SWEEP_SIZE
        for field in ("model", "job", "profile") if s.family == "vtrain" else ("model", "job"):
            assert len({getattr(c, field) for c in s.runs}) == 1
        assert len({c.row["gpus"] for c in s.runs}) == 1


def test_a_jobs_links_stand_in_for_those_of_jobs_that_measured_none(questions: list[PublishedSweep]) -> None:
    sweep = next(s for s in questions if s.family == "hf-ultrascale" and not all(is_timed(c) for c in s.runs))
    assert all(np.any(b.gather) for b in sweep.benchmarks())
    blind = PublishedSweep(tuple(replace(c, row=_without_links(c.row)) for c in sweep.runs))
    assert not any(np.any(b.gather) for b in blind.benchmarks())


def _without_links(row: records.Row) -> records.Row:
    return records.Row({name: "" if name.startswith("busbw") else cell for name, cell in row.cells.items()})


def test_regret_by_hand(questions: list[PublishedSweep]) -> None:
    """With the measured times reversed, the first predicted strategy is among the slowest."""
    sweep = next(s for s in questions if s.family == "vtrain" and score_sweep(s, "cluster").regret == 0)
    times = sorted({c.measured_s for c in sweep.runs})
    reverse = dict(zip(times, times[::-1], strict=True))
    worst = PublishedSweep(tuple(replace(c, measured_s=reverse[c.measured_s]) for c in sweep.runs))
    before, after = score_sweep(sweep, "cluster"), score_sweep(worst, "cluster")
    assert after.regret == pytest.approx(times[-1] / times[0] - 1)
    assert after.spearman == pytest.approx(-(before.spearman or 0))


def test_a_chosen_strategy_that_ran_out_of_memory_counts(questions: list[PublishedSweep]) -> None:
    sweep = next(s for s in questions if s.family == "hf-ultrascale")
    chosen = score_sweep(sweep, "cluster").chosen
    failed = records.Row({"status": "OOM"})
    runs = tuple(
        replace(c, row=records.Row({**c.row.cells, **failed.cells}), measured_s=None)
        if str(c.strategy) == chosen
        else c
        for c in sweep.runs
    )
    assert not score_sweep(sweep, "cluster").chosen_out_of_memory
    assert score_sweep(PublishedSweep(runs), "cluster").chosen_out_of_memory


def test_recipes_are_what_experts_tuned(usable: list[Case]) -> None:
    tuned, others = recipes(usable)
    assert len(tuned) + len(others) == sum(is_timed(c) for c in usable)
    assert len(tuned) >= 80
    assert {c.row.moe for c in tuned} == {False, True}
    reasons = {reason for _, reason in others}
    assert "a proxy of fewer layers in the layout of the full model" in reasons
    assert all("proxy" not in c.row["model"] for c in tuned)
    assert not any(c.row.family in ("vtrain", "hf-ultrascale", "llm-foundry") for c in tuned)
    assert all(question(c).row is None for c in tuned)  # what today's release refuses, theirs may have run


def test_of_the_recipes_of_a_question_the_fastest_is_kept(usable: list[Case]) -> None:
    tuned, others = recipes(usable)
    why = {id(row): reason for row, reason in others}
    for said, key, better in (
        ("a slower strategy of the same question", _question, lambda c: c.measured_s or 0.0),
        ("a recipe at another scale or release", _scaled, lambda c: c.strategy.world),
    ):
        kept = {key(c): c for c in tuned}
        left = [c for c in usable if why.get(id(c.row)) == said]
        assert left
        assert all(better(kept[key(c)]) <= better(c) for c in left if key(c) in kept)


# The expert's question by model, chip and number format; the least that the best strategy may take of the expert's
# time, and whether the expert's is predicted to fit. Today's level, as above.
_RECIPES = {("llama3-8b", "B200", "fp8-mx"): (0.90, True), ("gpt3-175b", "H100-SXM-80GB", "bf16"): (0.90, True)}


@pytest.mark.parametrize(("model", "chip", "number_format"), _RECIPES)
def test_the_choice_beside_an_experts(usable: list[Case], model: str, chip: str, number_format: str) -> None:
    wanted = (model, chip, number_format)
    c = next(c for c in recipes(usable)[0] if (c.row["model"], c.row["gpu"], c.row["precision"]) == wanted)
    found = score_recipe(c)
    least, fits = _RECIPES[model, chip, number_format]
    assert found.fits == fits
    assert found.ratio is not None
    assert least <= found.ratio <= 1.0 + 1e-9 or not fits


def test_a_row_may_state_that_experts_are_overlapped(usable: list[Case]) -> None:
    row = next(c.row for c in usable if c.row["framework"] != "Megatron-Bridge")
    stated = [type(row)(row.cells | {"options": options}) for options in ("TP comm overlap", "MXFP8; EP overlap")]
    assert [overlaps_experts(each) for each in stated] == [False, True]


def test_strategies_differ_in_what_somebody_chose() -> None:
    one, other = Strategy(dp=4, tp=2, layers="3/1"), Strategy(dp=2, tp=2, pp=2, layers="2/2")
    assert differences(one, other) == {"pp": (1, 2)}
    assert differences(one, one) == {}


def test_what_experts_ran_is_said_to_fit(usable: list[Case]) -> None:
    """With the options of its recipe; the few others are named, with what is known of them."""
    tuned = recipes(usable)[0]
    priced = {question_name(c): price_expert(c, question(c)) for c in tuned}
    refused = {name: p for name, p in priced.items() if not p.fits}
    assert len(tuned) >= 80
    assert len(refused) <= 0.05 * len(tuned)
    assert set(refused) == {
        # As 26.02.01 publishes them: the state of 70B parameters on every rank, and micro-batches of 2 where the
        # recipe and all other releases have 1.
        "llama3-70b, 64 GB300, 256 x 8192 nvfp4",
        "llama3-70b, 64 GB300, 256 x 8192 fp8-mx",
        # 9 % and 0.3 % more than there is, with the offloading of release 26.06.
        "llama3-70b, 64 GB200, 128 x 8192 fp8-cs",
        "llama3-70b, 64 GB300, 256 x 8192 fp8-cs",
    }


def test_options_beyond_the_layout(usable: list[Case]) -> None:
    options = {memory_option(c.row) for c in recipes(usable)[0]}
    assert options == {"", MODULES, OFFLOAD, SOME_BLOCKS}
    assert memory_option(records.Row({"act_ckpt": "selective: norm, act"})) == MODULES
    assert memory_option(records.Row({"options": "cpu-offload"})) == OFFLOAD
    assert not memory_option(records.Row({"notes": "act. recompute/offload not in table"}))
    named, _ = options_of(records.Row({"act_ckpt": "selective: norm, act"}), Strategy())
    assert named.recompute == "selective:layernorm+moe_act"


def test_the_command(tmp_path: Path, usable: list[Case]) -> None:
    """One sweep and one recipe of another file, as JSON and as tables."""
    runs = next(s for s in sweeps(usable) if s.family == "vtrain").runs
    recipe = next(c for c in recipes(usable)[0] if c.row["model"] == "llama3-8b")
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(recipe.row.cells))
        writer.writeheader()
        writer.writerows(c.row.cells for c in (*runs, recipe))
    done = CliRunner().invoke(app, ["validate", "choices", "--runs", str(path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    wanted = {"n", "spearman_median", "regret_median", "regret_p90", "chosen_out_of_memory"}
    assert set(found["sweeps"]["links"]) == {"cluster", "datasheet"}
    assert all(wanted <= set(part) for part in (found["sweeps"], *found["sweeps"]["links"].values()))
    assert {"n", "ratio_p10", "ratio_median", "said_to_fit"} <= set(found["recipes"]["dense"])
    assert (found["sweeps"]["n"], found["recipes"]["dense"]["n"], found["recipes"]["moe"]["n"]) == (1, 1, 0)
    done = CliRunner().invoke(app, ["validate", "choices", "--runs", str(path)])
    assert done.exit_code == 0
    assert "regret" in done.stdout
    assert "recipes that experts tuned" in done.stdout
