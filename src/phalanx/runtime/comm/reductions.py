"""Reductions by name: from torch, from Python's `operator`, or a user's MODULE:FUNCTION."""

import importlib
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.spec.errors import InputError, nearest

Combine = Callable[[Tensor, Tensor], Tensor]
"""Combines two tensors of equal shape elementwise."""
NAMED: dict[str, Combine] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "gcd": torch.gcd,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


def reduction_by_name(text: str) -> Combine:
    """Return a reduction by name. MODULE:FUNCTION is imported, from the working directory too. Raises InputError."""
    if text in NAMED:
        return NAMED[text]
    module, colon, function = text.partition(":")
    if not colon:
        raise InputError("with", text, "is not a reduction", nearest(text, NAMED) or "or write MODULE:FUNCTION")
    if "" not in sys.path:
        sys.path.append("")  # last, so that no file of this folder shadows an installed module
    try:
        combine = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's module, which may raise anything
        raise InputError("with", text, f"cannot be imported: {error}", "write MODULE:FUNCTION") from None
    if not callable(combine):
        raise InputError("with", text, "is not a function", "name a function of two tensors")
    return combine  # type: ignore[no-any-return]
