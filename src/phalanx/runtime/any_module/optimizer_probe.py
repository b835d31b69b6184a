"""Whether an optimizer treats every element by itself, as shards need: it is tried on a small matrix, whole and as
two ranks would hold it.

Names tell only for torch's own. One of the user's that scales by a tensor's norm (LAMB, LARS), clips by the norm of
all, or asks for two dims (Muon) runs on flat pieces without an error and computes something else.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

_SHAPE, _CUT, _STEPS = (6, 4), 10, 2
_BOUND = 1e-6
"""The largest difference, as a share of the update's norm: rounding alone is far below, other rules are far above."""
_NOT_COPIED = ("state", "param_groups", "_optimizer_")
"""Attributes of an optimizer that its copy gets anew, hooks among them."""


def looks_beyond_elements(optimizer: torch.optim.Optimizer, device: torch.device, flat: bool) -> bool:
    """Whether the update of an element depends on other elements, or with `flat` shards on the shape of its tensor.
    False if the trial cannot tell, since the optimizer draws random numbers or needs more than gradients."""
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(_SHAPE, generator=draw, dtype=torch.float64) for _ in range(1 + _STEPS)]
    start, *gradients = (t.to(device) for t in drawn)
    shards = [t.view(-1) if flat else t for t in (start, *gradients)]
    cut = _CUT if flat else _CUT // _SHAPE[1]
    try:
        whole = [_updated(optimizer, start, gradients, seed).view_as(shards[0]) for seed in (0, 1)]
        ranks = [[t[:cut] for t in shards], [t[cut:] for t in shards]]
        parts = torch.cat([_updated(optimizer, own, grads, 0) for own, *grads in ranks])
    except Exception:  # a stranger's class, whose constructor and step were never called like this
        return False
    moved = float((whole[0] - shards[0]).norm())
    drawn_alike = not float((whole[0] - whole[1]).norm())
    return drawn_alike and not float((parts - whole[0]).norm()) <= _BOUND * moved


def _updated(optimizer: torch.optim.Optimizer, start: Tensor, gradients: list[Tensor], seed: int) -> Tensor:
    """Return a tensor after steps of a copy of an optimizer, with its own settings but a rate that is not 0."""
    own = torch.nn.Parameter(start.clone())
    kept: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(
        {key: copy.deepcopy(value, kept) for key, value in vars(optimizer).items() if not key.startswith(_NOT_COPIED)}
    )
    group = {**optimizer.param_groups[0], "params": [own], "lr": 0.1}
    trial.__setstate__({"state": defaultdict(dict), "param_groups": [group]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for g in gradients:
            own.grad = g.clone()
            trial.step()
    return own.detach()
