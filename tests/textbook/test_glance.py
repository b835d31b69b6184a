"""The table at a glance: its formulas are the bytes that the ledger counts for a strategy of each kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.in_process_cli import json_of, phalanx

from phalanx.planning.lookup import model_named
from phalanx.planning.tables import textbook
from phalanx.textbook.glance import WAYS

_LAYERS = 32
_OF = "tables comm --cluster dgx-h100 --gpus 8 --json --model"


def _value(formula: str, **symbols: float) -> float:
    """Evaluate `16 b s h (t-1)/t`: what stands side by side is multiplied."""
    return float(eval(re.sub(r"(?<=[\w)]) (?=[\w(])", "*", formula.split(": ")[-1]), dict(symbols)))  # noqa: S307


@pytest.mark.parametrize(
    ("name", "question", "axis", "operations", "times"),
    [
        ("tp", "llama-7b --seq 2048 --strategy tp=8", "tp", "layers", _LAYERS),
        ("tp and sp", "llama-7b --seq 2048 --strategy tp=8,sp=1", "tp", "layers", _LAYERS),
        ("cp, ring", "llama3-8b --seq 8192 --strategy cp=8", "ring", "", _LAYERS),
        ("pp", "llama-7b --seq 2048 --strategy pp=8", "pp", "inner", 1),
        ("ep", "mixtral-8x7b --seq 4096 --strategy dp=8,ep=8,zero=1", "ep", "", _LAYERS),
    ],
)
def test_bytes_of_activations_are_the_ledgers(
    tmp_path: Path, name: str, question: str, axis: str, operations: str, times: int
) -> None:
    """Micro-batches of one sequence: 4 of them, or with dp=8 one."""
    micro_batches = 1 if "dp=8" in question else 4
    batch = 8 if "dp=8" in question else 4
    rows = json_of(tmp_path, f"{_OF} {question} --batch {batch}")["tables"][0]["rows"]
    sent = sum(
        row["sent_bytes"]
        for row in rows
        if row["axis"] == axis and (operations in row["of"] or operations in row["by"])
    )
    model, seq = model_named(question.split()[0])[0], int(question.split()[2])
    symbols = {"b": 1, "s": seq, "h": model.hidden, "g": model.kv_heads * model.head_dim, "k": 2}
    expected = _value(WAYS[name].volume, **symbols, **dict.fromkeys("tcpe", 8)) * times * micro_batches
    assert sent == pytest.approx(expected, rel=1e-6)


def test_bytes_of_parameters_are_those_of_their_tables(tmp_path: Path) -> None:
    row = json_of(tmp_path, "tables comm --params 7B --json")["tables"][0]["rows"][3]
    symbols = {"N": 7e9, "P": row["p"]}
    assert row["p"] == 8
    for name in ("DDP", "ZeRO-1", "ZeRO-2"):
        assert _value(WAYS[name].volume, **symbols) == pytest.approx(row["all_reduce_sent_GB"] * 1e9)
    assert _value(WAYS["ZeRO-3, FSDP"].volume, **symbols) == pytest.approx(row["zero_3_sent_GB"] * 1e9)
    for level, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP")):
        assert _value(WAYS[name].state, **symbols) == pytest.approx(textbook.zero_bytes(7e9, level, 8))


def test_the_command_has_every_way(tmp_path: Path) -> None:
    said = phalanx(tmp_path, "learn ways")[1]
    assert all(f" {way.name} " in said and way.volume in said for way in WAYS.values())
