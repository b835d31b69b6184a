"""ZeRO-3 (FSDP) by hand: a rank keeps 1/N of parameters, gradients and optimizer state.

    torchrun --nproc-per-node 4 examples/listings/zero3.py

Each layer is gathered before its forward pass, freed, gathered again before its backward pass, and its gradient is
reduce-scattered: 3 times the parameters are sent in a step, where data parallelism sends 2.

What the usual listing gets wrong: it frees the gathered weight but autograd has saved it, so nothing is saved (here
the layer's function is computed again from what was gathered again); and it leaves the padding out, so that layers
whose size N does not divide cannot be cut.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: torch.optim imports it, and its defaults would keep the group alive


def gather(shard: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the whole parameter from every rank's shard of its padded, flattened elements."""
    whole = shard.new_empty(len(shard) * dist.get_world_size())
    dist.all_gather_into_tensor(whole, shard)
    return whole[: shape.numel()].view(shape)


def cut(whole: torch.Tensor) -> torch.Tensor:
    """Pad a tensor's elements with zeros to a multiple of N, (N, elements of a shard)."""
    world = dist.get_world_size()
    padded = torch.zeros(-(-whole.numel() // world) * world, dtype=whole.dtype)
    padded[: whole.numel()] = whole.flatten()
    return padded.view(world, -1)


class Layer(torch.autograd.Function):
    """tanh(x W) of a weight that exists as a whole only inside this function."""

    @staticmethod
    def forward(ctx, x, shard, shape):
        ctx.save_for_backward(x, shard)  # the shard, not the weight
        ctx.shape = shape
        return torch.tanh(x @ gather(shard, shape))

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        x, weight = x.detach().requires_grad_(), gather(shard, ctx.shape).requires_grad_()
        with torch.enable_grad():
            torch.tanh(x @ weight).backward(grad)
        mine = torch.empty_like(shard)
        dist.reduce_scatter_tensor(mine, cut(weight.grad).flatten())
        return x.grad, mine, None


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    weights = [torch.randn(a, b, dtype=torch.float64, requires_grad=True) for a, b in ((6, 7), (7, 5))]
    batch = torch.randn(8, 6, dtype=torch.float64)
    shards = [cut(w.detach())[rank].clone().requires_grad_() for w in weights]
    mine, alone = torch.optim.Adam(shards, lr=0.1), torch.optim.Adam(weights, lr=0.1)  # moments: 1/N each, too
    for _ in range(3):
        x, y = batch[rank::world], batch
        for shard, weight in zip(shards, weights):
            x, y = Layer.apply(x, shard, weight.shape), torch.tanh(y @ weight)
        for optimizer, loss in ((mine, x.square().sum()), (alone, y.square().sum())):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert all(torch.allclose(gather(s.detach(), w.shape), w, atol=1e-10) for s, w in zip(shards, weights))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: three steps of Adam equal those of one process")
    dist.destroy_process_group()
