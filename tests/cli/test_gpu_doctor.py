"""`phalanx doctor --gpu` without a GPU: parts with time limits, resumed; its JSON as a cluster."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import phalanx

from phalanx.commands import gpu_doctor
from phalanx.commands.gpu_doctor import Part, examine, failed, parts
from phalanx.spec.cluster.presets import preset
from phalanx.verify.on_gpu.sizes import SIZES, TINY
from phalanx.verify.on_gpu.steps import measured

_ROW = {"family": "llama", "strategy": "dp=8", "waits": 0, "failed": []}
_WRITES = f"import sys, json; json.dump([{_ROW!r}], open(sys.argv[1], 'w')); open('runs', 'a').write('x')"


def _given(monkeypatch: pytest.MonkeyPatch, gpus: int, *given: Part) -> None:
    monkeypatch.setattr(gpu_doctor, "gpus_here", lambda: gpus)
    monkeypatch.setattr(gpu_doctor, "parts", lambda folder, count: iter(given))


def _part(name: str, code: str, limit_s: float = 20, on_gpu: bool = True) -> Part:
    return Part(name, (sys.executable, "-c", code, "{out}"), limit_s, on_gpu)


def test_without_a_gpu_one_line_says_so_and_the_imagined_part_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _given(monkeypatch, 0, _part("imagined", _WRITES, on_gpu=False), _part("measure", "assert 0"))
    folder = tmp_path / "gpu"
    code, out, err = phalanx(tmp_path, "doctor", "--gpu", "--out", "gpu")
    assert code == 0
    assert err.count("no GPU that torch can use") == 1
    assert "On an imagined GPU 1 of 1 steps keep its rules; the host waits at most 0 times" in out
    assert out == (folder / "gpu.md").read_text()
    assert list(json.loads((folder / "gpu.json").read_text())["parts"]) == ["imagined"]
    assert phalanx(tmp_path, "doctor", "--gpu", "--out", "gpu")[0] == 0
    assert (folder / "runs").read_text() == "x"  # it was there already
    code, _, err = phalanx(tmp_path, "measure", "--from", "gpu/gpu.json")
    assert code == 2
    assert "holds no measured cluster: it found no GPU" in err


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
    _given(monkeypatch, 1, _part("steps ours", "print('[]')"))
    words = Part("steps ours", (sys.executable, "-c", "print('[]')"), 20)
    _given(monkeypatch, 1, words)
    assert failed(examine(tmp_path, lambda _: None)) == []


def test_its_json_is_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = preset("dgx-h100", 1)
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(asdict(cluster)))
    words = (sys.executable, "-c", f"print(open({str(file)!r}).read())")
    _given(monkeypatch, 8, Part("measure", words, 20))
    examine(tmp_path / "gpu", lambda _: None)
    code, out, err = phalanx(tmp_path, "measure", "--from", "gpu/gpu.json", "--out", "there.toml", "--json")
    assert code == 0, err
    assert json.loads(out) == json.loads(json.dumps(asdict(cluster)))
    assert (tmp_path / "there.toml").exists()
    code, _, err = phalanx(tmp_path, "measure", "--from", "cluster.json")
    assert code == 2
    assert "is not what phalanx doctor --gpu wrote" in err
    code, _, err = phalanx(tmp_path, "doctor", "--gpu")
    assert (code, "--out: is missing" in err) == (2, True)


def test_the_parts_of_one_and_of_several_gpus(tmp_path: Path) -> None:
    one, eight = ([p.name for p in parts(tmp_path, n)] for n in (1, 8))
    assert {"imagined", "measure", "steps ours", "steps plain", "steps compiled", "parity dense dp=1"} <= set(one)
    assert set(one) < set(eight)
    assert not any("2" in name for name in one if name.startswith("parity"))
    assert [round(size.model.parameter_count / 1e9, 1) for size in SIZES] == [0.2, 1.5, 3.6, 8.0]


@pytest.mark.parametrize("way", ["ours", "plain"])
def test_a_step_is_measured(way: str) -> None:
    row: dict[str, Any] = measured(TINY, way)
    assert row["step_s"] > 0
    assert row["tokens_per_s"] == pytest.approx(2 * 64 / row["step_s"])
