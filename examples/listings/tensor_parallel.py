"""Column- and row-parallel layers: an MLP whose hidden width is divided over the ranks (Megatron-LM, 2019).

    torchrun --nproc-per-node 4 examples/listings/tensor_parallel.py

X W = Y by columns of W needs no communication forward; Y V = Z by rows of V sums the ranks' products.

What the usual listing gets wrong: `dist.all_reduce` inside forward is invisible to autograd, so the gradient of X is
a part of it; two autograd functions make it right, each the other's mirror image. And a bias of the row-parallel
layer that every rank adds before the sum is added N times.
"""

import torch
import torch.distributed as dist
from torch import nn


class Copy(torch.autograd.Function):
    """Forward: nothing. Backward: gradients of the input are summed, as every rank used it. (Megatron's f)"""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Forward: products are summed. Backward: nothing, for every rank has the whole gradient. (Megatron's g)"""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def parallel_mlp(x: torch.Tensor, up: nn.Linear, down: nn.Linear, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x W + b) V + bias; `up` has this rank's columns of W and b, `down` its rows of V, without bias."""
    return Reduce.apply(down(nn.functional.gelu(up(Copy.apply(x))))) + bias


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    up, down = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    # This rank's parts. nn.Linear stores (out, in): columns of W are rows of up.weight.
    mine = slice(rank * 16 // world, (rank + 1) * 16 // world)
    my_up, my_down = nn.Linear(8, 16 // world).double(), nn.Linear(16 // world, 8, bias=False).double()
    my_up.weight.data, my_up.bias.data = up.weight.data[mine].clone(), up.bias.data[mine].clone()
    my_down.weight.data = down.weight.data[:, mine].clone()
    my_bias, my_x = down.bias.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()

    alone = down(nn.functional.gelu(up(x)))
    together = parallel_mlp(my_x, my_up, my_down, my_bias)
    alone.square().sum().backward()
    together.square().sum().backward()
    pairs = [(together, alone), (my_x.grad, x.grad), (my_up.weight.grad, up.weight.grad[mine])]
    pairs += [(my_down.weight.grad, down.weight.grad[:, mine]), (my_bias.grad, down.bias.grad)]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in pairs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: output and gradients equal those of one process")
    dist.destroy_process_group()
