"""The models of a program, and the names of their modules.

A model is an outermost module with parameters; wrappers (DDP, FSDP1, compile) belong to it, and the stages of a
pipeline are one model. Programs with several models, such as a policy and its reference, have modules of the same
name. So every name is kept with the label of its model: the variable that holds it in the program. `plain` writes the
label in front of a module's name where the program has called several models, and leaves it out where it has one.
"""

import gc
import inspect
import sys
import weakref
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from phalanx.observation.recorder.places import OUTSIDE_PHALANX

_ENDS = "\0"
"""Ends the label in a name."""
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes by which wrappers (DDP, compile, FSDP1, checkpoint_wrapper) hold the module that they wrap."""
_ITEMS = 64
"""The most items of a list or dictionary that are searched for a model."""


class ModelNames:
    """Names modules, each with the label of its model."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._labels: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._parameters: dict[int, str] = {}
        self._called: dict[str, None] = {}

    @property
    def several(self) -> tuple[str, ...]:
        """The labels of the models that the program has called, in order; none if it has called one."""
        return tuple(self._called) if len(self._called) > 1 else ()

    def of_root(self, module: nn.Module) -> str:
        """Return the name of a module that is called while no other runs."""
        if module not in self._names:
            if next(module.parameters(), None) is None:  # a loss function, say
                self._names[module] = ""
            else:
                self._read(module)
        return self._names[module]

    def of(self, module: nn.Module, otherwise: str) -> str:
        """Return the name of a module, `otherwise` if it belongs to no model that was called."""
        return self._names.get(module, otherwise)

    def of_parameter(self, parameter: torch.Tensor | None, otherwise: str = "") -> str:
        """Return the name of the module that a parameter belongs to, `otherwise` if unknown."""
        return self._parameters.get(id(parameter), otherwise)

    def plain(self, name: str) -> str:
        """Return a name as people read it."""
        label, ends, inner = name.partition(_ENDS)
        return label + inner if self.several or not ends else inner.removeprefix(".")

    def models(self) -> list[tuple[str, nn.Module]]:
        """Return every outermost module with parameters that exists, called or not, with its label."""
        return [(self._label(root), root) for root in _outermost()]

    def _read(self, module: nn.Module) -> None:
        """Name all modules of the model that contains a module."""
        root = next((x for x in _outermost() if any(inner is module for inner in x.modules())), module)
        label = self._label(root)
        self._called.setdefault(label)
        for path, inner in root.named_modules():
            name = _within_wrappers(path)
            self._names.setdefault(inner, f"{label}{_ENDS}{'.' * bool(name)}{name}")
            for parameter in inner.parameters(recurse=False):
                self._parameters[id(parameter)] = self._names[inner]

    def _label(self, root: nn.Module) -> str:
        """Return the label of an outermost module: that of a model inside it, of the pipeline, or a new one."""
        if root not in self._labels:
            stages = _stages()
            inner = list(root.modules())
            alike = [*inner, *stages] if any(x is stage for x in inner for stage in stages) else inner
            label = next((self._labels[x] for x in alike if x in self._labels), "")
            self._labels[root] = label or self._free(_variable(root) or type(root).__name__)
        return self._labels[root]

    def _free(self, name: str) -> str:
        """Return a label that no model has: the name, or the name with a number."""
        taken = set(self._labels.values())
        return next(x for x in (name, *(f"{name} ({n})" for n in range(2, len(taken) + 3))) if x not in taken)


def model_of(name: str) -> str:
    """Return the name of the model that contains a module, by the name of the module."""
    label, ends, _ = name.partition(_ENDS)
    return label + ends


def _within_wrappers(path: str) -> str:
    """Return a module's path without the attributes of wrappers; `module`, a common name, only at the beginning."""
    parts: list[str] = []
    for part in path.split("."):
        if part not in _WRAPPERS or (part == "module" and parts):
            parts.append(part)
    return ".".join(parts)


def _outermost() -> list[nn.Module]:
    """Return the modules with parameters that no other module contains."""
    modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module) and "_modules" in x.__dict__]
    inner = {id(child) for x in modules for child in x._modules.values()}
    return [x for x in modules if id(x) not in inner and next(x.parameters(), None) is not None]


def _stages() -> list[nn.Module]:
    """Return the modules that the stages of torch's pipelines run."""
    return [x.submod for x in gc.get_objects() if issubclass(type(x), _PipelineStageBase)]


# The variable that holds a model


def _variable(model: nn.Module) -> str:
    """Return the name of the outermost variable of the running program that holds a model or what it wraps, or ""."""
    chain = [model]
    while inner := next((m for name in _WRAPPERS if (m := chain[-1]._modules.get(name)) is not None), None):
        chain.append(inner)
    return next((name for m in chain for variables in _namespaces() for name in _names_in(variables, m)), "")


def _namespaces() -> Iterator[dict[str, Any]]:
    """Yield the variables of the program's running functions, the outermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(OUTSIDE_PHALANX):
            frames.append(frame)
        frame = frame.f_back
    for frame in reversed(frames):
        variables = frame.f_locals
        yield variables
        if type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            variables.clear()  # before Python 3.13 a copy, which would keep tensors alive


def _names_in(variables: dict[str, Any], model: nn.Module) -> Iterator[str]:
    """Yield the names of variables, of items in them, and of attributes of objects in them, that hold a model."""
    visible = {name: value for name, value in variables.items() if not name.startswith("__")}
    yield from _items(visible, model)
    for value in visible.values():
        if not isinstance(value, type | ModuleType | torch.Tensor):
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                yield from _items(attributes, model)


def _items(values: dict[str, Any], model: nn.Module) -> Iterator[str]:
    for name, value in values.items():
        if value is model:
            yield name
    for name, value in values.items():
        if type(value) in (list, tuple):
            yield from (f"{name}[{i}]" for i, item in enumerate(value[:_ITEMS]) if item is model)
        elif type(value) is dict and len(value) <= _ITEMS:
            yield from (f"{name}[{key!r}]" for key, item in value.items() if item is model)
