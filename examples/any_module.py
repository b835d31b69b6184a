"""Data, pipeline and tensor parallelism for a module of your own.

python examples/any_module.py                                            one process
torchrun --nproc-per-node 2 examples/any_module.py zero=3                two, parameters sharded
torchrun --nproc-per-node 2 examples/any_module.py pp=2 3                two, the second begins with child 3
torchrun --nproc-per-node 2 examples/any_module.py zero=1,compression=int8
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx

STEPS, MICRO_BATCHES, BATCH = 100, 2, 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.inner(self.norm(x)))


def net(width: int = 64, depth: int = 4) -> nn.Sequential:
    """Any module trains data-parallel; one whose children run one after the other can be a pipeline."""
    return nn.Sequential(nn.Linear(8, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 1))


def batch(step: int, micro_batch: int, replica: int) -> tuple[Tensor, Tensor]:
    """Each replica's own share of the data."""
    generator = torch.Generator().manual_seed(1_000_000 * replica + 1_000 * step + micro_batch)
    x = torch.randn(BATCH, 8, generator=generator)
    return x, (x[:, 0] * x[:, 1]).sin() + x[:, 2]


def loss(out: Tensor, y: Tensor) -> Tensor:
    """The gradient is that of the sum over the micro-batches, the mean over the replicas."""
    return F.mse_loss(out.squeeze(-1), y) / MICRO_BATCHES


def main() -> None:
    line, *cuts = sys.argv[1:] or [""]
    model = phalanx.parallelize(net(), line, cuts=[int(cut) for cut in cuts] or None)
    optimizer = model.attach(torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in range(STEPS):
        value = model.step([batch(step, i, model.replica) for i in range(MICRO_BATCHES)], loss)
        norm = model.clip(1.0)
        optimizer.step()
        if model.rank == 0 and step % 20 == 19:
            print(f"step {step + 1}  loss {value:.3f}  gradient norm {norm:.3f}")


if __name__ == "__main__":
    main()
