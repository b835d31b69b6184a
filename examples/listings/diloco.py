"""DiLoCo: replicas train alone for H steps, then an outer optimizer takes the mean of how far they went.

    torchrun --nproc-per-node 4 examples/listings/diloco.py

One all-reduce of the parameters every H steps instead of one of the gradients every step (Douillard et al. 2023).

What the usual listing gets wrong: it averages the parameters and forgets the outer momentum (that is local SGD); it
resets the inner optimizer's moments at every synchronisation; or its outer gradient has the wrong sign (it is where
the replicas began minus where they are, so that a step against it follows them).
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: torch.optim imports it, and its defaults would keep the group alive


def diloco(w: torch.Tensor, batches: torch.Tensor, h: int, outer_lr: float, momentum: float) -> torch.Tensor:
    """Train w on `batches` (steps, rows, 4), this rank's own; synchronise after every h steps. Returns w."""
    inner = torch.optim.SGD([w], lr=0.1)  # AdamW in earnest: its moments stay on their replica
    outer_w = w.detach().clone().requires_grad_()
    outer = torch.optim.SGD([outer_w], lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    for step, batch in enumerate(batches, 1):
        inner.zero_grad()
        loss_of(w, batch).backward()
        inner.step()
        if step % h == 0:
            outer_w.grad = (outer_w - w).detach()
            dist.all_reduce(outer_w.grad)
            outer_w.grad /= dist.get_world_size()
            outer.step()
            w.data.copy_(outer_w)  # every replica goes on from the same place
    return w.detach()


def loss_of(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (batch @ w - batch.sum(1)).square().mean()  # fitted by w = (1, 1, 1, 1)


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = torch.randn(world, 60, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def start() -> torch.Tensor:
        return torch.zeros(4, dtype=torch.float64, requires_grad=True)

    # One process on all data. With h = 1 and an outer SGD of rate 1, DiLoCo is plain data parallelism.
    w = start()
    plain = torch.optim.SGD([w], lr=0.1)
    for step in range(60):
        plain.zero_grad()
        loss_of(w, batches[:, step].flatten(0, 1)).backward()
        plain.step()
    assert torch.allclose(diloco(start(), batches[rank], h=1, outer_lr=1.0, momentum=0.0), w.detach(), atol=1e-12)
    # With h = 10 it sends a tenth, and comes to the same minimum.
    far = diloco(start(), batches[rank], h=10, outer_lr=0.7, momentum=0.5)
    assert (far - 1).norm() < 0.05


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: h = 1 equals plain data parallelism, h = 10 finds the minimum")
    dist.destroy_process_group()
