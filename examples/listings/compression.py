"""Top-k gradients with error feedback: send the largest few, and remember the rest (Stich et al. 2018).

    torchrun --nproc-per-node 4 examples/listings/compression.py

What the usual listing gets wrong: it forgets what was not sent. Then small gradients are never applied, and training
stops away from the minimum. It also sums indices by an all-reduce: ranks choose different ones, so (index, value)
pairs are gathered, and every rank adds all of them.
"""

import torch
import torch.distributed as dist


def top_k_mean(gradient: torch.Tensor, residual: torch.Tensor | None, k: int) -> torch.Tensor:
    """Return the mean over ranks of each one's k largest elements; keep what was not sent in `residual`, if any."""
    world = dist.get_world_size()
    wanted = gradient if residual is None else gradient + residual
    index = wanted.abs().topk(k).indices
    value = wanted[index]
    if residual is not None:
        residual.copy_(wanted)
        residual[index] = 0.0
    indices = [torch.empty_like(index) for _ in range(world)]
    values = [torch.empty_like(value) for _ in range(world)]
    dist.all_gather(indices, index)
    dist.all_gather(values, value)
    return torch.zeros_like(gradient).index_add_(0, torch.cat(indices), torch.cat(values)) / world


def applied(gradient: torch.Tensor, k: int, steps: int, feedback: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of what `steps` steps apply of one gradient a step, and the residual that is left."""
    residual = torch.zeros_like(gradient)
    sent = [top_k_mean(gradient, residual if feedback else None, k) for _ in range(steps)]
    return torch.stack(sent).sum(0), residual


def main() -> None:
    world = dist.get_world_size()
    gradients = torch.randn(world, 16, generator=torch.Generator().manual_seed(0)).double()
    whole = 50 * gradients.mean(0)  # what one process applies in 50 steps: everything
    kept, residual = applied(gradients[dist.get_rank()], k=2, steps=50, feedback=True)  # an eighth is sent
    lost, _ = applied(gradients[dist.get_rank()], k=2, steps=50, feedback=False)
    # Nothing is lost: what was sent and what is remembered add up. Without feedback most of it never arrives.
    dist.all_reduce(residual)
    assert torch.allclose(kept + residual / world, whole)
    assert (kept - whole).norm() < 0.25 * (lost - whole).norm()
    everything, _ = applied(gradients[dist.get_rank()], k=16, steps=50, feedback=False)
    assert torch.allclose(everything, whole)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: with error feedback top-2 applies what one process does, later")
    dist.destroy_process_group()
