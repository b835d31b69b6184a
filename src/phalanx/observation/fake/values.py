"""Stated values: the answers to a host that asks for the value of a fake tensor.

Constants are followed: a tensor that was filled with 0, or computed from such, has that value, and whether something
is nan or infinite has an answer. Counts are even: of integers and truth values the mean is followed, so that n
choices among k bins (histc, bincount, a scattered map and its sum) are n/k in each, and tokens go to experts in equal
parts. Everything else is 1, or False. Where a shape depends on values (nonzero, masks, unique), half of the elements
are selected; so any of several truth values holds, and `if mask.any()` is taken.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_aten = torch.ops.aten
_ANSWERS = {_aten.isnan.default: False, _aten.isinf.default: False, _aten.isfinite.default: True}
_COMPARED = {_aten.eq.Tensor: True, _aten.ne.Tensor: False, _aten.eq.Scalar: False, _aten.ne.Scalar: True}
"""Results of comparing a tensor with itself, or with infinity, as isnan, isinf and isfinite do."""
_FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero_": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILLED_BY = {"full": 1, "full_like": 1, "new_full": 2, "fill_": 1, "scalar_tensor": 0, "fill": 1}
"""Operations that fill a tensor, with the index of the argument that is the value."""
_REDUCED = ("any", "all", "max", "min", "mean", "amax", "amin", "stack", "cat", "sum")
_VIEWS = ("detach", "alias", "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "select", "slice")
_SENT = ("all_to_all_single", "wait_tensor")
_SAME = {"_to_copy", "clone", *_VIEWS, *_REDUCED, *_SENT}
"""Operations whose result has the value of their arguments, if these have the same."""


def value_of(tensor: Tensor) -> Any:
    """Return the value of all elements of a tensor if it is known, else None."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "_stated", None)
    if tensor.numel() != 1:
        return None
    with unset_fake_temporarily():
        return tensor.reshape(-1)[0].item()


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], out: Any) -> None:
    """Attach the value of an operation's result to it, if it follows from constants."""
    if not isinstance(out, FakeTensor):
        return
    name = func._overloadpacket.__name__
    value: Any = None
    if func in _ANSWERS:
        value = _ANSWERS[func]
    elif func in _COMPARED and _with_itself_or_infinity(args):
        value = _COMPARED[func]
    elif out.numel() == 1 or not out.dtype.is_floating_point:
        if name in _FILLS:
            value = _FILLS[name]
        elif name in _FILLED_BY:
            value = args[_FILLED_BY[name]] if len(args) > _FILLED_BY[name] else kwargs.get("fill_value")
            value = value_of(value) if isinstance(value, Tensor) else value
        elif name in ("histc", "bincount"):
            value = tensors[0].numel() / out.numel()
        elif name in ("scatter", "scatter_", "scatter_add", "scatter_add_"):
            value = _scattered(args)
        elif tensors:
            values = [value_of(t) for t in tensors]
            if name == "any" and values == [None] and tensors[0].numel() > 1 == out.numel():
                value = True
            elif None not in values:
                value = _computed(func, name, args, kwargs, tensors, values, out.numel())
    if value is not None:
        out._stated = value  # type: ignore[attr-defined]
    elif getattr(out, "_stated", None) is not None:  # changed in place
        del out._stated  # type: ignore[attr-defined]


def _with_itself_or_infinity(args: tuple[Any, ...]) -> bool:
    tensor, other = args[:2]
    return other is tensor if isinstance(other, Tensor) else isinstance(other, float) and math.isinf(other)


def _computed(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    values: list[Any],
    results: int,
) -> Any:
    """Return the value of an operation's `results` elements from the values of its arguments, or None."""
    if name == "sum":
        return values[0] * (tensors[0].numel() / results)
    if name in ("any", "all", "max", "min", "amax", "amin") and not float(values[0]).is_integer():
        return None  # a mean determines none of these
    if name in _SAME and len(set(values)) == 1:
        return values[0]
    in_place = name.endswith("_") and not name.startswith("_")
    if torch.Tag.pointwise not in func.tags or (func._schema.is_mutable and not in_place):
        return None
    if not all(float(value).is_integer() for value in values) and not tensors[0].dtype.is_floating_point:
        return None
    with unset_fake_temporarily():
        scalars = {id(t): torch.tensor(v, dtype=t.dtype) for t, v in zip(tensors, values, strict=True)}
        given = [scalars.get(id(a), a) if isinstance(a, Tensor) else a for a in args]
        return func(*given, **{k: v for k, v in kwargs.items() if k != "device"}).item()


def _scattered(args: tuple[Any, ...]) -> Any:
    """Return the mean of a tensor of equal elements after a value is scattered into distinct places."""
    into, index, source = args[0], args[2], args[3]
    before, after = value_of(into), value_of(source) if isinstance(source, Tensor) else source
    if before is None or after is None or not into.numel():
        return None
    return before + (after - before) * min(index.numel() / into.numel(), 1.0)


def stated_value(tensor: Tensor) -> Any:
    """Return the value of a tensor of one element: the one that follows from constants, else 1, or False."""
    value = value_of(tensor)
    if tensor.dtype == torch.bool:
        return bool(value)
    value = 1 if value is None else value
    return float(value) if tensor.dtype.is_floating_point else round(value)


def array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a NumPy view of a tensor's shape in which every element is its stated value; it takes the memory of one
    element."""
    kind = {torch.bfloat16: torch.float32}.get(tensor.dtype, tensor.dtype)
    with unset_fake_temporarily():
        one = torch.tensor(stated_value(tensor), dtype=kind).numpy()
    return np.broadcast_to(one, tuple(tensor.shape))


def half_selected(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation whose shape depends on values, as if it selected half of the elements, or
    NotImplemented where that has no meaning."""
    x = args[0]
    if func is _aten.nonzero.default:
        return x.new_empty((-(-x.numel() // 2), x.dim()), dtype=torch.int64)
    if func is _aten.masked_select.default:
        return x.new_empty((-(-x.numel() // 2),))
    if func in (_aten._unique2.default, _aten.unique_consecutive.default):
        values = x.new_empty((-(-x.numel() // 2),))
        return values, x.new_empty(x.shape, dtype=torch.int64), x.new_empty(values.shape, dtype=torch.int64)
    if func is _aten.bincount.default:
        return x.new_empty((max(int(kwargs.get("minlength", 0) or (args[2] if len(args) > 2 else 0)), 1),))
    if func in (_aten.index.Tensor, _aten.index_put_.default, _aten._unsafe_index.Tensor):
        return func(x, _as_numbers(args[1]), *args[2:], **kwargs)
    return NotImplemented


def _as_numbers(indices: Any) -> list[Any]:
    """Replace every mask in an index list by the coordinates of half of its elements."""
    result: list[Any] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            count = -(-index.numel() // 2)
            result += [index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim())]
        else:
            result.append(index)
    return result
