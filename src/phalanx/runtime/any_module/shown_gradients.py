"""What a program finds in `.grad` from the last backward pass of a step until its update.

    whole on every rank   the reduced gradient itself, which own clipping or a GradScaler may change as in plain torch
    in parts over ranks   a stand-in: a norm or a search for infinities would see the part of one rank, so whatever
                          reads it raises

Either is there until the optimizer has stepped or `zero_grad` has dropped it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn


class GradientElsewhere(Tensor):
    """Stands, without memory, for a gradient of which this tensor's own `.grad` would be a part, or in another
    type."""

    @staticmethod
    def of(tensor: Tensor) -> Tensor:
        """Return the stand-in for a tensor's gradient."""
        stand_in: Tensor = Tensor._make_wrapper_subclass(
            GradientElsewhere, tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
        return stand_in

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "this .grad is not the whole gradient, which zero >= 1, tp and pp divide over the ranks: use "
            "model.clip(most) and model.norm(); with zero=0 the .grad of model.parameters() has all of it"
        )

    __torch_dispatch__ = __torch_function__


@torch.no_grad()
def show(
    masters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    used: Iterable[str],
    divided: bool,
) -> None:
    """Set `.grad` of what the optimizer updates and of the module's parameters, by name, where they were `used`."""
    for name in used:
        master = masters.get(name)
        whole = master is not None and not divided and gradients[name].dtype == master.dtype
        for tensor in (parameters[name], master):
            if tensor is not None:
                own = whole and tensor is master
                tensor.grad = gradients[name] if own else GradientElsewhere.of(tensor)
