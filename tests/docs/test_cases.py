"""The tables of docs/cases.md are what `phalanx cases` answers, and its prose is what the tables say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import case_tables
from support.in_process_cli import phalanx

from phalanx.cost.ledger.flops import model_flops
from phalanx.planning.search import strategy_columns
from phalanx.spec.strategy.spec import Strategy
from phalanx.textbook.cases.case_studies import CASES, question


@pytest.mark.long
@pytest.mark.parametrize("command", list(case_tables.HEADS))
def test_the_page_has_the_commands_answers(tmp_path: Path, command: str) -> None:
    code, out, err = phalanx(tmp_path, *command.split(), "--json")
    assert code == 0, err
    rows = json.loads(out)[0]["rows"]
    assert case_tables.shown(command) == case_tables.table(command, rows)
    if command == "cases --rules":
        gpt3 = next(row for row in rows if row["rule"] == "beyond 100B: 3D")
        assert round(100 * gpt3["costs"]) == 19
        assert gpt3["because"] == "matrix products 6% less, the bubble 5% less"


def _cells(command: str, row: str) -> list[str]:
    (found,) = (line for line in case_tables.shown(command) if line.startswith(f"| {row}"))
    return [cell.strip() for cell in found.split("|")[1:-1]]


def _seconds(cell: str) -> float:
    return float(cell.removesuffix(" s"))


def test_the_prose_reads_the_tables() -> None:
    """6 to 18 % faster; 113.3 GiB; 47 % longer."""
    faster = []
    for name in ("LLaMA 7B", "LLaMA 13B", "LLaMA 33B", "LLaMA 65B", "LLaMA 2 70B"):
        cells = _cells("cases", name)
        faster.append(1 - _seconds(cells[5]) / _seconds(cells[2]))
    assert (round(100 * min(faster)), round(100 * max(faster))) == (6, 18)
    assert "needs 113.3 of" in _cells("cases", "DeepSeek-V2")[-1]
    assert _cells("cases --rules", "a layer does not fit")[-1] == "47 %"


def test_the_prose_about_llama_3() -> None:
    """Steps at the published MFU, 43 % and, at 131072 tokens, 38 %; predictions stand in the table."""
    steps = []
    for name, mfu in (("Llama 3 405B", 43), ("Llama 3 405B, 128 k", 38)):
        case = next(c for c in CASES if c.name == name)
        p = question(case)
        flops = float(model_flops(p.shape, p.layout(strategy_columns.of([Strategy(dp=case.batch)])))[0])
        predicted = _seconds(_cells("cases", f"{name}, {'8,192' if mfu == 43 else '16,384'}")[3])
        steps.append((flops / (case.gpus * 989e12 * mfu / 100), predicted))
    (short, at_8k), (long, at_128k) = steps
    assert short == pytest.approx(12.6, abs=0.05)
    assert 100 * (at_8k / short - 1) == pytest.approx(30, abs=0.5)
    assert long == pytest.approx(15.4, abs=0.05)
    assert 100 * (1 - at_128k / long) == pytest.approx(30, abs=0.5)
    assert at_128k == pytest.approx(0.99 * 11.0, rel=0.005)  # 1 % below
