"""A pipeline under 1F1B: each rank has one stage; forward and backward passes of micro-batches take turns.

    torchrun --nproc-per-node 4 examples/listings/pipeline_1f1b.py

Stage r of P starts with P - 1 - r forward passes, so it keeps activations of at most P - r micro-batches, where GPipe
keeps those of all M. The bubble is the same: (P-1)/(M+P-1) of the step.

What the usual listing gets wrong: the loss is not divided by the number of micro-batches, so gradients are M times
too large; and blocking sends in the steady state let neighbours wait for each other (here sends do not block).
"""

import torch
import torch.distributed as dist
from torch import nn

ROWS, WIDTH, MICRO_BATCHES = 2, 4, 6


def one_f_one_b(stage: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Run a step's micro-batches through this rank's stage; return the loss on the last rank, 0 elsewhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == world - 1
    kept, sends, loss = [], [], 0.0

    def receive(source: int) -> torch.Tensor:
        dist.recv(buffer := torch.empty(ROWS, WIDTH, dtype=torch.float64), source)
        return buffer

    def forward(i: int) -> None:
        nonlocal loss
        given = x[i] if first else receive(rank - 1)
        out = stage(given.requires_grad_(not first))
        if last:
            out = (out - y[i]).square().mean() / MICRO_BATCHES
            loss += out.item()
        else:
            sends.append(dist.isend(out.detach(), rank + 1))
        kept.append((given, out))

    def backward() -> None:
        given, out = kept.pop(0)
        out.backward(None if last else receive(rank + 1))
        if not first:
            sends.append(dist.isend(given.grad, rank - 1))

    warm_up = min(world - 1 - rank, MICRO_BATCHES)
    for i in range(warm_up):
        forward(i)
    for i in range(warm_up, MICRO_BATCHES):  # one forward, one backward
        forward(i)
        backward()
    for _ in range(warm_up):
        backward()
    for send in sends:
        send.wait()
    return loss


def main() -> None:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(dist.get_world_size())]
    x, y = torch.randn(2, MICRO_BATCHES, ROWS, WIDTH, dtype=torch.float64)
    loss = torch.tensor(one_f_one_b(stages[dist.get_rank()], x, y), dtype=torch.float64)
    dist.broadcast(loss, src=dist.get_world_size() - 1)
    mine = [p.grad.clone() for p in stages[dist.get_rank()].parameters()]
    for p in stages[dist.get_rank()].parameters():
        p.grad = None
    alone = (nn.Sequential(*stages)(x.flatten(0, 1)) - y.flatten(0, 1)).square().mean()
    alone.backward()
    assert torch.allclose(loss, alone.detach(), atol=1e-12)
    assert all(torch.allclose(g, p.grad) for g, p in zip(mine, stages[dist.get_rank()].parameters()))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: its gradients equal those of one process")
    dist.destroy_process_group()
