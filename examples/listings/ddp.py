"""Data parallelism by hand: every rank has the whole model and its own part of the batch.

    torchrun --nproc-per-node 4 examples/listings/ddp.py

What the usual listing gets wrong: it lets every rank start from its own random weights, gives every rank the same
data (no sampler), averages losses of unequal parts as if they were equal, or takes the global rank as the device's
index, which fails on the second node (it is the local rank: `int(os.environ["LOCAL_RANK"])`).
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: torch.optim imports it, and its defaults would keep the group alive
from torch import nn


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float) -> float:
    """Take a step on the whole batch (x, y); each rank computes on its own rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # 1. Each rank takes its part: rows rank, rank + world, ... (here the parts may be of unequal size).
    mine, of = x[rank::world], y[rank::world]
    # 2. and 3. Forward and backward: a sum over rows, divided by the rows of ALL ranks, so that ranks add up.
    loss = (model(mine) - of).square().sum() / len(x)
    loss.backward()
    # 4. Gradients are summed: one all-reduce for all of them, in one buffer (DDP has buckets of 25 MB).
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads] + [loss.detach().view(1)])
    dist.all_reduce(flat)
    # 5. and 6. Every rank takes the same step, so the copies stay equal without being sent.
    for p, g in zip(model.parameters(), flat[:-1].split([g.numel() for g in grads])):
        p.data.add_(g.view_as(p), alpha=-lr)
        p.grad = None
    return flat[-1].item()


def main() -> None:
    torch.manual_seed(dist.get_rank())  # ranks start differently, as they would without a seed
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)  # 0. so the weights of rank 0 go to all, once
    data = torch.Generator().manual_seed(0)
    x, y = (torch.randn(10, n, generator=data, dtype=torch.float64) for n in (8, 1))

    # One process: the same model on the whole batch.
    alone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(5):
        together = step(model, x, y, lr=0.1)
        loss = (alone(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(together - loss.item()) < 1e-12
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(model.parameters(), alone.parameters()))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: five steps equal those of one process")
    dist.destroy_process_group()
