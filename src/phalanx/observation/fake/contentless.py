"""Tensors without content: a program's operations run on shapes, under the recorder of its step.

What lives on the imagined device, and floating-point tensors on the host, are torch's fake tensors: shapes without
memory or kernels. Integers and truth values on the host keep their content, so that data loaders, samplers,
tokenizers and device meshes work as they are. Where the host asks for a value that does
not exist, it gets a stated one (stated_values.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from phalanx.observation.fake.remembered import Remembered
from phalanx.observation.fake.values import follow, half, stated
from phalanx.observation.recorder.any_step import WAITS, AnyStep
from phalanx.observation.recorder.collective_ops import NAMESPACES

_aten = torch.ops.aten
_HOST = torch.device("cpu")
"""The host has no number: what torch makes on "cpu:0" is on "cpu"; fake tensors would keep the 0 and not mix."""
_LARGEST_WITH_CONTENT = 2**26
"""Elements of an integer tensor on the host that keeps its content."""


class Contentless(AnyStep):
    """The recorder of a step whose tensors have no content. To be entered above a FakeTensorMode."""

    def __init__(self, fake: FakeTensorMode, enough: Any) -> None:
        super().__init__(enough)
        self.fake = fake
        self.remembered = Remembered(fake)
        self.answered: Counter[tuple[str, str, str]] = Counter()
        """Values that were asked for and do not exist: (operation, value, line) and how often."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is _aten.is_pinned.default:
            return getattr(args[0], "_pinned", False)
        if (device := kwargs.get("device")) is not None and device.type == "cpu":
            kwargs = {**kwargs, "device": _HOST}
        if kwargs.get("pin_memory"):  # no allocator pins here; DDP's reducer asks whether it did
            out = self.call(func, args, {**kwargs, "pin_memory": False})
            out._pinned = True
            return out
        if func.namespace == "c10d":
            return _completed(func, args)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as the real one; that of fake tensors would return a copy
        tensors = [*_flat(args), *_flat(tuple(kwargs.values()))]
        if func.namespace in NAMESPACES:
            return self.remembered.run(func, args, kwargs, tensors)
        with_content = not any(isinstance(t, FakeTensor) for t in tensors)
        if with_content and _on_host(func, tensors, kwargs) and self._keeps(func, tensors, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if not with_content and func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0]  # the host's tensor keeps what it holds
        if func is _aten._local_scalar_dense.default:
            value = stated(args[0])
            self.answer("item", str(value))
            return value
        out = self._on_shapes(func, args, kwargs, tensors)
        follow(func, args, kwargs, tensors, out)
        return out

    def _on_shapes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Run an operation on fake tensors; what it is given with content is made fake first."""
        if all(isinstance(t, FakeTensor) for t in tensors):
            try:
                return self.remembered.run(func, args, kwargs, tensors)
            except DynamicOutputShapeException:
                out = half(func, args, kwargs)
                if out is NotImplemented:
                    raise
                if args[0].device.type != "cpu" and func not in WAITS:
                    self.waited(f"{func._overloadpacket.__name__} by a mask")
                self.answer(func._overloadpacket.__name__, "half of the elements")
                return out
        shapes = {id(t): self.fake.from_tensor(t) for t in tensors if not isinstance(t, FakeTensor)}
        fakes = [shapes.get(id(t), t) for t in tensors]
        out = self._on_shapes(func, _replaced(args, shapes), _replaced(kwargs, shapes), fakes)
        originals = {id(shape): t for t in tensors if (shape := shapes.get(id(t))) is not None}
        return _replaced(out, originals)  # what an operation in place returns is the tensor that it was given

    def _keeps(self, func: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operation on the host runs for real: it makes integers, or works on tensors with content."""
        if tensors:
            return sum(t.numel() for t in tensors) <= _LARGEST_WITH_CONTENT
        dtype = kwargs.get("dtype")
        if dtype is None:
            integral = func._schema.name.split("::")[1] in ("arange", "randperm", "randint", "tril_indices") and all(
                isinstance(a, int | torch.device) or a is None or isinstance(a, list | tuple) for a in args
            )
            return integral
        return not dtype.is_floating_point and not dtype.is_complex

    def answer(self, what: str, value: str) -> None:
        """Note that a value was asked for that does not exist."""
        self.answered_again(what, value, str(self.position.site()))

    def answered_again(self, what: str, value: str, place: str) -> None:
        """Note that a value was asked for at `place`."""
        self.answered[what, value, place] += 1
        if self.log is not None:
            self.log.entries.append(("answer", what, value, place))


def _completed(func: Any, args: tuple[Any, ...]) -> Any:
    """Return what a collective of c10d returns, completed at once, with the results that other ranks would bring."""
    returns = [r.type for r in func._schema.returns]
    if not returns:
        return None
    future = torch.futures.Future()  # type: ignore[var-annotated]
    results = args[0]
    future.set_result([t for t in _flat(results)] if not isinstance(results, Tensor) else results)
    work = _create_work_from_future(future).boxed()
    return work if len(returns) == 1 else (results, work)


def _on_host(func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    return all(t.device.type == "cpu" for t in tensors)


def _replaced(value: Any, by: dict[int, Any]) -> Any:
    """Return a nest of lists, tuples and dicts with some tensors replaced, looked up by id."""
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, by) for item in value)
    if isinstance(value, dict):
        return {k: _replaced(item, by) for k, item in value.items()}
    return value


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _flat(item)]
    return []
