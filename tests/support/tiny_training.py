"""A small text model that learns in seconds, to test what gradient compression does to a complete run."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.process.environment import World

CONTEXT, WIDTH, HIDDEN, BATCH = 3, 12, 64, 64


class NextByte(nn.Module):
    """Predicts the next byte from the last three (Bengio et al. 2003)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(128, WIDTH, bias=False)
        self.hidden = nn.Linear(CONTEXT * WIDTH, HIDDEN)
        self.out = nn.Linear(HIDDEN, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.embed.weight.T[x].flatten(1)  # (batch, context x width)
        return self.out(torch.tanh(self.hidden(seen)))


def learn(world: World, compression: str, steps: int, lr: float, text: bytes) -> float:
    """Train by plain gradient descent with a rate that falls to zero; return the mean loss over the last tenth."""
    data = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64)) % 128
    torch.manual_seed(0)
    model = spread(world, NextByte(), f"compression={compression}")
    optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=lr))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    generator = torch.Generator().manual_seed(world.rank)
    total, tail = 0.0, steps // 10
    for step in range(steps):
        at = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
        x = data[at[:, None] + torch.arange(CONTEXT)]
        loss = nn.functional.cross_entropy(model(x), data[at + CONTEXT])
        model.backward(loss)
        optimizer.step()
        schedule.step()
        if step >= steps - tail:
            total += float(loss.detach())
    mean = sum(model.comm.gather_objects(total / tail, "world")) / world.size
    model.comm.barrier()
    return mean
