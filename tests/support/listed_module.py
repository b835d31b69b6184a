"""Modules whose blocks are lists of layers, which the forward pass calls one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.process.environment import World
from phalanx.spec.errors import InputError


class _Pair(nn.Module):
    """Two layers and one that all pairs share; nothing calls the pair itself."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared, self.a, self.b = shared, nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Listed(nn.Module):
    """`kind`: "pairs", ModuleLists in a ModuleList; "parts", modules of which only parts are called."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        shared, self.kind = nn.Linear(6, 6), kind
        lists = [nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 6)]) for _ in range(3)]
        self.blocks = nn.ModuleList(lists if kind == "pairs" else [_Pair(shared) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.kind == "parts":
                x = x + block.b(torch.tanh(block.a(block.shared(x))))
            else:
                up, down = block  # type: ignore[misc]
                x = x + down(torch.tanh(up(x)))
        return x


def train(world: World, line: str, kind: str) -> dict[str, Any]:
    """Train three steps of two micro-batches; return the unsharded state."""
    torch.manual_seed(0)
    model = spread(world, Listed(kind).double(), line)
    update = model.attach(torch.optim.AdamW(model.parameters(), lr=0.05))
    draw = torch.Generator().manual_seed(1 + model.replica)
    for _ in range(3):
        for last in (False, True):
            x = torch.randn(4, 6, generator=draw, dtype=torch.float64)
            model.backward((model(x) - x.flip(0)).square().mean(), last=last)
        update.step()
    return {name: t.numpy() for name, t in model.state_dict().items()}


def refusal(world: World, line: str, kind: str) -> str:
    """Return what is said of a training; "" if nothing is."""
    try:
        train(world, line, kind)
    except InputError as error:
        return str(error)
    return ""
