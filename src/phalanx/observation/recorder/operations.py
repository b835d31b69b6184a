"""Operations as a recorder reads them: the tensors in their nested arguments, whether the host waits for their result
(because it, or its shape, depends on values), and which allocate storage or keep it for their backward pass."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor


def tensors(*values: Any) -> list[Tensor]:
    """Return all tensors in the values, in order."""
    result: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            result.append(value)
        elif isinstance(value, list | tuple):
            result += tensors(*value)
        elif isinstance(value, dict):
            result += tensors(*value.values())
    return result


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


_WITHOUT_CONTENT = re.compile("(new_)?(empty|zeros|full)")
_BACKWARD = re.compile(r"(.*?)Backward\d*")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@cache
def operation(func: Any) -> str:
    """Return the name of an operation of torch: without namespace, and marks of private and in-place versions."""
    return str(func._schema.name).split("::")[1].strip("_")


@cache
def allocates_only(func: Any) -> bool:
    """Whether the tensors that an operation returns have no content of interest yet: buffers to be filled."""
    return _WITHOUT_CONTENT.match(operation(func)) is not None


@cache
def returns_view(func: Any) -> bool:
    """Whether an operation returns views of its arguments."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


@cache
def of_node(name: str) -> str:
    """Return the name of the operation of a node of autograd, such as "log_softmax" of "LogSoftmaxBackward0"."""
    inner = _BACKWARD.fullmatch(name.rpartition("::")[2])
    return _WORDS.sub("_", inner[1]).lower() if inner else ""


@cache
def _saved_attributes(node: type[Any]) -> tuple[str, ...]:
    return tuple(name for name in dir(node) if name.startswith("_raw_saved_"))


def saved_for_backward(results: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """Yield (storage, operation) for every storage that the graph of some tensors keeps for the backward pass of an
    operation, except where hooks replace it, such as the inputs of checkpointed modules."""
    waiting = [t.grad_fn for t in results if isinstance(t, Tensor)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [below for below, _ in node.next_functions]
        for name in _saved_attributes(type(node)):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # released by an earlier backward pass
                continue
            for one in saved if isinstance(saved, tuple | list) else (saved,):
                for tensor in tensors(one.data if one is not None else None):
                    if tensor.layout is torch.strided and tensor.device.type != "meta":
                        yield tensor.untyped_storage()._cdata, of_node(node.name())
