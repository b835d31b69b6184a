"""Phalanx from Python: the public names, answers equal to the commands', results that notebooks and pandas take."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from types import ModuleType

import pytest
from support.in_process_cli import phalanx

import phalanx as package
from phalanx import api

QUESTION = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "batch": 64, "seq": 8192}
OPTIONS = [word for name, value in QUESTION.items() for word in (f"--{name}", str(value))]
NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def test_the_public_names() -> None:
    """These, and no others: what is not here may change."""
    assert api.__all__ == [
        "CollectiveProof", "Comparison", "Explanation", "InputError", "Page", "PlanResult", "Prediction", "Table",
        "Verification", "compare", "explain", "memory", "plan", "predict", "prove", "roofline", "scaling",
        "table_of_collectives", "traffic", "verify",
    ]  # fmt: skip
    for name in api.__all__:
        assert inspect.getdoc(getattr(api, name)), name
    for name in ("parallelize", "observe"):
        assert callable(getattr(package, name))


def test_answers_are_those_of_the_commands(tmp_path: Path) -> None:
    found = api.plan(**QUESTION)  # type: ignore[arg-type]
    said = json.loads(phalanx(tmp_path, "plan", *OPTIONS, "--json")[1])
    assert found.strategy == said["best"]["strategy"]
    assert found.best.seconds == pytest.approx(said["best"]["step_time_s"])
    assert [p.strategy for p in found.front] == [row["strategy"] for row in said["front"]]
    assert found.save(tmp_path / "mine.json").read_text() == (tmp_path / "plan.json").read_text()
    line = "tp=8,zero=1"
    predicted = api.predict(**QUESTION, strategy=line)  # type: ignore[arg-type]
    said = json.loads(phalanx(tmp_path, "predict", *OPTIONS, "--strategy", line, "--json")[1])
    assert predicted.seconds == pytest.approx(said["step_time_s"])
    assert predicted.memory_bytes == pytest.approx(said["memory_bytes"]["reserved"])
    explained = api.explain(**QUESTION, strategy=line)  # type: ignore[arg-type]
    assert explained.prediction.seconds == predicted.seconds
    again = api.predict(source=tmp_path / "plan.json")
    assert again.seconds == pytest.approx(found.best.seconds)


def test_a_prediction_adds_up() -> None:
    p = api.predict(**QUESTION, strategy="dp=2,tp=4,pp=2,zero=1")  # type: ignore[arg-type]
    assert sum(p.terms_s.values()) == pytest.approx(p.seconds)
    assert p.record()["matmul_s"] == p.terms_s["matmul"]
    assert p.fits == (p.memory_bytes <= p.usable_bytes)
    assert "<table>" in p._repr_html_()
    assert p.plot().html.startswith("<!doctype html>")


def test_wrong_input_is_the_line_that_the_command_prints() -> None:
    with pytest.raises(api.InputError, match="did you mean dgx-h100"):
        api.predict(**{**QUESTION, "cluster": "dgx-h10"}, strategy="tp=8")  # type: ignore[arg-type]
    assert issubclass(api.InputError, ValueError)
    with pytest.raises(api.InputError, match="is not a share of the memory"):
        api.plan(**QUESTION, headroom=2)  # type: ignore[arg-type]


def test_tables_are_those_of_the_commands(tmp_path: Path) -> None:
    tables = api.memory("7B")
    said = json.loads(phalanx(tmp_path, "memory", "--params", "7B", "--json")[1])
    assert [list(t.records) for t in tables] == [sheet["rows"] for sheet in said]
    assert "<table>" in tables[0]._repr_html_()
    strong, weak = api.scaling("llama3-8b", "dgx-h100", [8, 16], 64, 8192)
    assert [row["gpus"] for row in strong.records] == [row["gpus"] for row in weak.records] == [8, 16]


def test_pandas_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table = api.memory(1e9)[0]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        table.to_pandas()

    class Frame:
        @staticmethod
        def from_records(rows: list[dict[str, object]]) -> list[dict[str, object]]:
            return rows

    pandas = ModuleType("pandas")
    pandas.DataFrame = Frame  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert table.to_pandas() == list(table.records)


@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    """Cell by cell, in one namespace; what a cell ends with can be shown."""
    names: dict[str, object] = {}
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    assert cells
    with chdir(tmp_path):
        for cell in cells:
            lines = "".join(cell["source"])
            exec(compile(lines, notebook.name, "exec"), names)  # noqa: S102


def test_the_package_alone_is_enough() -> None:
    code = "import phalanx, sys; print(phalanx.api.plan.__name__, 'torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "plan False\n"
    )


def test_scaling_searches_as_plan_does():
    """A table's row is the plan of the same question: no more of the memory is taken for granted."""
    asked = dict(model="llama2-7b", cluster="dgx-a100-40gb", batch=64, seq=4096)
    strong, weak = api.scaling(**asked, gpus=[8])
    best = api.plan(**asked, gpus=8).ranked[0]
    unlisted = re.sub(",layers=[^,]*", "", best.strategy)  # a plan lists the blocks of its chunks
    for row in (strong.records[0], weak.records[0]):
        assert (row["strategy"], row["step_s"]) == (unlisted, pytest.approx(best.seconds, rel=1e-9))
