"""Our operations on this machine's device, compared with fp64 on the CPU:

    python -m benchmarks.gpu.functions OUT.json

Values and gradients of what nn/functional.py, attention and the optimizer compute, in the types that people train in.
A row is good if its error is below the bound of its type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.nn import functional
from phalanx.nn.optimizers import AdamW
from phalanx.runtime.autograd import recompute
from phalanx.runtime.autograd.narrow_product import runs_on
from phalanx.runtime.process.environment import ALONE
from phalanx.spec.files.plan import write_json
from phalanx.spec.number_formats import MULTIPLIED, NumberFormat

BOUNDS = {"float32": 1e-4, "bfloat16": 1e-2}
"""Relative error |x - x*| / |x*| of a tensor: on CPUs at most 3e-7 and 4e-3."""
NARROW_BOUNDS = {8: 8e-2, 4: 3e-1}
"""The same of products of narrow formats, by bits: on CPUs 3.8e-2 and 1.4e-1."""
Function = Callable[..., Tensor]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _rotary(x: Tensor) -> Tensor:
    angles = torch.arange(16 * 8, dtype=torch.float64, device=x.device).view(16, 1, 8) / 40
    return functional.rotary(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


def _narrow(operands: NumberFormat, x: Tensor, weight: Tensor) -> Tensor:
    return recompute.product(x, weight, None, True, operands)


def _targets(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device) % 300


CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (lambda x, w: functional.rms_norm(x, w, 1e-5), ((256, 64), (64,))),
    "swiglu": (functional.swiglu, ((256, 64), (256, 64))),
    "rotary": (_rotary, ((2, 16, 4, 16),)),
    "attention": (_attention, ((2, 4, 128, 64),) * 3),
    "cross_entropy": (
        lambda x, w: functional.cross_entropy(x @ w.t(), _targets(x)),
        ((256, 64), (300, 64)),
    ),
    "linear_cross_entropy": (
        lambda x, w: functional.linear_cross_entropy(x, w, _targets(x)),
        ((256, 64), (300, 64)),
    ),
}


def _drawn(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) / 2 for shape in shapes]


def _with_gradients(of: Function, inputs: list[Tensor]) -> list[Tensor]:
    given = [x.requires_grad_() for x in inputs]
    out = of(*given)
    weight = 1 + torch.arange(out.numel(), device=out.device).view(out.shape) % 7  # of each element, not all alike
    gradients = torch.autograd.grad((out * weight.to(out.dtype)).sum(), given)
    return [out.detach(), *gradients]


def _stepped(inputs: list[Tensor]) -> list[Tensor]:
    (weight,) = inputs
    optimizer = AdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for step in range(3):
        weight.grad = torch.sin(weight.detach() * (step + 1))
        optimizer.step()
    return [weight.detach()]


def _error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = ((a.double().cpu(), b) for a, b in zip(ours, theirs, strict=True))
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def rows(device: torch.device) -> list[dict[str, Any]]:
    """Compare every operation in every type."""
    result = []
    for name, bound in BOUNDS.items():
        dtype = getattr(torch, name)
        for case, (of, shapes) in CASES.items():
            exact = [x.to(dtype) for x in _drawn(shapes)]  # what both compute from
            truth = _with_gradients(of, [x.double() for x in exact])
            error = _error(_with_gradients(of, [x.to(device) for x in exact]), truth)
            result.append({"what": case, "dtype": name, "error": error, "bound": bound})
    for operands in MULTIPLIED:
        if device.type == "cpu" or runs_on(operands, device):
            exact = [x.bfloat16() for x in _drawn(((64, 256), (128, 256)))]
            truth = _with_gradients(lambda x, w: x @ w.t(), [x.double() for x in exact])
            error = _error(_with_gradients(partial(_narrow, operands), [x.to(device) for x in exact]), truth)
            result.append(
                {"what": "product", "dtype": operands.name, "error": error, "bound": NARROW_BOUNDS[operands.bits]}
            )
    (weights,) = _drawn(((512,),))
    truth = _stepped([weights.clone()])
    error = _error(_stepped([weights.to(device, torch.float32)]), truth)
    result.append({"what": "AdamW", "dtype": "float32", "error": error, "bound": BOUNDS["float32"]})
    return result


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), rows(ALONE.device))
