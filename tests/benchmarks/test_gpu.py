"""`python -m benchmarks.gpu` without a GPU: parts with time limits, resumed; the cluster that it measures."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import typer
from support.fresh_process import in_fresh_process
from support.in_process_cli import phalanx

from benchmarks.gpu import examine as examination
from benchmarks.gpu import functions, generation, steps
from benchmarks.gpu.__main__ import APP
from benchmarks.gpu.examine import Part, examine, failed, parts
from benchmarks.gpu.sizes import SIZES, TINY
from benchmarks.gpu.steps import measured
from phalanx.cost.step.predict import predict
from phalanx.nn import functional
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.cluster_toml import cluster_from_toml
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.compiled_blocks import compile_blocks

command = partial(phalanx, command=typer.main.get_command(APP))
_ROW = {"family": "llama", "strategy": "dp=8", "precision": "fp8", "waits": 0, "failed": []}
_WRITES = f"import sys, json; json.dump([{_ROW!r}], open(sys.argv[1], 'w')); open('runs', 'a').write('x')"


def _given(monkeypatch: pytest.MonkeyPatch, gpus: int, *given: Part) -> None:
    monkeypatch.setattr(examination, "gpus_here", lambda: gpus)
    monkeypatch.setattr(examination, "parts", lambda folder, count: iter(given))


def _part(name: str, code: str, limit_s: float = 20, on_gpu: bool = True) -> Part:
    return Part(name, (sys.executable, "-c", code, "{out}"), limit_s, on_gpu)


def test_without_a_gpu_one_line_says_so_and_the_fake_steps_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _given(monkeypatch, 0, _part("fake", _WRITES, on_gpu=False), _part("measure", "assert 0"))
    folder = tmp_path / "gpu"
    code, out, err = command(tmp_path, "gpu")
    assert code == 0, err
    assert err.count("no GPU that torch can use") == 1
    assert "On a fake GPU 1 of 1 steps keep its rules; the host waits at most 0 times" in out
    assert "| llama | fp8 | 1 | 1 | 0 |" in out
    assert out == (folder / "gpu.md").read_text()
    assert list(json.loads((folder / "gpu.json").read_text())["parts"]) == ["fake"]
    assert command(tmp_path, "gpu")[0] == 0
    assert (folder / "runs").read_text() == "x"  # it was there already
    assert not (folder / "cluster.toml").exists()


def test_a_part_over_its_limit_or_with_an_error_is_named_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = _part("steps ours", "import time; time.sleep(9)", limit_s=0.2)
    broken = _part("parity dense dp=1", "raise SystemExit('error: out of luck')")
    _given(monkeypatch, 1, slow, broken)
    content = examine(tmp_path, lambda _: None)
    assert list(failed(content)) == [
        "steps ours: over its time limit (0 s)",
        "parity dense dp=1: failed (error: out of luck)",
    ]
    assert not list(tmp_path.glob("*.part.json"))
    advice = "import sys; sys.exit('a.b.Unsupported: no kernel\\n\\nSet VERBOSE=1 for more')"
    _given(monkeypatch, 1, _part("steps ours", advice))
    assert list(failed(examine(tmp_path, lambda _: None))) == ["steps ours: failed (a.b.Unsupported: no kernel)"]
    _given(monkeypatch, 1, _part("steps ours", "print('[]')"))
    words = Part("steps ours", (sys.executable, "-c", "print('[]')"), 20)
    _given(monkeypatch, 1, words)
    assert failed(examine(tmp_path, lambda _: None)) == []


def test_the_measured_cluster_is_written_as_a_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = preset("dgx-h100", 1)
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(asdict(cluster)))
    words = (sys.executable, "-c", f"print(open({str(file)!r}).read())")
    _given(monkeypatch, 8, Part("measure", words, 20))
    examine(tmp_path / "gpu", lambda _: None)
    assert cluster_from_toml(tmp_path / "gpu" / "cluster.toml") == cluster


def test_the_parts_of_one_and_of_several_gpus(tmp_path: Path) -> None:
    one, eight = ([p.name for p in parts(tmp_path, n)] for n in (1, 8))
    assert {"fake", "measure", "steps ours", "steps plain", "steps compiled", "parity dense dp=1"} <= set(one)
    assert set(one) < set(eight)
    assert {"parity dense tp=2,sp=1", "parity experts dp=2,ep=2"} <= set(one)  # of two ranks that share it
    assert [round(size.model.parameter_count / 1e9, 1) for size in SIZES] == [0.2, 1.5, 3.6, 8.0]


@pytest.mark.parametrize("way", ["ours", "plain"])
def test_a_step_is_measured(way: str) -> None:
    row: dict[str, Any] = measured(TINY, way)
    assert row["step_s"] > 0
    assert row["tokens_per_s"] == pytest.approx(2 * 64 / row["step_s"])


def _measured_with_graphs(way: str) -> float:
    with (
        patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
        patch.object(steps, "compile_blocks", partial(compile_blocks, backend="aot_eager")),
    ):
        return float(measured(TINY, way)["step_s"])


@pytest.mark.long  # in the suite tests/training/test_compiled_blocks.py holds that compiled steps are the eager ones
@pytest.mark.parametrize("way", ["ours-compiled", "fsdp"])
def test_a_compiled_step_is_measured(way: str) -> None:
    """With the compiler's graphs, run by torch's own kernels. They keep tensors until their process ends."""
    assert in_fresh_process(_measured_with_graphs, way) > 0


def test_generation_is_measured() -> None:
    row = generation.measured(TINY, prompt=16, new=3)
    assert row["weights_bytes"] == 2 * TINY.model.parameter_count
    assert row["tokens_per_s"] == pytest.approx(8 / row["token_s"])
    assert row["first_token_s"] > 0


def test_operations_on_the_device_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(row["error"] < row["bound"] / 2 for row in functions.rows(torch.device("cpu")))
    wrong = {"swiglu": (lambda gate, up: functional.swiglu(gate, up + gate.dtype.itemsize / 8), ((4, 4), (4, 4)))}
    monkeypatch.setattr(functions, "CASES", wrong)
    assert all(row["error"] > row["bound"] for row in functions.rows(torch.device("cpu")) if row["what"] == "swiglu")


def test_the_report_prices_the_step_on_the_measured_cluster() -> None:
    cluster = preset("dgx-h100", 1)
    step = {"size": "8B", "way": "ours", "tokens_per_s": 1e4, "model_flops_per_s": 494.5e12, "step_s": 0.4}
    rows = [step | {"predicted_peak_bytes": 2**30}, step | {"way": "plain"}]
    wrong = {"what": "swiglu", "dtype": "float32", "error": 1.0, "bound": 1e-4}
    done = {"state": "done", "error": None, "seconds": 1.0}
    content = {"machine": [], "cluster": asdict(cluster), "parts": {}}
    content["parts"]["steps ours"] = done | {"result": rows}
    content["parts"]["functions"] = done | {"result": [wrong]}
    text_row = {"size": "8B", "prompts": 8, "first_token_s": 0.1, "token_s": 0.01, "tokens_per_s": 800.0}
    content["parts"]["generation"] = done | {"result": [text_row]}
    report = examination.as_text(content)
    size = next(size for size in SIZES if size.name == "8B")
    priced = predict(size.model, cluster, size.job, Strategy(micro_batch=size.micro_batch)).step_time_s
    share = 494.5e12 / cluster.device.dense_flops_per_s["bfloat16"]
    assert f"| 8B | ours | 10,000 | 494.5 | {share:.1%} | 400.0 | {priced * 1e3:.1f} |  | 1.00 |" in report
    assert f"| 8B | plain | 10,000 | 494.5 | {share:.1%} | 400.0 |  |  |  |" in report
    assert "| 8B | 8 | 100.0 | 10.00 | 800 |" in report
    assert "swiglu in float32: off by 1.0e+00, more than 1e-04" in report


def test_parts_without_time_are_left_for_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _part("functions", "open('ran', 'a').write('x'); import sys; open(sys.argv[1], 'w').write('[]')")
    _given(monkeypatch, 1, first, _part("steps ours", "print('[]')"))
    monkeypatch.setattr(examination, "WHOLE_S", 1)
    assert examine(tmp_path, lambda _: None)["parts"]["steps ours"]["state"] == "left for the next call"
    monkeypatch.setattr(examination, "WHOLE_S", 100)
    content = examine(tmp_path, lambda _: None)
    assert [p["state"] for p in content["parts"].values()] == ["done", "done"]
    assert (tmp_path / "ran").read_text() == "x"
