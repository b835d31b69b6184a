"""Out of memory in the middle of a run says which part predicted and measured differ in; a host without what GPUs
need says what to change."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from phalanx.answers.plan import decide
from phalanx.cost.step.expand import expand
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process import gpus
from phalanx.runtime.process.environment import ALONE, World
from phalanx.runtime.process.gpus import Host, cores_near, require, this_host
from phalanx.runtime.process.world import join
from phalanx.schedule.layout import Layout
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files.plan import Plan
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training import trainer
from phalanx.training.out_of_memory import DeviceMemory, OutOfMemory, explain_shortage
from phalanx.training.trainer import Trainer
from phalanx.training.training_step import Training

TABLES = {
    "model": {"family": "llama", "vocab": 512, "hidden": 64, "layers": 2, "heads": 2, "ffn": 128, "max_seq": 64},
    "cluster": {"preset": "dgx-h100"},
    "job": {"global_batch": 4, "seq": 64},
    "strategy": {"micro_batch": 4},
    "train": {"name": "full", "steps": 3},
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return decide(job_file.from_tables(TABLES, Path())).plan


def _device(plan: Plan, state: float = 1, passes: float = 1, unused: int = 0) -> DeviceMemory:
    program = expand(Layout(plan.model, plan.job, plan.strategy).rank_view(0))
    before = int(program.state.total * state)
    peak = before + int((program.peak_bytes - program.state.total) * passes)
    return DeviceMemory(before, peak, peak + unused, peak, 2 * peak)


def test_the_part_that_differs_most_is_named(plan: Plan) -> None:
    for device, said in (
        (_device(plan), "as predicted: the plan does not fit this device: take a smaller micro_batch"),
        (_device(plan, state=2), "state is what differs most: take a higher zero"),
        (_device(plan, passes=2), "passes is what differs most: take a smaller micro_batch, or recompute=full"),
        (_device(plan, unused=2**28), "allocator is what differs most: set PYTORCH_CUDA_ALLOC_CONF"),
    ):
        line = str(explain_shortage(plan, 0, device))
        assert said in line
        assert "\n" not in line
        assert re.search(r"state [\d.]+ GiB \([\d.]+ predicted\), passes [\d.]+ GiB \([\d.]+ predicted\)", line)


def test_a_step_without_memory_ends_the_run_with_that_line(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    state = object.__new__(Trainer)
    state.plan, state.comm = plan, Comm(ALONE, mesh(Strategy()))

    def full(step: int, stop: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")

    monkeypatch.setattr(state, "_step", full)
    monkeypatch.setattr(trainer, "_memory", lambda device, before: _device(plan, passes=3))
    with pytest.raises(OutOfMemory, match="passes is what differs most"):
        state._within_memory(1, False)  # type: ignore[arg-type]


GOOD = Host(driver=True, hidden=False, cuda="12.8", count=2, nccl=True)


def test_a_host_that_cannot_run_ranks_on_gpus_says_what_to_change() -> None:
    for host, ranks, said in (
        (replace(GOOD, count=0), 1, "cannot be used by torch for CUDA 12.8: the driver is older"),
        (GOOD, 3, "ranks on this host = 3: are more than its GPUs (2), and NCCL takes one process a GPU"),
        (GOOD, 3, "set PHALANX_SHARE_GPUS=1 (ranks then share GPUs"),
        (replace(GOOD, nccl=False), 2, "NCCL: is not in this build of torch"),
    ):
        with pytest.raises(InputError) as error:
            require(host, ranks, ranks)
        assert said in str(error.value)
        assert "CUDA_VISIBLE_DEVICES= (empty)" in str(error.value)
    for host in (
        replace(GOOD, count=1, shared=True),
        GOOD,
        replace(GOOD, count=0, hidden=True),
        replace(GOOD, count=0, cuda=None),
        Host(False, False, None, 0, True),
    ):
        require(host, 2, 2)


def test_ranks_that_share_a_gpu_meet_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = MagicMock()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(World, "device", torch.device("cuda", 0))
    monkeypatch.setattr(dist, "init_process_group", joined)
    for host in (GOOD, replace(GOOD, count=1, shared=True), replace(GOOD, shared=True)):
        monkeypatch.setattr(gpus, "this_host", lambda host=host: host)
        join(World(0, 2, 0, 2), 1.0)
    found = [call.kwargs["backend"] for call in joined.call_args_list]
    assert found == ["cpu:gloo,cuda:nccl", "gloo", "cpu:gloo,cuda:nccl"]


def test_a_process_that_slurm_gives_one_gpu_of_eight_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, bound in (
        ("SLURM_GPUS_PER_TASK", "1", True),
        ("SLURM_TRES_PER_TASK", "cpu=8,gres/gpu=1", True),
        ("SLURM_GPU_BIND", "verbose,single:1", True),
        ("SLURM_GPU_BIND", "closest", False),
        ("SLURM_TRES_PER_TASK", "cpu=8", False),
    ):
        with monkeypatch.context() as env:
            env.setenv(name, value)
            assert this_host().bound == bound
    require(replace(GOOD, count=1, bound=True), 8, 16)


def test_a_state_that_does_not_fit_is_said_before_any_step(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Training:
        raise torch.OutOfMemoryError("CUDA out of memory")

    device = replace(_device(plan), before=0)
    monkeypatch.setattr(trainer, "Training", full)
    monkeypatch.setattr(trainer, "batches", MagicMock())
    monkeypatch.setattr(trainer, "_memory", lambda device_, before: device)
    with pytest.raises(
        OutOfMemory, match=r"the state takes [\d.]+ GiB as predicted.*take a higher zero, or more ranks"
    ):
        Trainer(plan, MagicMock(), Path(), Comm(ALONE, mesh(plan.strategy)), resume=False)


def test_the_cores_near_a_gpu_are_those_of_its_numa_node(tmp_path: Path) -> None:
    device, nodes = tmp_path / "bus/pci/devices/0000:dc:00.0", tmp_path / "devices/system/node"
    device.mkdir(parents=True)
    for node, cores in enumerate(("0-2,8", "3-5,9-10")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    for written, cores_ in (("1", {3, 4, 5, 9, 10}), ("-1", {0, 1, 2, 8})):
        (device / "numa_node").write_text(f"{written}\n")
        assert cores_near("0000:dc:00.0", tmp_path) == cores_
    with pytest.raises(OSError, match="numa_node"):
        cores_near("0000:00:00.0", tmp_path)
