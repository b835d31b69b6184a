"""A generator and a discriminator, each with its optimizer, as a GAN trains them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.process.environment import World


def _make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    discriminator = nn.Sequential(
        nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 1)
    )
    return generator.double(), discriminator.double()


def _drawn(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Real samples (4, 4) and noise (4, 3)."""
    draw = torch.Generator().manual_seed(10 * step + replica)
    return tuple(torch.randn(4, n, generator=draw, dtype=torch.float64) for n in (4, 3))  # type: ignore[return-value]


def _state(*modules: nn.Module) -> dict[str, Any]:
    return {f"{i}.{name}": t.numpy() for i, m in enumerate(modules) for name, t in m.state_dict().items()}


def train(world: World, line: str) -> dict[str, Any]:
    """Train both for three steps over the ranks; the generator's loss goes through the discriminator."""
    models = [spread(world, m, line) for m in _make()]
    generator, discriminator = models
    updates = [m.attach(torch.optim.Adam(m.parameters(), lr=0.05)) for m in models]
    for step in range(3):
        real, noise = _drawn(step, generator.replica)
        discriminator.backward(F.softplus(-discriminator(real)).mean(), last=False)
        fake = generator(noise)
        discriminator.backward(F.softplus(discriminator(fake.detach())).mean())
        updates[1].step()
        discriminator.requires_grad_(False)
        generator.backward(F.softplus(-discriminator(fake)).mean())
        updates[0].step()
        discriminator.requires_grad_(True)
    return _state(*models)


def train_whole(replicas: int) -> dict[str, Any]:
    """Do the same in one process, by torch alone."""
    generator, discriminator = _make()
    updates = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (generator, discriminator)]
    for step in range(3):
        drawn = [_drawn(step, replica) for replica in range(replicas)]
        fakes = [generator(noise) for _, noise in drawn]
        updates[1].zero_grad()
        for (real, _), fake in zip(drawn, fakes, strict=True):
            loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
            (loss / replicas).backward()
        updates[1].step()
        updates[0].zero_grad()
        for fake in fakes:
            (F.softplus(-discriminator(fake)).mean() / replicas).backward()
        updates[0].step()
    return _state(generator, discriminator)
