"""Modules whose blocks are lists of layers, or are called in another order than they are listed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.process.environment import World
from phalanx.runtime.process.world import group
from phalanx.spec.errors import InputError


class _Pair(nn.Module):
    """Two layers and one that all pairs share; nothing calls the pair itself."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared, self.a, self.b = shared, nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _Gated(nn.Module):
    """Some batches use one of two layers, so that ranks differ in which parameters get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x)) + (self.b(x) if x.sum() > 0 else 0)


class _Carrying(nn.Module):
    """The first block makes a bias, which all hand on, as T5's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bias = self.b(x) if bias is None else bias
        return x + torch.tanh(self.a(x) + bias), bias


ORDERS = {"again": (0, 2, 0, 1, 1), "backwards": (2, 1, 0), "in turns": (0, 2, 1)}


class Listed(nn.Module):
    """`kind`: "pairs", ModuleLists in a ModuleList; "parts", modules of which only parts are called; "two views",
    blocks that two views of a batch go through before their product; "routed", a block that the batch chooses;
    "more", one that some batches go through again; "carried", blocks with a second output; "plain", residual
    blocks and a head; "compiled", the same under torch.compile; or one of ORDERS, in which blocks are called."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        shared, self.kind = nn.Linear(6, 6), kind
        lists = [nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 6)]) for _ in range(3)]
        gated = [_Gated() for _ in range(4 if kind == "routed" else 3)]
        carrying = [_Carrying() for _ in range(3)]
        plain = [nn.Sequential(*pair) for pair in lists]
        blocks = {
            **{"carried": carrying, "pairs": lists, "parts": [_Pair(shared) for _ in range(3)]},
            **{"plain": plain, "compiled": plain},
        }.get(kind, gated)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(6, 6) if kind in ("plain", "compiled") else None
        if kind == "compiled":
            self.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        if self.head is not None:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)
        if self.kind == "carried":
            bias = None
            for block in self.blocks:
                x, bias = block(x, bias)
            return x
        if self.kind not in ("pairs", "parts"):
            more = int(x.sum() > 0)
            chosen = {"routed": (0, 1 + more, 3), "more": (0, 1, 2) + (1,) * more}.get(self.kind, (0, 1, 2))
            order = [self.blocks[i] for i in ORDERS.get(self.kind, chosen)]
            views = [x, x.flip(1)] if self.kind == "two views" else [x]
            return torch.stack([nn.Sequential(*order)(view) for view in views]).prod(0)
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


def refusal(world: World, line: str, kind: str, timeout_s: float = 300.0) -> str:
    """Return what is said of a training; "" if nothing is."""
    gloo: Any = group(tuple(range(world.size)))._get_backend(torch.device("cpu"))
    gloo._set_default_timeout(timedelta(seconds=timeout_s))
    try:
        train(world, line, kind)
    except (InputError, RuntimeError) as error:
        return str(error)
    return ""


def readings(world: World, line: str) -> list[str]:
    """Return what is said of each way to read `.grad` before the update; "" if nothing is."""
    layer = nn.Linear(4, 4)
    model = spread(world, layer, line)
    held = list(model.parameters())
    update = model.attach(torch.optim.SGD(held, lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    model.backward(scaler.scale(model(torch.ones(1, 4)).sum()))
    said = []
    for read in (
        lambda: nn.utils.clip_grad_norm_(held, 1.0),
        lambda: nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
        lambda: [p.grad.square() for p in layer.parameters() if p.grad is not None],
        lambda: scaler.unscale_(update),
    ):
        try:
            read()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    update.step()
    assert all(p.grad is None for p in (*held, *layer.parameters()))
    return said
