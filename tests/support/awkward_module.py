"""A module with every difficulty that a module may have, trained over ranks and by plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.process.environment import World


class _Block(torch.nn.Module):
    """Uneven sizes, a scalar, a frozen matrix, an output that is no tensor, a weight that half of the ranks use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, 7)
        self.outer = torch.nn.Linear(7, width, bias=False)
        self.frozen = torch.nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.sometimes = torch.nn.Parameter(torch.full((3, width), 0.1))

    def forward(self, x: torch.Tensor, use: bool) -> dict[str, torch.Tensor]:
        x = x + self.outer(torch.tanh(self.inner(self.frozen(x)))) * self.scale
        return {"x": x + self.sometimes.sum(0) if use else x}


class Awkward(torch.nn.Module):
    def __init__(self, width: int = 5, depth: int = 3) -> None:
        super().__init__()
        self.first = torch.nn.Conv1d(2, width, 1)
        self.blocks = torch.nn.ModuleList([_Block(width) for _ in range(depth)])
        self.unused = torch.nn.Parameter(torch.ones(11))
        self.last = torch.nn.Linear(width, width)
        self.tied = torch.nn.Linear(width, width)
        self.tied.weight = self.last.weight
        self.blocks[-1].outer.weight = self.blocks[0].outer.weight  # shared between units
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.first(x).transpose(1, 2) + self.shift
        for block in self.blocks:
            x = block(x, use)["x"]
        return self.tied(torch.tanh(self.last(x)))


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-1, momentum=0.9),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.5),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


def _batch(step: int, micro_batch: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + micro_batch * 10 + replica)
    x = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)


def seeded(seed: int) -> Awkward:
    torch.manual_seed(seed)
    return Awkward().double()


def parallelized(
    world: World,
    line: str,
    optimizer: str,
    clip: float,
    steps: tuple[int, int],
    accumulation: int,
    folder: Path | None = None,
    named: bool = False,
) -> dict[str, Any]:
    """Train the awkward module from rank 0's weights; return the losses and the final state.

    With a folder, the run continues from the checkpoint there and saves to it.
    """
    module = seeded(world.rank)  # different on every rank, so that rank 0's must win
    model = spread(world, module, line, units=list(module.blocks) if named else None)
    update = model.attach(OPTIMIZERS[optimizer](model.parameters()))
    begin = model.load(folder) if folder else 0
    assert begin == steps[0]
    norms = []
    replica = model.replica
    for step in range(*steps):
        update.zero_grad()
        for i in range(accumulation):
            x, y = _batch(step, i, replica)
            loss = (model(x, use=(replica + i) % 2 == 0) - y).square().mean() / accumulation
            model.backward(loss, last=i == accumulation - 1)
        norms.append(model.clip(clip))
        update.step()
    state = model.state_dict()
    if folder:
        model.save(folder, steps[1])
    with torch.no_grad():
        out = model(_batch(0, 0, 0)[0], use=True)
    model.comm.barrier()
    return {"norms": norms, "state": {n: t.numpy() for n, t in state.items()}, "out": out.numpy()}


def oracle(dp: int, optimizer: str, clip: float, steps: tuple[int, int], accumulation: int) -> dict[str, Any]:
    """Do the same on one process with plain torch."""
    module = seeded(0)
    trained = [p for p in module.parameters() if p.requires_grad]
    update = OPTIMIZERS[optimizer](trained)
    norms = []
    for step in range(*steps):
        update.zero_grad()
        for replica in range(dp):
            for i in range(accumulation):
                x, y = _batch(step, i, replica)
                ((module(x, use=(replica + i) % 2 == 0) - y).square().mean() / accumulation / dp).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip)))
        update.step()
    with torch.no_grad():
        out = module(_batch(0, 0, 0)[0], use=True)
    return {"norms": norms, "state": {n: t.numpy() for n, t in module.state_dict().items()}, "out": out.numpy()}


class Stack(torch.nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(depth)])

    def forward(self, x: torch.Tensor, skip: int = -1, again: bool = False) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != skip:
                run = checkpoint(layer, x, use_reentrant=True) if again else layer(x)
                x = x + torch.tanh(run)
        return x


def odd_passes(world: World, line: str, depth: int) -> dict[str, Any]:
    """Train with layers skipped on all ranks, recomputed passes, and unrelated passes between those of a step.

    Returns the final weights.
    """
    torch.manual_seed(0)
    model = spread(world, Stack(depth).double(), line)
    update = model.attach(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(12):
        torch.manual_seed(10 * step + world.rank)
        x = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
        model.backward(model(x, skip=step % (depth + 1), again=step % 2 == 1).square().sum())
        if step % 3 == 1:
            model(x).sum()  # with gradients, for a log
        update.step()
        if step % 4 == 2:
            with torch.no_grad():
                model(x)
    return {name: t.numpy() for name, t in model.state_dict().items()}
