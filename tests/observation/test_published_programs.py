"""Programs as PyTorch's own examples write them: they start their ranks themselves, ask for the accelerator, draw
truncated normals, and divide attention by DTensor (pytorch/examples, distributed/)."""

from pathlib import Path
from unittest.mock import patch

import pytest
from support.forked_observer import Forked
from support.fresh_process import in_fresh_process
from support.in_process_cli import error_of, json_of

from phalanx.answers import observed as command

_PROGRAM = """
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, x):
        q, k, v = (f(x).view(2, 16, 4, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(2, 16, 64))

def train(rank, world):
    device = torch.device(f"{torch.accelerator.current_accelerator().type}:{rank}")
    dist.init_process_group(dist.get_default_backend_for_device(device), rank=rank, world_size=world)
    columns = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
    mesh = init_device_mesh(device.type, (world,))
    model = parallelize_module(Attention().to(device), mesh, columns | {"o": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        model(torch.randn(2, 16, 64, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    mp.spawn(train, args=(torch.cuda.device_count(),), nprocs=NPROCS)
"""


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.subprocess, "Popen", Forked)


def _written(folder: Path, ranks: str) -> Path:
    (folder / "train.py").write_text(_PROGRAM.replace("NPROCS", ranks))
    return folder


@pytest.mark.usefixtures("forked")
def test_a_program_that_starts_its_own_ranks_is_observed(tmp_path: Path) -> None:
    folder = _written(tmp_path, "torch.cuda.device_count()")
    observed = json_of(folder, "observe", "--world", "2", "--json", "--", "python", "train.py")
    (row,) = observed["collectives"]
    assert (row["op"], row["bytes"], row["where"]["phase"]) == ("all_reduce", 2 * 16 * 64 * 4, "F")
    flops = {(row["phase"], row["module"]): row["flops"] for row in observed["flops"]}
    assert flops["F", "q"] == 2 * 32 * 64 * 64 // 2


@pytest.mark.usefixtures("forked")
def test_a_program_that_starts_other_ranks_is_told_to_be_observed_there(tmp_path: Path) -> None:
    said = error_of(_written(tmp_path, "4"), "observe", "--world", "2", "--", "python", "train.py")
    assert "spawn = 4: is not the 2 ranks of a node; observe it with --world 4" in said


def test_a_loop_that_waits_for_a_value_ends_with_its_remedy() -> None:
    assert in_fresh_process(_waiting).startswith("True")


def _waiting() -> str:
    import torch

    from phalanx.observation.fake import recorder
    from phalanx.observation.observe import observe

    def program() -> None:
        x = torch.randn(2, 4, device="cuda")
        while (x > 2).any():
            x = torch.where(x > 2, torch.randn_like(x), x)

    with patch.object(recorder, "_MOST_TRUTH_VALUES", 20):
        try:
            observe(program, world=2)
        except Exception as error:
            text = str(error)
            return f"{'asks the same 20 times' in text and '=false ends it' in text} {text}"
    return "no error"


_PIPELINE = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
dist.init_process_group()
rank = dist.get_rank()
stage = PipelineStage(nn.Linear(8, 8, bias=False).cuda(), rank, 2, torch.device(f"cuda:{rank}"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(stage.submod.parameters(), 0.1)
for _ in range(3):
    losses = []
    x = torch.ones(8, 8).cuda()
    schedule.step(x) if rank == 0 else schedule.step(target=x, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    print(f"{torch.stack(losses).mean():.4f}" if losses else "")
"""


@pytest.mark.usefixtures("forked")
def test_messages_between_backward_passes_are_of_the_backward_pass(tmp_path: Path) -> None:
    """As PyTorch's tutorial on pipelines; a loss is printed as a number is."""
    (tmp_path / "pipe.py").write_text(_PIPELINE)
    observed = json_of(tmp_path, "observe", "--world", "2", "--json", "--", "python", "pipe.py")
    sent = [(row["op"], row["count"], row["where"]["phase"]) for row in observed["collectives"]]
    assert sent == [("send", 4, "F"), ("recv", 1, "F"), ("recv", 3, "B")]


_STARTED = """
import torch, torch.nn as nn, torch.distributed as dist, torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset

def train(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(12, 8))
    for (x,) in DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=4):
        model(x).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

def other(rank="0"):
    pass

if __name__ == "__main__":
    mp.set_start_method("spawn", force=True)
    processes = [mp.Process(target=TARGET, args=(rank, 2)) for rank in range(2)]
    [process.start() for process in processes]
    [process.join() for process in processes]
"""


@pytest.mark.usefixtures("forked")
def test_processes_of_ranks_and_workers_of_a_loader_run_here(tmp_path: Path) -> None:
    """As PyTorch's tutorial on distributed programs starts its ranks, and as any training loads its data."""
    (tmp_path / "tuto.py").write_text(_STARTED.replace("TARGET", "train"))
    observed = json_of(tmp_path, "observe", "--world", "2", "--json", "--", "python", "tuto.py")
    assert [row["bytes"] for row in observed["collectives"]] == [8 * 8 * 4, 8 * 4]
    assert any("what its workers load is loaded in this process" in note for note in observed["ranks"][0]["notes"])
    assert any("processes that the program starts are its ranks" in note for note in observed["ranks"][0]["notes"])
    for argument in ("str(rank)", "8080 + rank"):  # a helper's name or port
        (tmp_path / "other.py").write_text(_STARTED.replace("TARGET, args=(rank, 2)", f"other, args=({argument},)"))
        said = error_of(tmp_path, "observe", "--world", "2", "--", "python", "other.py")
        assert "is a process that the program starts itself" in said, argument
