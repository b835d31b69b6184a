from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.strategies import PRECISIONS

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.handles import ReleasedHandle
from phalanx.runtime.comm.transport import DONE, Call
from phalanx.runtime.process import rank, status, world
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision, Train
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.trainer import learning_rate
from phalanx.training.training_step import Training

SIZES = {"family": "gpt2", "vocab": 61, "hidden": 16, "layers": 2, "heads": 2, "ffn": 40, "max_seq": 16}
SPEC = build(ModelSpec, complete(SIZES), "model")


def training(job: Job, seed: int = 0) -> Training:
    return Training(SPEC, job, Strategy(), Comm(ALONE, mesh(Strategy())), seed)


def batch(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(61, (1, 9), generator=generator) for _ in range(2)]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_no_gradient_is_left_for_the_next_step(precision: Precision) -> None:
    state = training(Job(2, 8, precision))
    norms = [state.step(batch(0), 1e-12).grad_norm for _ in range(3)]
    assert norms[1:] == pytest.approx(norms[:1] * 2, rel=0.02)


def test_clipping_bounds_the_step() -> None:
    job = Job(2, 8, optimizer=Optimizer("sgd", (0.0, 0.0), weight_decay=0.0), clip=0.01)
    state = training(job)
    before = {name: w.detach().clone() for name, w in state.weights.items()}
    result = state.step(batch(0), 1.0)
    assert result.grad_norm > 0.01
    moved = torch.stack([(w.detach() - before[n]).norm() for n, w in state.weights.items()]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


def test_only_matrices_decay() -> None:
    job = Job(2, 8, optimizer=Optimizer(weight_decay=0.5))
    groups = training(job).optimizer.param_groups
    assert {(p.ndim > 1, g["weight_decay"]) for g in groups for p in g["params"]} == {(True, 0.5), (False, 0.0)}


def test_learning_rate_warms_up_and_falls() -> None:
    train = Train(steps=110, warmup=10, min_lr_ratio=0.1)
    assert learning_rate(train, 1.0, 0) == pytest.approx(0.1)
    assert learning_rate(train, 1.0, 9) == pytest.approx(1.0)
    assert learning_rate(train, 1.0, 60) == pytest.approx(0.55)
    assert learning_rate(train, 1.0, 110) == pytest.approx(0.1)


def test_the_status_page_speaks_for_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(status.FOLDER_VARIABLE, str(tmp_path))
    page = status.page(3)
    page.stand({"pp": 1, "tp": 0})
    page.now("all_reduce " + "x" * 5000)
    found = status.read(tmp_path)[3]
    assert (str(found), found.doing[:10]) == ("rank 3 (pp 1, tp 0)", "all_reduce")
    page.now("rest")
    assert status.read(tmp_path)[3].doing == "rest"


def test_torchrun_and_slurm_say_who_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert external_world() is None
    slurm = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "4711"}
    for name, value in {**slurm, "SLURM_STEP_NODELIST": "node[08-09]"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "")  # so that what is set below is undone
    monkeypatch.delenv("MASTER_PORT")
    found = external_world()
    assert found == World(9, 16, 1, 8)
    import os

    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node08", "24711")
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert external_world() == World(3, 4, 1, 2)


class NoAnswer(torch.distributed.Store):
    """A store that takes what it is told; `ask`: what happens to who asks."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self.ask = ask

    def set(self, key: str, value: str) -> None:
        return None

    def check(self, keys: list[str]) -> bool:
        self.ask()
        return True


def absent(monkeypatch: pytest.MonkeyPatch, store: torch.distributed.Store) -> tuple[int, ...]:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    return world.absent_ranks(World(1, 2, 0, 1), [0, 1])


@pytest.mark.filterwarnings("error")
def test_who_is_absent_nobody_can_tell_once_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def gone() -> None:
        asked.append(True)
        raise torch.distributed.DistNetworkError("connection was closed")

    assert absent(monkeypatch, NoAnswer(gone)) == ()
    assert asked


def test_nor_while_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, over = threading.Event(), threading.Event()
    asking: list[threading.Thread] = []

    def hang() -> None:
        asking.append(threading.current_thread())
        asked.set()
        over.wait(10)

    store = NoAnswer(hang)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda thread, within_s: asked.wait(10))
        assert absent(patch, store) == ()
    over.set()
    asking[0].join()


def test_who_did_not_arrive_is_named_with_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    page = status.page(0)
    monkeypatch.setattr(page, "among", (0, 1))
    monkeypatch.setattr(rank.status, "page", lambda _: page)
    monkeypatch.setattr(world, "absent_ranks", lambda of, ranks: tuple(r for r in ranks if r != of.rank))
    with (
        pytest.raises(RuntimeError, match=r"; rank 1 did not arrive; start both$"),
        rank.naming_collective(World(0, 2, 0, 1), "start both"),
    ):
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")


STEPS = """
import sys
import torch
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.spec.model.families import complete
from phalanx.spec.job import Job
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.training import worker
from phalanx.training.training_step import Training

sizes = {"vocab": 9, "hidden": 8, "layers": 1, "heads": 2, "ffn": 8, "max_seq": 8}
for family, optimizer in (("llama", "adamw"), ("gpt2", "sgd")):
    spec = ModelSpec(**complete({"family": family, **sizes}))
    training = Training(spec, Job(1, 4, optimizer=Optimizer(optimizer)), Strategy(), Comm(ALONE, mesh(Strategy())), 0)
    training.step([torch.zeros(1, 5, dtype=torch.int64)], 1e-2)
print([m for m in ("torch._dynamo", "torch.distributed.checkpoint") if m in sys.modules])
"""


def test_a_rank_steps_without_what_takes_seconds_to_import() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_recorded_collective_is_over_when_nobody_holds_its_tensors() -> None:
    """As Gloo's thread does after it has said that it is done; here a graph holds what it has saved."""
    tensor, graph = torch.ones(4), []

    def start():  # type: ignore[no-untyped-def]
        graph.append(torch.ones(4, requires_grad=True) * tensor)
        threading.Timer(0.05, graph.clear).start()
        return DONE

    ReleasedHandle(Call("all_reduce", (0, 1), 0, tensor, tensor), start).wait()
    assert not graph


def test_what_a_message_uses_until_its_wait() -> None:
    """Verification asks it of ranks that send nothing: memory that is sent is read, what is received is written."""
    comm, sent, received = Comm(World(0, 2, 0, 2), mesh(Strategy(pp=2)), null=True), torch.ones(3), torch.ones(4)
    handles = comm.send(sent, 1, "F", 0, 0), comm.receive(received, 1, "B", 0, 0)
    used = [([b.high for b in flight.reads], [b.high for b in flight.writes]) for flight in comm.unawaited.values()]
    assert used == [([12], []), ([], [16])]
    for handle in handles:
        handle.wait()
    assert not comm.unawaited
