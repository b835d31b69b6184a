"""Data parallelism for a module of your own.

python examples/any_module.py                                            one process
torchrun --nproc-per-node 2 examples/any_module.py zero=3                two, parameters sharded
torchrun --nproc-per-node 2 examples/any_module.py zero=1,compression=int8
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx

STEPS, MICRO_BATCHES, BATCH = 100, 2, 16


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.last(x).squeeze(-1)  # type: ignore[no-any-return]


def batch(step: int, micro_batch: int, replica: int) -> tuple[Tensor, Tensor]:
    """Each replica's own share of the data."""
    generator = torch.Generator().manual_seed(1_000_000 * replica + 1_000 * step + micro_batch)
    x = torch.randn(BATCH, 8, generator=generator)
    return x, (x[:, 0] * x[:, 1]).sin() + x[:, 2]


def main() -> None:
    model = phalanx.parallelize(Net(), sys.argv[1] if len(sys.argv) > 1 else "")
    optimizer = model.attach(torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            x, y = batch(step, i, model.replica)
            loss = F.mse_loss(model(x), y) / MICRO_BATCHES
            model.backward(loss, last=i == MICRO_BATCHES - 1)
        norm = model.clip(1.0)
        optimizer.step()
        if model.rank == 0 and step % 20 == 19:
            print(f"step {step + 1}  loss {loss.item() * MICRO_BATCHES:.3f}  gradient norm {norm:.3f}")


if __name__ == "__main__":
    main()
