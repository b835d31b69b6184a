"""The most common operations on fake tensors, run directly on the meta device.

FakeTensorMode does the same behind a cache whose keys cost more than the operation; this halves the time that
verifying a step takes. Anything else (other operations, other devices, real tensors) is left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_aten = torch.ops.aten
_META = torch.device("meta")
_MAKES = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.expand.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.index_select.default,
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.mm.default,
    _aten.mv.default,
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.mul.Tensor,
    _aten.neg.default,
    _aten.silu.default,
    _aten.silu_backward.default,
    _aten.linalg_vector_norm.default,
    _aten.view.dtype,
}
"""Return one new tensor, or a view."""
_STARTS = {_aten.empty.memory_format, _aten.zeros.default}
"""Return a new tensor from no other."""
_CHANGES = {
    _aten.add_.Tensor,
    _aten.copy_.default,
    _aten.div_.Tensor,
    _aten.mul_.Tensor,
    _aten.pow_.Scalar,
    _aten.rsqrt_.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.uniform_.default,
    _aten.normal_.default,
}
"""Return their first argument, changed in place."""
_SPLITS = {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int}
"""Return several views."""
_FILLS = {_aten.addcmul_.default, _aten.mul.out}
"""Return the tensor they write to; the others must broadcast to its shape."""
_PRODUCTS = {_aten.mm.out, _aten.addmm.out}
"""Return the matrix to which they write the product of their last two arguments."""
_ONE_TYPE = {_aten.mm.default, _aten.mv.default}
"""Take operands of one type only, which the meta device does not check."""
_SCALED = {_aten._scaled_mm.out}
"""The same of their first two arguments, in 8 bits; torch has no such operation on the meta device."""
_ALL = _MAKES | _CHANGES | _SPLITS | _FILLS | _PRODUCTS | _SCALED


def _fits(operands: Sequence[Tensor], out: Tensor) -> bool:
    """Whether a result of these operands may be written to `out`."""
    return all(_can_cast(a.dtype, out.dtype) for a in operands)


@cache
def _can_cast(dtype: torch.dtype, to: torch.dtype) -> bool:
    return torch.can_cast(dtype, to)  # cached: it costs a dispatch


def _broadcasts(x: Tensor, out: Tensor) -> bool:
    fits: bool = torch.broadcast_shapes(x.shape, out.shape) == out.shape
    return fits


def _start(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    mode, device = active_fake_mode(), kwargs.get("device")
    if mode is None or device is None or device.type == "meta":
        return None
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, func(*args, **{**kwargs, "device": _META}), device)


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | list[Tensor] | None:
    """Return the result of an operation, or None where torch has to run it."""
    if func in _STARTS:
        return _start(func, args, kwargs)
    if func not in _ALL:
        return None
    fakes = [a for a in args if isinstance(a, Tensor)]
    if not all(type(a) is FakeTensor for a in fakes):
        return None
    device = cast("FakeTensor", fakes[0]).fake_device
    if kwargs.get("device", device) not in (None, device) or any(a.fake_device != device for a in fakes[1:]):  # type: ignore[attr-defined]
        return None
    if func in _FILLS:
        out = kwargs.get("out", args[0])
        shape = torch.broadcast_shapes(*(a.shape for a in fakes))
        return out if shape == out.shape and _fits(fakes, out) else None
    if func in _PRODUCTS:
        (*added, a, b), out = fakes, kwargs["out"]
        fits = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] and out.shape == (a.shape[0], b.shape[1])
        alike = type(out) is FakeTensor and len({x.dtype for x in (*fakes, out)}) == 1
        return out if fits and alike and all(_broadcasts(x, out) for x in added) else None
    if func in _SCALED:
        a, b, out = fakes[0], fakes[1], kwargs["out"]
        fits = a.shape[1] == b.shape[0] and out.shape == (a.shape[0], b.shape[1]) and type(out) is FakeTensor
        return out if fits else None
    if func in _ONE_TYPE and len({a.dtype for a in fakes}) > 1:
        return None
    if func in _CHANGES and func is not _aten.copy_.default and not _fits(fakes, fakes[0]):
        return None
    mode = cast("FakeTensor", fakes[0]).fake_mode
    with in_kernel_invocation_manager(mode):
        out = func(*args, **{name: value for name, value in kwargs.items() if name != "device"})
    if func in _SPLITS:
        return [FakeTensor(mode, part, device) for part in out]
    return FakeTensor(mode, out, device) if func in _MAKES else fakes[0]
