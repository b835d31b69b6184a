"""What this machine is, how its measurement describes it, and which measurement is used again."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.fitted_cluster import laptop
from support.fuzz import campaign

from phalanx.measure import this_machine
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.files.job_file import build


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files stand for those of the system: two processors of one model, two GPUs, no limit."""
    monkeypatch.setattr(this_machine, "Path", lambda name: tmp_path / name.strip("/"))
    monkeypatch.setattr(this_machine.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}.__getitem__)
    monkeypatch.setattr(this_machine, "_gpu_memory", lambda: 80 * 10**9)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, text in (
        ("proc/cpuinfo", "model name : A: fast CPU\nflags : x\nmodel name : A: fast CPU\n"),
        ("proc/driver/nvidia/gpus/0/information", "Model: \t\t An H100\nIRQ: 1\n"),
        ("proc/driver/nvidia/gpus/1/information", "Model: \t\t An H100\nIRQ: 2\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_machine_is_its_processors_gpus_and_memory(system: Path) -> None:
    found = this_machine.fingerprint()
    assert (found["cpu"], found["memory_bytes"]) == (["A: fast CPU"], 2**32)
    assert [name.partition("\t")[0] for name in found["gpus"]] == ["Model: "] * 2
    (system / "proc/cpuinfo").unlink()
    assert this_machine.fingerprint()["cpu"] == [os.uname().machine]


@pytest.mark.parametrize(("visible", "gpus"), [("0,1", 2), ("1", 1), ("", 0), ("-1", 0), (" 0 ,-1", 1)])
def test_gpus_that_are_hidden_are_not_there(
    system: Path, monkeypatch: pytest.MonkeyPatch, visible: str, gpus: int
) -> None:
    """Ranks are as many, or without any one a core; a rank's memory is its GPU's, or the machine's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(this_machine.fingerprint()["gpus"]) == gpus
    assert this_machine.default_ranks() == (gpus or this_machine.cores())
    assert this_machine.rank_memory_bytes() == (80 * 10**9 if gpus else 2**32)


@pytest.mark.parametrize(("limit", "memory"), [("max\n", 2**32), ("1048576\n", 2**20), (f"{2**40}", 2**32)])
def test_the_memory_is_the_containers_where_that_has_less(system: Path, limit: str, memory: int) -> None:
    file = system / "sys/fs/cgroup/memory.max"
    file.parent.mkdir(parents=True)
    file.write_text(limit)
    assert this_machine.fingerprint()["memory_bytes"] == memory


def _described(gpus: int, ranks: int, **rows: Any) -> ClusterSpec:
    one = laptop(max(ranks, 2))
    kernels = [asdict(row) for row in one.kernels]
    kernels[-1]["forward"]["per_narrow_flop"] = {"float8": 1e-15}
    fits = [asdict(fit) for fit in one.collectives] if ranks > 1 else []
    machine = {"gpus": ["Model: \t An H100"] * gpus, "cpu": ["A CPU"], "memory_bytes": 2**34}
    tables = this_machine.describe(machine, ranks, "float32", {"kernels": kernels, "collectives": fits, **rows})
    return build(ClusterSpec, tables, "cluster")


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_measurement_describes_a_rank_of_its_machine(system: Path, gpus: int, ranks: int) -> None:
    """A GPU has its own memory, a CPU's ranks share; a rate is the inverse of the seconds that were measured."""
    figures = [{"name": "gamma", "value": 3e-12, "unit": "s/B", "low": 1e-12, "high": 4e-12, "note": ""}]
    spec = _described(gpus, ranks, figures=figures)
    device, last = spec.device, spec.kernels[-1]
    assert device.name == ("An H100" if gpus else "A CPU")
    assert device.memory_bytes == (80 * 10**9 if gpus else 2**34 // ranks)
    assert device.usable_bytes == int(0.9 * device.memory_bytes)
    assert (device.kind, device.own_communication_engine) == (("cuda", True) if gpus else ("cpu", False))
    assert device.memory_bandwidth_bytes_per_s == 1 / last.optimizer_per_byte
    assert device.dense_flops_per_s == {"float32": last.peak_flops_per_s}
    assert device.narrow_flops_per_s == {"float8": pytest.approx(1e15)}
    assert device.gamma_s_per_byte == 3e-12
    assert _described(gpus, ranks).device.gamma_s_per_byte is None
    (tier,) = spec.tiers
    assert (spec.nodes, spec.ranks_per_node, tier.ranks) == (1, ranks, ranks)
    assert (tier.origin, tier.latency_s > 0) == (("measured", True) if ranks > 1 else ("estimated", False))


def test_another_question_is_another_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks, type, threads or machine; a quick one stands in until there is a full one."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    asked: list[tuple[Any, ...]] = []

    def measured(*given: Any) -> dict[str, Any]:
        asked.append(given[:4])
        return campaign.measured(*given)

    monkeypatch.setattr(this_machine, "_measure", measured)
    said: list[str] = []

    def local(ranks: int = 2, dtype: Any = "float32", threads: int = 1, **more: Any) -> ClusterSpec:
        return this_machine.local_cluster(ranks, dtype, threads, announce=said.append, **more)

    questions: list[tuple[int, Any, int]] = [
        (2, "float32", 1),
        (4, "float32", 1),
        (2, "bfloat16", 1),
        (2, "float32", 3),
    ]
    for question in questions * 2:
        assert local(*question).kernels[-1].threads == question[2]
    assert asked == [(*question, False) for question in questions]
    assert sum(line.startswith("measuring this machine") for line in said) == 4
    assert "measuring this machine (2 ranks, float32, 3 threads each) ..." in said
    monkeypatch.setattr(this_machine, "VERSION", this_machine.VERSION + 1)
    local(quick=True)
    said.clear()
    local()
    assert [line for line in said if "quickly" in line] == said[:1] != []
    local(anew=True)
    said.clear()
    local()
    assert asked[4:] == [(2, "float32", 1, True), (2, "float32", 1, False)]
    assert not any("quickly" in line for line in said)


@pytest.mark.parametrize(("age_s", "kept"), [(10.0, True), (3500.0, True), (3700.0, False)])
def test_what_was_measured_before_an_interruption_is_kept_for_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, kept: bool
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))

    def interrupted(ranks: int, dtype: str, threads: int, quick: bool, file: Path) -> dict[str, Any]:
        file.write_text(json.dumps({"kernels": []}))
        raise KeyboardInterrupt

    monkeypatch.setattr(this_machine, "_measure", interrupted)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        this_machine.local_cluster(2, "float32", 1, announce=said.append)
    assert "the same command goes on from there" in said[-1]
    (file,) = (tmp_path / "machines").glob("*.kept")
    os.utime(file, (time.time() - age_s,) * 2)
    found: list[bool] = []

    def again(ranks: int, dtype: str, threads: int, quick: bool, file: Path) -> dict[str, Any]:
        found.append(file.exists())
        return campaign.measured(ranks, dtype, threads, quick, file)

    monkeypatch.setattr(this_machine, "_measure", again)
    said.clear()
    this_machine.local_cluster(2, "float32", 1, announce=said.append)
    assert found == [kept]
    assert ("what was measured before the interruption is kept" in said) == kept
    assert not file.exists()
