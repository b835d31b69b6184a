"""The recorder of a program's step on fake tensors.

Tensors on the fake GPU, and floating-point tensors on the host, are torch's fake tensors: shapes without memory or
kernels. Integers and truth values on the host keep their content, so that data loaders, samplers, tokenizers and
device meshes work unchanged. Where the host asks for a value that does not exist, it gets a stated one (values.py).
"""

from collections import Counter
from collections.abc import Mapping
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

from phalanx.observation.fake.result_cache import ResultCache
from phalanx.observation.fake.values import follow, half_selected, stated_value
from phalanx.observation.recorder.collective_ops import NAMESPACES
from phalanx.observation.recorder.operations import WAITS, tensors
from phalanx.observation.recorder.step import StepRecorder
from phalanx.observation.unobservable import Unobservable

_aten = torch.ops.aten
_HOST = torch.device("cpu")
"""The host has no index: torch's tensors on "cpu:0" are on "cpu"; fake ones would keep the 0 and not mix."""
_LARGEST_WITH_CONTENT = 2**26
"""Elements of an integer tensor on the host that keeps its content."""

_MOST_TRUTH_VALUES = 20_000
"""Truth values that a line may ask for in a row, as for each parameter of a pass."""


class FakeStepRecorder(StepRecorder):
    """Records a step on fake tensors. Must be entered inside a FakeTensorMode."""

    def __init__(self, fake: FakeTensorMode, on_step: Any, branches: Mapping[str, bool] | None = None) -> None:
        super().__init__(on_step)
        self.branches = branches or {}
        """Answers to questions about truth values that depend on data, by "file:line"."""
        self.fake = fake
        self.results = ResultCache(fake)
        self.answered: Counter[tuple[str, str, str]] = Counter()
        """Values that were asked for and do not exist: (operation, value, line) and their number."""
        self.asked = ("", 0)
        """The line that asked for a truth value last, and how often in a row."""

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
        given = tensors(args, kwargs)
        if func.namespace in NAMESPACES:
            return self.results.run(func, args, kwargs, given)
        with_content = not any(isinstance(t, FakeTensor) for t in given)
        if with_content and _on_host(given, kwargs) and _keeps_content(func, given, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if not with_content and func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0]  # the host's tensor keeps its content
        if func is _aten._local_scalar_dense.default:
            value, place = stated_value(args[0]), str(self.position.site())
            if args[0].dtype == torch.bool:
                value = self.branches.get(place, value)
                self._require_end(place, bool(value))
            self.answered_again("item", str(value), place)
            return value
        out = self._on_shapes(func, args, kwargs, given)
        follow(func, args, kwargs, given, out)
        return out

    def _on_shapes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """Run an operation on fake tensors, made first of those among its arguments that have content."""
        if all(isinstance(t, FakeTensor) for t in given):
            try:
                return self.results.run(func, args, kwargs, given)
            except DynamicOutputShapeException:
                out = half_selected(func, args, kwargs)
                if out is NotImplemented:
                    raise
                if args[0].device.type != "cpu" and func not in WAITS:
                    self.waited(f"{func._overloadpacket.__name__} by a mask")
                self.answer(func._overloadpacket.__name__, "half of the elements")
                return out
        shapes = {id(t): self.fake.from_tensor(t) for t in given if not isinstance(t, FakeTensor)}
        fakes = [shapes.get(id(t), t) for t in given]
        out = self._on_shapes(func, _replaced(args, shapes), _replaced(kwargs, shapes), fakes)
        originals = {id(shape): t for t in given if (shape := shapes.get(id(t))) is not None}
        return _replaced(out, originals)  # an operation in place returns its argument

    def _require_end(self, place: str, value: bool) -> None:
        """Count how often in a row a line asked for a truth value. Raises Unobservable for a loop that waits for a
        value which never comes."""
        self.asked = (place, self.asked[1] + 1 if self.asked[0] == place else 1)
        if self.asked[1] > _MOST_TRUTH_VALUES:
            raise Unobservable(
                f"{place} asks the same {_MOST_TRUTH_VALUES:,} times, and is answered {value}: a loop that waits "
                f"for a value; --branches {place}={str(not value).lower()} ends it"
            )

    def answer(self, operation: str, value: str) -> None:
        """Note that the program asked here for a value that does not exist, and got this one."""
        self.answered_again(operation, value, str(self.position.site()))

    def answered_again(self, operation: str, value: str, place: str) -> None:
        """Note that the program asked for such a value at the line `place`."""
        self.answered[operation, value, place] += 1
        if self.log is not None:
            self.log.entries.append(("answer", operation, value, place))


def _completed(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of a collective of c10d that has completed: its work and buffers."""
    returns = [r.type for r in func._schema.returns]
    if not returns:
        return None
    future = torch.futures.Future()  # type: ignore[var-annotated]
    results = args[0]
    future.set_result(results if isinstance(results, Tensor) else tensors(results))
    work = _create_work_from_future(future).boxed()
    return work if len(returns) == 1 else (results, work)


def _keeps_content(func: Any, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation on the host runs for real: it makes integers, or works on tensors with content."""
    if given:
        return sum(t.numel() for t in given) <= _LARGEST_WITH_CONTENT
    dtype = kwargs.get("dtype")
    if dtype is None:
        name = func._schema.name.split("::")[1]
        integers = all(a is None or isinstance(a, int | torch.device | list | tuple) for a in args)
        return integers and name in ("arange", "randperm", "randint", "tril_indices")
    return not dtype.is_floating_point and not dtype.is_complex


def _on_host(given: list[Tensor], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    return all(t.device.type == "cpu" for t in given)


def _replaced(value: Any, by: dict[int, Any]) -> Any:
    """Return a nest of lists, tuples and dicts with some tensors replaced, looked up by id."""
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, by) for item in value)
    if isinstance(value, dict):
        return {k: _replaced(item, by) for k, item in value.items()}
    return value
