"""Golden values of docs/handbook.md that no other test of the tables holds."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from command import phalanx

from phalanx.cost.pipeline import Costs, price
from phalanx.plan import textbook
from phalanx.schedule.pipeline import build


@pytest.mark.parametrize(
    ("billions", "gb", "cards"), [(7, 112, 2), (13, 208, 3), (65, 1040, 13), (175, 2800, 35), (540, 8640, 108)]
)
def test_state_and_cards(billions, gb, cards):
    state = textbook.zero_bytes(billions * 1e9, 0, 1)
    assert state == pytest.approx(gb * 1e9)
    assert -(-state // 80e9) == cards


def test_plain_ddp_ends_at_5b_on_80_gb():
    assert [card * 1e9 / 16 for card in (40, 80)] == [2.5e9, 5e9]
    assert textbook.state(5e9, (1,), 16, 80e9).rows[0][-1] == "ZeRO-0"
    assert textbook.state(5.1e9, (1,), 16, 80e9).rows[0][-1] == "none"


@pytest.mark.parametrize(
    ("model", "parameters", "active"),
    [("gpt3-175b", 174_604_259_328, 174_604_259_328), ("mixtral-8x7b", 46_702_792_704, 12_879_925_248)],
)
def test_parameters(tmp_path, model, parameters, active):
    found = json.loads(phalanx(tmp_path, "models", model, "--json")[1])
    assert (found["parameters"], found["active"]) == (parameters, active)


def test_tensor_parallel_operations_of_gpt3(tmp_path):
    words = ("--model", "gpt3-175b", "--cluster", "dgx-a100", "--gpus", "8", "--batch", "1", "--seq", "2048")
    (sheet,) = json.loads(phalanx(tmp_path, "comm", *words, "--strategy", "tp=8", "--json")[1])
    (row,) = sheet["rows"]
    assert row["times"] == 4 * 96
    assert row["sent_bytes"] == pytest.approx(33.82e9, rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "bubble"),
    [(4, 32, (3, 35)), (4, 4, (3, 7)), (4, 16, (3, 19)), (4, 64, (3, 67)), (8, 64, (7, 71)), (8, 32, (7, 39))],
)
def test_bubbles(ranks, micro_batches, bubble):
    found = price(build("1f1b", ranks, micro_batches), Costs.equal(ranks)).bubble_fraction
    assert found == pytest.approx(float(Fraction(*bubble)))
