"""Money, energy and carbon: rates and their sources, and the expenses of every question that has them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from support.in_process_cli import error_of
from support.in_process_cli import phalanx as command

import phalanx
from phalanx.planning.expense.expense import Expense, expense_of, expense_of_hours, with_interval
from phalanx.planning.expense.rates import CHIP_RATES, FIGURES, PROVIDERS, rates_on, read_rates
from phalanx.spec.errors import InputError

_H100 = "H100-SXM5-80GB"
_ASK = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "batch": 64, "seq": 8192}
_LINE = [word for name, value in _ASK.items() for word in (f"--{name}", str(value))]


def test_every_figure_has_its_date_and_source() -> None:
    for row in CHIP_RATES.values():
        prices = [price for kind in PROVIDERS if (price := getattr(row, kind)) is not None]
        assert all(0 < low <= high < 100 for low, high in prices)
        assert bool(prices) == bool(row.priced) == bool(row.price_source), row
        assert (row.chip_watts is None) == (row.rated_watts is None) == (not row.power_source), row
        if row.chip_watts is not None and row.rated_watts is not None:
            assert row.chip_watts < row.rated_watts
    assert all(figure.dated and figure.source for figure in FIGURES.values())


def test_an_expense_by_hand() -> None:
    """1,000 GPU-hours of H100 over nodes, at 4.25 USD, 969 + 17 W, PUE 1.2 and Sweden's 40.7 g/kWh."""
    rates = rates_on(_H100, read_rates("provider=hyperscaler, pue=1.2, grid=swe"))
    cost = expense_of("it", 1000.0, rates, {"training": 1000.0}, over_nodes=True)
    assert cost.money == pytest.approx(4250)
    assert cost.energy_kwh == pytest.approx((0.76 * 1275 + 17) * 1.2)
    assert cost.carbon_kg == pytest.approx(cost.energy_kwh * 40.7 / 1e3)
    inside = expense_of("it", 1000.0, rates, {"training": 1000.0})
    assert inside.energy_kwh == pytest.approx(0.76 * 1275 * 1.2)


def test_own_values_need_no_source() -> None:
    rates = rates_on(_H100, read_rates("price=2, watts=500, pue=1, grid=100"))
    assert rates.taken == ()
    cost = expense_of("it", 10.0, rates, {"training": 10.0}, over_nodes=True)
    assert (cost.money, cost.energy_kwh, cost.carbon_kg) == pytest.approx((20, 5, 0.5))


def test_what_has_no_source_is_left_out_and_said() -> None:
    rates = rates_on("TPU-v5p")
    cost = expense_of("it", 10.0, rates, {"training": 10.0})
    assert cost.money is cost.energy_kwh is cost.carbon_kg is None
    said = [(t.value, t.source) for t in rates.taken if t.what in ("price", "watts")]
    assert [value.startswith("no published figure") for value, _ in said] == [True, True]
    assert all(source.startswith("give ") for _, source in said)
    assert rates_on("H800-SXM5-80GB").price is None  # not what an H100 costs
    assert rates_on("GB200-186GB").price is None  # nor a B200


