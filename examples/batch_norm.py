"""BatchNorm under data parallelism: three meanings, each held equal to one process.

torchrun --nproc-per-node 2 examples/batch_norm.py             buffers follow rank 0, are averaged, are synchronised
torchrun --nproc-per-node 4 examples/batch_norm.py zero=3      under another strategy

With "rank 0" and "average" each rank normalises by its own batch. One process does the same if it takes the ranks'
batches one after the other from the same statistics, and then keeps the first's, or the mean. With "synchronise" all
ranks normalise by all batches: one process with one large batch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.runtime.any_module.parallel import Parallel

Meaning = Literal["rank 0", "average", "synchronise"]
MEANINGS: tuple[Meaning, ...] = ("rank 0", "average", "synchronise")
STEPS, MICRO_BATCHES, BATCH = 10, 2, 6


def net() -> nn.Sequential:
    """Convolutions, in fp64, so that only a mistake differs by more than 1e-9."""
    torch.manual_seed(0)
    first = (nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.GELU())
    last = (nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.Linear(16, 1))
    return nn.Sequential(*first, *last).double()


def batch(step: int, micro_batch: int, replica: int) -> tuple[Tensor, Tensor]:
    """Each replica's own share of the data, with a mean of its own."""
    generator = torch.Generator().manual_seed(1_000_000 * replica + 1_000 * step + micro_batch)
    x = torch.randn(BATCH, 2, 6, 6, generator=generator, dtype=torch.float64) + replica
    return x, x.flatten(1).square().mean(1, keepdim=True)


def loss(out: Tensor, y: Tensor) -> Tensor:
    """The gradient is that of the sum over the micro-batches, the mean over the replicas."""
    return F.mse_loss(out, y) / MICRO_BATCHES


def train(model: Parallel) -> dict[str, Tensor]:
    """Train this rank's share; return the state of the entire module."""
    optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
    for step in range(STEPS):
        model.step([batch(step, i, model.replica) for i in range(MICRO_BATCHES)], loss)
        optimizer.step()
    return model.state_dict()


def one_process(meaning: Meaning, replicas: int) -> dict[str, Tensor]:
    """Train on one process, by torch alone, as `meaning` says."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        if meaning == "synchronise":
            for i in range(MICRO_BATCHES):
                x, y = (torch.cat(parts) for parts in zip(*(batch(step, i, r) for r in range(replicas)), strict=True))
                loss(model(x), y).backward()
        else:
            _in_turn(model, step, replicas, _first if meaning == "rank 0" else _mean)
        optimizer.step()
    return model.state_dict()


def _in_turn(model: nn.Module, step: int, replicas: int, kept: Callable[[Sequence[Tensor]], Tensor]) -> None:
    before = copy.deepcopy(dict(model.named_buffers()))
    after = []
    for replica in range(replicas):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        for i in range(MICRO_BATCHES):
            x, y = batch(step, i, replica)
            (loss(model(x), y) / replicas).backward()
        after.append(copy.deepcopy(dict(model.named_buffers())))
    for name, buffer in model.named_buffers():
        buffer.copy_(kept([buffers[name] for buffers in after]))


def _first(of_replicas: Sequence[Tensor]) -> Tensor:
    return of_replicas[0]


def _mean(of_replicas: Sequence[Tensor]) -> Tensor:
    """Return the mean of statistics; counts are the first's."""
    first = of_replicas[0]
    return torch.stack(list(of_replicas)).mean(0) if first.is_floating_point() else first


def largest_difference(found: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, str]:
    """Return how far off the worst tensor is, over its own largest element, and its name."""
    assert found.keys() == truth.keys()
    off = {name: float((found[name] - t).abs().max() / t.abs().max()) for name, t in truth.items()}
    worst = max(off, key=lambda name: off[name])
    return off[worst], worst


def main() -> int:
    line = sys.argv[1] if len(sys.argv) > 1 else ""
    wrong = 0
    for meaning in MEANINGS:
        model = phalanx.parallelize(net(), line, buffers=meaning)
        off, name = largest_difference(train(model), one_process(meaning, model.strategy.dp))
        wrong += off > 1e-9
        if model.rank == 0:
            print(f"{meaning:12} equals one process to {off:.1e} after {STEPS} steps (worst: {name})")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
