"""torch's AdamW and SGD without the import of its compiler.

torch.optim imports torch._dynamo when an optimizer is made, only to keep the compiler out of it: nearly two seconds
of a rank's start. Here nothing is compiled; arithmetic, state and hooks are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch

from phalanx.spec.optimizers import Optimizer, OptimizerName

_add = unwrap(torch.optim.Optimizer.add_param_group)
_adamw, _sgd = unwrap(torch.optim.AdamW.step), unwrap(torch.optim.SGD.step)


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW without its imports of the compiler."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _add(self, param_group)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        _adamw(self)


class SGD(torch.optim.SGD):
    """torch.optim.SGD without its imports of the compiler."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _add(self, param_group)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        _sgd(self)


KERNELS: dict[OptimizerName, Callable[[list[dict[str, Any]], Optimizer], torch.optim.Optimizer]] = {
    "sgd": lambda groups, s: SGD(groups, lr=0.0, momentum=s.momentum, fused=True),
    "adamw": lambda groups, s: AdamW(groups, lr=0.0, betas=s.betas, eps=s.eps, fused=True),
}
"""What steps each optimizer of a job, over groups of tensors."""
