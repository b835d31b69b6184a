"""torch's AdamW and SGD without the import of its compiler, and Muon for matrices that are sharded over ranks.

torch.optim imports torch._dynamo when an optimizer is made, only to keep the compiler out of it: nearly two seconds
of a rank's start. Here nothing is compiled; arithmetic, state and hooks are torch's own.
"""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from phalanx.runtime.data_parallel.whole_matrices import WholeMatrices
from phalanx.spec.optimizers import MUON_RMS, Optimizer, OptimizerName

Groups = list[dict[str, Any]]
"""Groups of tensors: `params`, their names `fqns`, `weight_decay`, and whether they are `matrices` of hidden layers
that their optimizer treats separately."""

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


_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the Newton-Schulz iteration, with maximal slope at zero (Jordan et al. 2024)."""
_LEAST_NORM = 1e-7


def orthogonalise(whole: list[Tensor], iterations: int) -> Tensor:
    """Return approximately U Vᵀ for a matrix U S Vᵀ, (n, w), in its own type. The matrix is taken out of its list and
    overwritten, so that its memory is free after the first iteration."""
    x = whole.pop()
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x.div_(torch.linalg.vector_norm(x).clamp_(min=_LEAST_NORM))
    for _ in range(iterations):
        square = x @ x.mT
        square = torch.addmm(square, square, square, beta=_B, alpha=_C)
        x = torch.addmm(x, square, x, beta=_A)
    return x.mT if tall else x


class Muon(AdamW):
    """Muon (Jordan et al. 2024) for parameters that are matrices of hidden layers, AdamW for all others.

        momentum   M <- mu M + (1 - mu) G                  G the gradient, of this rank's pieces
        direction  D = mu M + (1 - mu) G                   Nesterov's
        update     W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) U Vᵀ, with D = U S Vᵀ

    as torch.optim.Muon does with adjust_lr_fn="match_rms_adamw", under which AdamW's learning rate and decay serve
    both. `whole` brings the pieces of D together, and sends the pieces of U Vᵀ back: the communication of an
    update."""

    def __init__(self, groups: Groups, s: Optimizer, whole: WholeMatrices | None) -> None:
        assert whole is not None
        super().__init__(groups, lr=0.0, betas=s.betas, eps=s.eps, fused=True)
        self._whole, self._momentum, self._iterations = whole, s.first_decay, s.row.matrices.iterations
        self._tensors: dict[str, Tensor] = {
            name: tensor for g in groups if g["matrices"] for name, tensor in zip(g["fqns"], g["params"], strict=True)
        }

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        every = self.param_groups
        # AdamW sees its own groups alone.
        self.param_groups = [group for group in every if not group["matrices"]]
        _adamw(self)
        self.param_groups = every
        group = next((group for group in every if group["matrices"]), every[0])
        lr, decay = group["lr"], group["lr"] * group["weight_decay"]
        # Momentum of this rank's pieces. Where the device flags a step as not finite, nothing changes.
        skip = getattr(self, "found_inf", None)
        for tensor in self._tensors.values():
            momentum, gradient = self.state[tensor]["momentum_buffer"], tensor.grad
            assert gradient is not None
            gradient = gradient if skip is None else torch.where(skip > 0, momentum, gradient)
            momentum.lerp_(gradient, 1 - self._momentum)

        def direction(name: str, start: int, stop: int) -> Tensor:
            tensor = self._tensors[name]
            assert tensor.grad is not None
            gradient = tensor.grad.view(-1)[start:stop]
            return gradient.lerp(self.state[tensor]["momentum_buffer"].view(-1)[start:stop], self._momentum)

        def apply(name: str, start: int, shape: tuple[int, int], result: Tensor) -> None:
            weight = self._tensors[name].view(-1)[start : start + result.numel()]
            step = lr * MUON_RMS * max(shape) ** 0.5
            if skip is None:
                weight.mul_(1 - decay).add_(result, alpha=-step)
            else:
                changed = weight.mul(1 - decay).add_(result, alpha=-step)
                weight.copy_(torch.where(skip > 0, weight, changed))

        self._whole.update(direction, lambda whole: orthogonalise(whole, self._iterations), apply)


KERNELS: dict[OptimizerName, Callable[[Groups, Optimizer, WholeMatrices | None], torch.optim.Optimizer]] = {
    "sgd": lambda groups, s, _: SGD(groups, lr=0.0, momentum=s.first_decay, fused=True),
    "adamw": lambda groups, s, _: AdamW(groups, lr=0.0, betas=s.betas, eps=s.eps, fused=True),
    "muon": Muon,
}
"""Optimizer constructor by its name in a job."""
