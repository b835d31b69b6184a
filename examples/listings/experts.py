"""A layer of experts over ranks: tokens travel to the rank of their expert and back, by two all-to-alls.

    torchrun --nproc-per-node 4 examples/listings/experts.py

What the usual listing gets wrong: `if mask.any()` waits for the GPU once an expert; `dist.all_to_all_single` has no
gradient, so experts and router learn nothing of each other (here the exchange is an autograd function, whose backward
pass is the exchange with its counts swapped); and counts are taken as equal, which no router gives.
"""

import torch
import torch.distributed as dist
from torch import nn


class Exchange(torch.autograd.Function):
    """All-to-all of rows: `sent[r]` of them go to rank r, `received[r]` come from it."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.counts = sent, received
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.counts
        return Exchange.apply(grad, received, sent), None, None


def experts_layer(x: torch.Tensor, router: nn.Linear, mine: nn.Module) -> torch.Tensor:
    """Send each row of x to the one expert that the router chooses; rank r has expert r. Returns rows in order."""
    gate, chosen = router(x).softmax(-1).max(-1)
    order = chosen.argsort(stable=True)  # rows by expert
    sent = torch.bincount(chosen, minlength=dist.get_world_size())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)  # first the counts: how many rows will come from whom
    counts = sent.tolist(), received.tolist()
    dispatched = Exchange.apply(x[order], *counts)
    combined = Exchange.apply(mine(dispatched), *counts[::-1])
    return torch.empty_like(x).index_copy(0, order, combined) * gate[:, None]


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    router = nn.Linear(6, world).double()
    experts = [nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)).double() for _ in range(world)]
    x = torch.randn(5 * world, 6, dtype=torch.float64)  # 5 rows for each rank
    experts_layer(x[5 * rank : 5 * rank + 5], router, experts[rank]).square().sum().backward()
    dist.all_reduce(router.weight.grad)  # the router is on every rank, as in data parallelism; an expert on one
    found = [router.weight.grad.clone(), *(p.grad for p in experts[rank].parameters())]
    found = [torch.zeros(0) if g is None else g.clone() for g in found]  # an expert without tokens has no gradient
    for module in (router, *experts):
        module.zero_grad()

    # One process: every row through its expert.
    gate, chosen = router(x).softmax(-1).max(-1)
    torch.stack([experts[e](row) * g for row, e, g in zip(x, chosen.tolist(), gate)]).square().sum().backward()
    alone = [router.weight.grad, *(p.grad for p in experts[rank].parameters())]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, alone) if b is not None)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: gradients of router and expert equal those of one process")
    dist.destroy_process_group()
