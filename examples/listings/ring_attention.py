"""Ring attention: each rank has a part of the sequence; keys and values travel around the ring (Liu et al. 2023).

    torchrun --nproc-per-node 4 examples/listings/ring_attention.py

What the usual listing gets wrong: it averages the softmaxes of the blocks. Blocks are combined by their maxima and
sums (online softmax, Milakov & Gimelshein 2018). Its causal mask forgets where a block of keys comes from. And
parts that are cut in order leave rank 0 with one block of work, the last with N (zigzag parts balance that).
"""

import torch
import torch.distributed as dist


class Rotate(torch.autograd.Function):
    """Pass a tensor to the right neighbour; gradients travel to the left."""

    @staticmethod
    def forward(ctx, x, step):
        ctx.step = step
        rank, world = dist.get_rank(), dist.get_world_size()
        out = torch.empty_like(x)
        receive = dist.irecv(out, (rank - step) % world)
        dist.isend(x.contiguous(), (rank + step) % world).wait()
        receive.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return Rotate.apply(grad, -ctx.step), None


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of this rank's queries (tokens, dim) to the keys of all ranks before it and its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    n = len(q)
    top = torch.full((n, 1), float("-inf"), dtype=q.dtype)  # largest score so far, of each query
    total, out = torch.zeros(n, 1, dtype=q.dtype), torch.zeros_like(v)
    position = torch.arange(n)
    for step in range(world):
        source = (rank - step) % world  # whose keys these are
        allowed = (rank * n + position)[:, None] >= (source * n + position)[None, :]
        scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~allowed, float("-inf"))
        higher = torch.maximum(top, scores.amax(1, keepdim=True)).detach()
        weight, shrink = (scores - higher).exp(), (top - higher).exp()
        total = total * shrink + weight.sum(1, keepdim=True)
        out, top = out * shrink + weight @ v, higher
        if step < world - 1:
            k, v = Rotate.apply(torch.stack((k, v)), 1).unbind()
    return out / total


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = torch.randn(3, 6 * world, 4, dtype=torch.float64, requires_grad=True)
    mine = whole.detach()[:, 6 * rank : 6 * rank + 6].clone().requires_grad_()
    out = ring_attention(*mine.unbind())
    out.square().sum().backward()
    alone = torch.nn.functional.scaled_dot_product_attention(*whole.unsqueeze(1).unbind(), is_causal=True)[0]
    alone.square().sum().backward()
    part = slice(6 * rank, 6 * rank + 6)
    assert torch.allclose(out, alone[part], atol=1e-12)
    assert torch.allclose(mine.grad, whole.grad[:, part], atol=1e-12)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: output and gradients equal those of one process")
    dist.destroy_process_group()
