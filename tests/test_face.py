"""Phalanx from Python: the public names, answers equal to the commands', objects that notebooks and pandas take."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from support.in_process_cli import phalanx as command

import phalanx
from phalanx import answers
from phalanx.answers.question.query import Query, QueryFields
from phalanx.planning.lookup import cluster_named, model_named
from phalanx.report.view import _VIEWS

QUESTION = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "batch": 64, "seq": 8192}
OPTIONS = [word for name, value in QUESTION.items() for word in (f"--{name}", str(value))]
EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_public_names() -> None:
    """These, and no others: what is not here may change."""
    assert sorted(phalanx.__all__) == [
        "ClusterSpec", "InputError", "Job", "ModelSpec", "Plan", "Query", "Strategy", "Wishes", "__version__",
        "collectives", "compare", "explain", "export", "goodput", "lint", "memory", "observe", "parallelize", "plan",
        "predict", "propose_tp_plan", "prove", "read", "roofline", "scaling", "serve_plan", "simulate", "traffic",
        "train", "ui", "verify",
    ]  # fmt: skip
    assert dir(phalanx) == sorted(phalanx.__all__)
    for name in set(phalanx.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(phalanx, name)), name


def test_the_fields_of_a_query_are_its_keyword_arguments() -> None:
    assert set(QueryFields.__annotations__) == set(Query.__dataclass_fields__) - {"source"}


def test_answers_are_those_of_the_commands(tmp_path: Path) -> None:
    found = phalanx.plan(**QUESTION)
    said = json.loads(command(tmp_path, "plan", *OPTIONS, "--json")[1])
    mine = found.to_dict()
    assert mine | {"search_s": 0} == said | {"search_s": 0}
    assert found.save(tmp_path / "mine.json").read_text() == (tmp_path / "plan.json").read_text()
    line = "tp=8,zero=1"
    predicted = phalanx.predict(**QUESTION, strategy=line)
    assert predicted.to_dict() == json.loads(command(tmp_path, "predict", *OPTIONS, "--strategy", line, "--json")[1])
    assert phalanx.explain(**QUESTION, strategy=line).prediction == predicted
    again = phalanx.predict(tmp_path / "plan.json")
    assert again.step_time_s == pytest.approx(found.best.step_time_s)
    assert phalanx.lint(tmp_path / "plan.json").findings == phalanx.lint(**QUESTION, strategy=found.strategy).findings


@pytest.mark.parametrize("name", ["explain", "lint", "memory", "traffic", "roofline"])
def test_an_answer_is_what_its_command_prints(name: str, tmp_path: Path) -> None:
    answer = getattr(phalanx, name)(**QUESTION, strategy="tp=8,zero=1")
    group = ("tables",) if name in ("memory", "traffic", "roofline") else ()
    words = (*group, "comm" if name == "traffic" else name, *OPTIONS, "--strategy", "tp=8,zero=1", "--json")
    assert json.loads(json.dumps(answer.to_dict())) == json.loads(command(tmp_path, *words)[1])
    assert answer._repr_html_().startswith("<")


def test_a_comparison_is_what_its_command_prints(tmp_path: Path) -> None:
    lines = ("tp=8,zero=1", "tp=4,zero=1")
    sides = phalanx.compare(*lines, **QUESTION)
    printed = json.loads(command(tmp_path, "compare", *lines, *OPTIONS, "--json")[1])
    assert json.loads(json.dumps(sides.to_dict())) == printed
    assert [row["step_time_s"] for row in sides.records()] == [side.step_time_s for side in sides.sides]


def test_a_collective_is_proved_and_compared() -> None:
    proof = phalanx.prove("all_reduce", "ring", ranks=8)
    assert (proof.rounds, proof.sent_share) == (14, 1.75)
    assert "14 rounds, 112 messages, at most 1.75 of the buffer" in proof._repr_html_()
    table = phalanx.collectives("all_reduce", "100MB", ranks=64)
    assert table.records()[0]["algorithm"] == "hierarchical"


def test_every_answer_has_a_view() -> None:
    for file in Path(answers.__path__[0]).glob("*.py"):
        for name in re.findall(r"^class (\w+)\(Answer\)", file.read_text(), re.MULTILINE):
            module, _, function = _VIEWS[name].partition(":")
            assert callable(getattr(import_module(module), function or "view")), name


def test_objects_in_and_objects_out() -> None:
    """A name, or what it names: the same answer, with Strategy and ModelSpec in it."""
    named = phalanx.predict(**QUESTION, strategy="tp=8,zero=1")
    given = phalanx.predict(
        model=model_named("llama3-8b")[0],
        cluster=cluster_named("dgx-h100")(16),
        gpus=16,
        batch=64,
        seq=8192,
        strategy=phalanx.Strategy(dp=2, tp=8, zero=1),
    )
    assert given.terms_s == named.terms_s
    assert isinstance(named.strategy, phalanx.Strategy)
    found = phalanx.plan(**QUESTION)
    assert isinstance(found.model, phalanx.ModelSpec)
    assert isinstance(found.plan, phalanx.Plan)
    assert phalanx.predict(**QUESTION, strategy=found.strategy, options=str(found.options)).fits
    question = Query(**QUESTION, strategy="tp=8,zero=1")
    assert phalanx.predict(question).terms_s == named.terms_s
    assert phalanx.predict(question, strategy="tp=4,zero=1").terms_s != named.terms_s


def test_a_prediction_adds_up() -> None:
    p = phalanx.predict(**QUESTION, strategy="dp=2,tp=4,pp=2,zero=1")
    assert sum(p.terms_s.values()) == pytest.approx(p.step_time_s)
    assert p.records()[0]["matmul_s"] == p.terms_s["matmul"]
    assert p.fits == (p.memory_bytes <= p.usable_bytes)
    assert "<table>" in p._repr_html_()
    assert p.plot().html.startswith("<!doctype html>")


def test_wrong_input_names_the_field_and_no_option() -> None:
    with pytest.raises(phalanx.InputError, match="did you mean dgx-h100"):
        phalanx.predict(**{**QUESTION, "cluster": "dgx-h10"}, strategy="tp=8")
    assert issubclass(phalanx.InputError, ValueError)
    with pytest.raises(phalanx.InputError, match=r"^gpus = 0: must be at least 1$"):
        phalanx.predict(**{**QUESTION, "gpus": 0}, strategy="tp=8")
    with pytest.raises(phalanx.InputError, match="is not a share of the memory"):
        phalanx.Wishes(headroom=2)


def test_tables_are_those_of_the_commands(tmp_path: Path) -> None:
    from phalanx.answers.tables import state_memory

    tables = state_memory("7B")
    printed = json.loads(command(tmp_path, "tables memory --params 7B --json")[1])
    assert tables.to_dict()["tables"] == printed["tables"]
    assert "<table>" in tables._repr_html_()
    strong, weak, *_ = phalanx.scaling("llama3-8b", "dgx-h100", [8, 16], 64, 8192).tables
    assert [row["gpus"] for row in strong.records()] == [row["gpus"] for row in weak.records()] == [8, 16]


def test_pandas_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = phalanx.lint(**QUESTION, strategy="tp=16")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        answer.to_pandas()

    class Frame:
        @staticmethod
        def from_records(rows: list[dict[str, object]]) -> list[dict[str, object]]:
            return rows

    pandas = ModuleType("pandas")
    pandas.DataFrame = Frame  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert answer.to_pandas() == answer.records() != []


@pytest.mark.parametrize("notebook", sorted((EXAMPLES / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    """Cell by cell, in one namespace; what a cell ends with can be shown."""
    names: dict[str, object] = {}
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    assert cells
    with chdir(tmp_path):
        for cell in cells:
            lines = "".join(cell["source"])
            exec(compile(lines, notebook.name, "exec"), names)  # noqa: S102
            last = eval(lines.splitlines()[-1], names)  # noqa: S307
            assert not hasattr(last, "_repr_html_") or last._repr_html_()


@pytest.mark.parametrize("name", ["plan_my_cluster", "price_my_config", "verify_before_you_pay"])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_planning_needs_no_torch() -> None:
    code = (
        "import phalanx, sys; p = phalanx.predict(model='gpt2', cluster='dgx-h100', gpus=8, batch=8, seq=1024); "
        "p.plot(); p._repr_html_(); print(p.fits, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_scaling_searches_as_plan_does() -> None:
    """A table's row is the plan of the same question: no more of the memory is taken for granted."""
    strong, weak, *_ = phalanx.scaling("llama2-7b", "dgx-a100-40gb", [8], 64, 4096).tables
    best = phalanx.plan(model="llama2-7b", cluster="dgx-a100-40gb", batch=64, seq=4096, gpus=8).best
    unlisted = re.sub(",layers=[^,]*", "", str(best.strategy))  # a plan lists the blocks of its chunks
    for row in (strong.records()[0], weak.records()[0]):
        assert (row["strategy"], row["step_s"]) == (unlisted, pytest.approx(best.step_time_s, rel=1e-9))


def test_options_are_a_line_or_a_table() -> None:
    def memory_of(options: str | dict[str, object]) -> float:
        return phalanx.predict(**QUESTION, strategy="zero=1", options=options).memory_bytes  # type: ignore[arg-type]

    line, table = memory_of("first_moment=bfloat16,optimizer_offload=0.5"), {"first_moment": "bfloat16"}
    assert memory_of({**table, "optimizer_offload": 0.5}) == line != memory_of(table)
