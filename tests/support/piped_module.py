"""A Sequential of uneven widths, with a frozen child, statistics and a tied pair, trained as a pipeline and by plain
torch on one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.process.environment import World
from phalanx.spec.errors import InputError


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        # Without a device, as most code is written: the shapes at a cut come from the meta device.
        return x + torch.tanh(self.inner(self.norm(x))) * torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)


def make(seed: int, tied: bool = False) -> nn.Sequential:
    """Return a module in fp64: ids (rows, 4) -> logits (rows, 9). Its names are numbers."""
    torch.manual_seed(seed)
    frozen = nn.Linear(10, 10)
    frozen.requires_grad_(False)
    parts = [nn.Embedding(9, 6), _Residual(6), nn.Linear(6, 10), frozen, nn.Tanh(), _Residual(10), nn.Flatten()]
    module = nn.Sequential(*parts, nn.Linear(40, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 9))
    if tied:
        module[7] = nn.Linear(40, 12)
        module.insert(8, nn.Linear(12, 12))
        module[8].weight = module[10].weight
    return module.double()


def loss(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out, target) / 4


def _batches(step: int, replica: int, count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(100 * step + replica)
    ids = torch.randint(9, (count, 3, 5), generator=draw)
    return [(i[:, :4], i[:, 4]) for i in ids]


def piped(
    world: World,
    line: str,
    cuts: Sequence[int | str] | None,
    count: int,
    steps: tuple[int, int],
    folder: Path | None = None,
    tied: bool = False,
) -> dict[str, Any]:
    """Train by `model.step`; return losses, norms, and what remains: the state, and a loss without training."""
    model = spread(world, make(world.rank, tied), line, cuts=cuts)
    update = model.attach(torch.optim.AdamW(model.parameters(), lr=0.01))
    begin = model.load(folder) if folder else 0
    assert begin == steps[0]
    losses, norms = [], []
    for step in range(*steps):
        losses.append(model.step(_batches(step, model.replica, count), loss))
        norms.append(model.clip(0.5))
        update.step()
    if folder:
        model.save(folder, steps[1])
    state = model.state_dict()
    model.load_state_dict(state)
    again = model.state_dict()
    assert all(torch.equal(t, again[name]) for name, t in state.items())
    model.eval()
    after = model.evaluate(*_batches(99, 0, 1)[0], loss)
    model.comm.barrier()
    return {
        "losses": losses,
        "replica": model.replica,
        "norms": norms,
        "after": after,
        "state": {name: t.numpy() for name, t in state.items()},
        "held": sum(p.numel() for p in model.module.parameters()),
    }


def whole(dp: int, count: int, steps: int, tied: bool = False) -> dict[str, Any]:
    """Do the same on one process with plain torch. Counts of passes are those of one replica."""
    module = make(0, tied)
    update = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
    losses: list[list[float]] = []
    norms = []
    for step in range(steps):
        update.zero_grad()
        losses.append([0.0] * dp)
        for replica in range(dp):
            for x, y in _batches(step, replica, count):
                value = loss(module(x), y)
                (value / dp).backward()
                losses[-1][replica] += float(value.detach())
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        update.step()
    for name, buffer in module.named_buffers():
        if name.endswith("seen"):
            buffer //= dp
    state = {name: t.numpy().copy() for name, t in module.state_dict().items()}
    x, y = _batches(99, 0, 1)[0]
    with torch.no_grad():
        after = float(loss(module(x), y))
    return {"losses": losses, "norms": norms, "state": state, "after": after}


def refused(world: World, case: str) -> str:
    """Return the message of a pipeline that cannot be made."""
    module: nn.Module = make(0, tied=case == "tied")
    line, cuts, kind = "pp=2", [5], case
    if kind == "no cuts":
        cuts = None  # type: ignore[assignment]
    if kind == "descending":
        line, cuts = "pp=2,schedule=interleaved,virtual=2", [5, 5, 7]
    if kind == "name":
        cuts = ["elevn"]  # type: ignore[list-item]
    if kind == "tied":
        cuts = [9]
    if kind == "frozen":
        line, cuts = "pp=2", [1]
        module[0].requires_grad_(False)  # type: ignore[index]
    if kind == "schedule":
        line = "pp=2,schedule=zb-h1"
    if kind == "module":
        module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    if kind == "tp":
        line = "pp=2,tp=2"
    try:
        model = spread(world, module, line, cuts=cuts)
    except InputError as error:
        return str(error)
    model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = _batches(0, 0, 3)
    if kind == "call":
        try:
            model(batches[0][0])
        except RuntimeError as error:
            return str(error)
    if kind == "ragged":
        batches[1] = (batches[1][0][:2], batches[1][1][:2])
    try:
        model.step(batches, loss if kind != "loss" else lambda out, _: out)
    except InputError as error:
        return str(error)
    raise AssertionError("nothing was refused")
