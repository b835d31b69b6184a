"""A bug of torch 2.13: under a schedule that splits the backward pass, stages of `fully_shard` lose gradients.

    torchrun --nproc-per-node 4 examples/torch_lost_gradients.py

Two pipeline ranks hold four stages of one linear layer each, and each stage is sharded over two ranks. Gradients are
compared with those of one process over the same batch, for two schedules and both values of reshard_after_forward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

WIDTH, STAGES, BATCH, MICRO_BATCHES = 8, 4, 16, 4


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(STAGES)]


def errors(schedule: type, reshard: bool) -> torch.Tensor:
    """Run one step; return each stage's relative error of the gradient, infinite where it has none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place = mesh.get_local_rank("pp")
    mine = [place, 3 - place] if schedule is ScheduleZBVZeroBubble else [place, place + 2]
    whole, x = layers(), torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    loss_of(nn.Sequential(*whole)(x), x).backward()
    parts = [fully_shard(layers()[i], mesh=mesh["dp"], reshard_after_forward=reshard) for i in mine]
    cpu = torch.device("cpu")
    group = mesh.get_group("pp")
    stages = [PipelineStage(part, i, STAGES, cpu, group=group) for part, i in zip(parts, mine, strict=True)]
    runs = schedule(stages, MICRO_BATCHES, loss_fn=loss_of)
    runs.step(*([x] if 0 in mine else []), **({"target": x} if STAGES - 1 in mine else {}))
    found = torch.zeros(STAGES)
    for part, i in zip(parts, mine, strict=True):
        gradient, wanted = part.weight.grad, whole[i].weight.grad
        found[i] = torch.inf if gradient is None else (gradient.full_tensor() - wanted).norm() / wanted.norm()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


def main() -> None:
    dist.init_process_group("gloo")
    for schedule in (ScheduleInterleaved1F1B, ScheduleZBVZeroBubble):
        for reshard in (False, True):
            found = errors(schedule, reshard)
            if dist.get_rank() == 0:
                said = ", ".join("no gradient" if e == torch.inf else f"{e:.0%} off" for e in found.tolist())
                print(f"{schedule.__name__}, reshard_after_forward={reshard}: {said}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
