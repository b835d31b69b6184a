"""`phalanx check machine`: what is there is ok, what is missing is named with its mend."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from support.in_process_cli import phalanx

from phalanx.answers.machine import inventory


def test_here_everything_needed_is_there(tmp_path: Path) -> None:
    code, out, _ = phalanx(tmp_path, "check machine --json")
    checks = {row["what"]: row for row in json.loads(out)}
    assert code == 0
    assert {"Python", "cores", "memory", "shared memory", "torch", "Gloo", "GPUs", "measurements kept"} <= set(checks)
    assert all(row["good"] for row in checks.values())


def test_what_is_missing_is_named_with_its_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(inventory, "_SHARED", tmp_path / "none")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    code, out, _ = phalanx(tmp_path, "check machine")
    assert code == 1
    assert out.count("MISSING") == 2
    assert "torch: pip install '.[train]'" in out
    assert "no /dev/shm" in out


@pytest.mark.parametrize(
    ("driver", "cuda", "mend"),
    [("nvidia-smi", None, "a CUDA build"), ("nvidia-smi", "13.0", "torch.cuda.init"), (None, None, "")],
)
def test_a_driver_without_a_build_for_it(
    driver: str | None, cuda: str | None, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: driver)
    (checked,) = inventory._gpus(lambda: False, cuda)
    assert checked.good == (driver is None)
    assert mend in checked.remedy


@pytest.mark.parametrize("nccl", [False, True])
def test_gpus_are_named_and_lack_nothing_but_nccl(nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda i: f"H10{i}")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: nccl)
    gpus, library = inventory._gpus(lambda: True, "13.0")
    assert (gpus.state, gpus.good, library.good) == ("H100, H101", True, nccl)
    assert ("not" in library.state) != nccl