@pytest.mark.parametrize(
    ("grid", "grams", "said"),
    [("SWE", 40.7, "Sweden 2023"), ("se3", 18.0, "Stockholm|Southern Sweden"), ("us-west1", 94.0, "Google Cloud")],
)
def test_grids_are_countries_zones_and_regions(grid: str, grams: float, said: str) -> None:
    rates = rates_on(_H100, read_rates(f"grid={grid}"))
    assert rates.g_per_kwh == grams
    (taken,) = [t for t in rates.taken if t.what == "grid"]
    assert any(word in taken.value for word in said.split("|"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("grid=SWD", "is no country"),
        ("grid=-3", "must be from 0"),
        ("grid=nan", "must be from 0"),
        ("pue=0.9", "must be from 1"),
        ("watts=0", "must be watts"),
        ("price=x", "is not a number"),
        ("price=1,price=2", "is given twice"),
        ("provider=aws", "is no kind of provider"),
        ("prize=2", "is no rate"),
        ("price", "is no rate"),
        ("=2", "is no rate"),
        ("price=inf", "must be a price"),
    ],
)
def test_bad_rates_are_one_line(line: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_rates(line)


def test_a_price_is_given_once() -> None:
    with pytest.raises(InputError, match="stands in rates, too"):
        read_rates("price=2", 3.0)


def test_questions_have_the_same_keys(tmp_path: Path) -> None:
    """A step costs the same in predict, compare, plan and goodput, in JSON and in Python."""
    line = "tp=8,zero=1"
    p = phalanx.predict(**_ASK, strategy=line)
    assert p.expense is not None
    keys = {field.name for field in fields(Expense)}
    compared = phalanx.compare(line, "tp=4", **_ASK).to_dict()["sides"][0]
    planned = phalanx.plan(**_ASK, strategy=line).to_dict()["best"]
    for found in (p.to_dict(), compared, planned):
        assert set(found["expense"]) == keys
    assert compared["expense"]["money"] == pytest.approx(p.expense.money)
    assert planned["expense"]["money"] == pytest.approx(p.expense.money * planned["step_time_s"] / p.step_time_s)
    code, out, _ = command(
        tmp_path, "simulate", "goodput", *_LINE, "--strategy", line, "--days=3", "--trials=5", "--json"
    )
    assert code == 0
    assert set(json.loads(out)["expense"]) == keys


def test_tokens_are_priced_and_asserted(tmp_path: Path) -> None:
    asked = (*_LINE, "--strategy", "tp=8,zero=1", "--tokens", "300B", "--rates", "grid=SWE")
    code, out, err = command(tmp_path, "predict", *asked, "--assert", "money<1USD, energy<20MWh, carbon<1t")
    assert code == 1
    assert err.splitlines() == ["failed: money<1USD: expense.money is 3.558e+04 (3.182e+04 to 4.216e+04 likely)"]
    assert "300B tokens: " in out
    assert "Our World in Data" in out
    code, _, err = command(tmp_path, "predict", *asked, "--assert", "energy<3min")
    assert (code, err.count("\n")) == (2, 1)


def test_an_interval_of_time_is_one_of_money() -> None:
    p = phalanx.predict(**_ASK, strategy="tp=8,zero=1")
    assert p.expense is not None
    assert p.step_time_low_s is not None
    low = p.step_time_low_s / p.step_time_s
    assert p.expense.money_low == pytest.approx(low * (p.expense.money or 0))
    assert p.expense.carbon_low_kg == pytest.approx(low * (p.expense.carbon_kg or 0))
    hour = expense_of("an hour", 8, rates_on(_H100), {"training": 8.0})
    assert expense_of_hours(hour, "a day", 24) == expense_of("a day", 192, rates_on(_H100), {"training": 192.0})
    unknown = with_interval(expense_of("an hour", 8, rates_on("MI300X-192GB"), {}), 0.5, 2)
    assert (unknown.money_low is None, unknown.energy_low_kwh) == (unknown.money is None, None)


def test_a_job_has_its_expense(tmp_path: Path) -> None:
    job = """model.preset = "llama3-8b"
    cluster = { preset = "dgx-h100", nodes = 2 }
    job = { global_batch = 64, seq = 8192, precision = { compute = "bfloat16" } }
    strategy = { dp = 2, tp = 8 }"""
    (tmp_path / "job.toml").write_text(job)
    words = ("plan", "job.toml", "--rates", "price=2,grid=SWE", "--json")
    code, out, err = command(tmp_path, *words, "--assert", "money<1USD, carbon<1kg")
    assert code == 0, err
    answer = json.loads(out)
    hours = 1e6 / answer["alternatives"][0]["tokens_per_s"] / 3600 * 16
    assert answer["expense"]["money"] == pytest.approx(2 * hours)
    assert answer["expense"]["energy_kwh"] > 0
    code, _, err = command(tmp_path, "plan", "job.toml", "--rates", "prize=2")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("objective", ["money", "energy", "carbon"])
def test_an_objective_differs_from_time_in_the_number_of_gpus(objective: str) -> None:
    plan = phalanx.plan(**_ASK, wishes=phalanx.Wishes(objective=objective, tokens="300B"))
    fastest = phalanx.plan(**_ASK, wishes=phalanx.Wishes(tokens="300B"))
    field = {"money": "money", "energy": "energy_kwh", "carbon": "carbon_kg"}[objective]
    costs = [getattr(offer.expense, field) for offer in plan.offers]
    assert plan.gpus == plan.offers[costs.index(min(costs))].gpus == 8
    assert plan.best.step_time_s > fastest.best.step_time_s
    assert getattr(plan.best.expense, field) < getattr(fastest.best.expense, field)


def test_a_chip_that_is_tried_has_its_own_price(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
        "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 "
        "--tensor-model-parallel-size 8 --vocab-size 50304\n"
    )
    words = ("plan", "--from", "run.sh", "--cluster", "dgx-h100", "--gpus", "8", "--try", "chip=a100", "--json")
    code, out, err = command(tmp_path, *words)
    assert code == 0, err
    found = json.loads(out)
    now, (other,) = found["now"], found["changes"]
    slower = other["step_time_s"] / now["step_time_s"]
    assert slower > 1
    assert other["expense"]["money"] / now["expense"]["money"] == pytest.approx(slower * 1.3 / 3.0)


def test_a_price_is_said_in_rates_where_there_is_no_option_for_it(tmp_path: Path) -> None:
    asked = "predict --model llama3-8b --cluster dgx-h100 --gpus 8 --batch 64 --seq 4096 --strategy tp=8 --price 2.5"
    assert "--price: no such option" in (said := error_of(tmp_path, asked))
    assert said.rstrip().endswith("write --rates price=2.5")
