"""Operations for which the host waits for the device, because their result, or its shape, depends on values."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
WAITS = {
    _aten._local_scalar_dense.default: "item",
    _aten.is_nonzero.default: "is_nonzero",
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten.equal.default: "equal",
    _aten._unique2.default: "unique",
    _aten.unique_consecutive.default: "unique_consecutive",
    _aten.unique_dim.default: "unique",
    _aten.repeat_interleave.Tensor: "repeat_interleave",
    _aten.bincount.default: "bincount",
}


def wait_of(func: Any, kwargs: dict[str, Any]) -> str:
    """Return the name of the operation if the host waits for its result, else ""."""
    if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return ""
    return WAITS.get(func, "")
