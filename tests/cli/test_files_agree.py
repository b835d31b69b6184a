"""All commands about one file of a user agree: layout, step time, memory, bytes, and what is exported of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cli.test_one_question import _agree as all_agree
from frameworks.test_read import data
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import json_of, phalanx
from support.sizes import examples

from phalanx.spec.strategy.spec import parse

_FILLED = (
    (),
    ("--model", "llama3-8b"),
    ("--model", "llama3-8b", "--seq", "2048"),
    ("--model", "llama3-8b", "--seq", "2048", "--batch", "1024"),
    ("--model", "mixtral-8x7b", "--seq", "2048"),
)
"""What a file may leave open, in the order in which it is filled in."""


def asked_about(here: Path, row: dict[str, Any]) -> list[str] | None:
    """Return the words that price a stored configuration, written to c.json; None where it is refused."""
    (here / "c.json").write_text(json.dumps(row["config"]))
    degrees = 1
    for name in ("tp", "pp", "cp", "dp"):
        degrees *= row["expect"].get(name) or 1
    words = ["c.json", "--cluster", "dgx-h100", "--gpus", str(row["world"] or max(8, degrees))]
    for more in _FILLED:
        code, out, err = phalanx(here, "predict", *words, *more, "--json")
        if code != 2 and json.loads(out)["step_time_s"]:
            return [*words, *more]
    assert err.startswith("error: ")
    return None


def agree(here: Path, row: dict[str, Any]) -> bool:
    """Hold all commands about a stored configuration together; return whether it has a price."""
    words = asked_about(here, row)
    if words is None:
        return False
    all_agree(here, words)
    predicted = json_of(here, "predict", *words, "--json")
    code, out, err = phalanx(here, "read", *words, "--out", "plan.json", "--json")
    assert code in (0, 1), err
    read = json.loads(out)
    strategy = parse(predicted["question"]["strategy"])
    stated = {name: value for name, value in read["strategy"].items() if value is not None}
    for name in ("tp", "pp", "cp", "zero", "micro_batch"):
        assert stated.get(name, strategy.get(name, 1)) == strategy.get(name, stated.get(name, 1)), (name, strategy)
    _same(predicted, json_of(here, "predict", "plan.json", "--json"))
    return True


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("step_time_s", "memory_bytes"):
        assert abs(one[name] - other[name]) <= 1e-9 * one[name], name
    assert one["question"]["strategy"] == other["question"]["strategy"]


@examples(1, 500)
def test_all_commands_agree_about_a_file(tmp_path: Path, examples: int) -> None:
    rows, priced = data()["configurations"], []

    def hold(row: dict[str, Any]) -> None:
        priced.append(agree(tmp_path, row))

    if examples < 500:
        settings(max_examples=examples, deadline=None)(given(st.sampled_from(rows))(hold))()
    else:
        for row in rows:
            hold(row)
    assert priced
    assert any(priced) or examples < 500
