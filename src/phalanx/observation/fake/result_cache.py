"""Results of operations on fake tensors, built from the results of an earlier call with equal arguments.

A training step repeats itself: every block, micro-batch and step issues the same operations on the same shapes.
torch's fake tensors compute a result's shape once and then look it up, but the look-up itself (hashing every field of
every argument, building the result through several layers) would be most of the time of an observation. Here the key
is short, and a result is built by its two allocations: a tensor on `meta`, and the FakeTensor around it.

A recipe says for each result: it is an argument (operations in place), it shares the storage of an argument (views),
it has a new storage, or it is a number (attention's lengths). It is kept only if a result built from it equals
torch's in all that a program can see, and never for operations that change the shape of their arguments or whose
result depends on values. Recipes serve all steps of a process.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
_keys = torch._C._dispatch_keys
_empty = torch.empty
_empty_strided = torch.empty_strided
_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)  # SymInts, generators and the like are not looked up
_REFUSED = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
_NEVER = frozenset((_aten.lift_fresh.default, _aten.lift_fresh_copy.default))
"""The last operations of torch.tensor(): their results may hold a constant."""
_NAMESPACES = ("aten", "_c10d_functional")
_MOST_RESULTS = 100_000


def fake_mode(**options: Any) -> FakeTensorMode:
    """Return a mode that makes fake tensors, without torch's cache: recipes take its place."""
    mode = FakeTensorMode(**options)
    mode.cache_enabled = False
    return mode


class Result(NamedTuple):
    """One result. `argument`: index, in the flat list of tensors, of the one that it is or shares a storage with."""

    argument: int
    in_place: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    state: dict[str, Any]
    """The attributes of a fresh FakeTensor on that device, without its mode."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The results of an operation; `kind`: the type of their container, or None where it returns one tensor."""

    results: tuple[Result | int | None, ...]
    kind: type[Any] | None


class ResultCache:
    """Runs operations on fake tensors of the mode `fake`, or builds their results from an earlier, equal call."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake
        self.recipes = _recipes

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Return the result of `func(*args, **kwargs)`. `tensors`: all tensors among its arguments, in order."""
        key = self._key(func, args, kwargs) if self._lasting(func) else None
        if key is None:
            return func(*args, **kwargs)
        recipe = self.recipes.get(key)
        if recipe is not None:
            with torch._C._DisableTorchDispatch():
                return build(recipe, tensors, self.fake)
        if key in self.recipes:
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if len(self.recipes) < _MOST_RESULTS:
            unchanged = self._key(func, args, kwargs) == key
            self.recipes[key] = self._recipe(out, tensors) if unchanged else None
        return out

    def _lasting(self, func: Any) -> bool:
        known = _lasting.get(func)
        if known is None:
            known = _lasting[func] = (
                func.namespace in _NAMESPACES and func not in _NEVER and _REFUSED.isdisjoint(func.tags)
            )
        return known

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return all that the result of a call depends on, or None where it is not looked up."""
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        for value in args:
            if not self._add(value, key):
                return None
        for name, value in kwargs.items():
            key.append(name)
            if not self._add(value, key):
                return None
        return tuple(key)

    def _add(self, value: Any, key: list[Any]) -> bool:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not self.fake or value.constant is not None or value.layout is not torch.strided:
                return False
            key += (
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.dtype,
                value._fake_device,
                value.requires_grad,
                _keys(value).raw_repr(),
            )
            return True
        if kind in _PLAIN:
            key += (kind, value)  # 1, 1.0 and True are equal and give other types
            return True
        if kind is list or kind is tuple:
            key += (kind, len(value))
            return all(self._add(item, key) for item in value)
        return False

    def _recipe(self, out: Any, tensors: list[Tensor]) -> Recipe | None:
        """Return the recipe of a call, or None where it would build something else than the call returned."""
        kind = type(out) if isinstance(out, list | tuple) else None
        if kind not in (None, list, tuple):
            return None
        outs = out if kind else (out,)
        places = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
        storages = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(tensors)))}
        fresh: set[int] = set()
        results: list[Result | int | None] = []
        for t in outs:
            if t is None or (kind and type(t) is int):
                results.append(t)
                continue
            if type(t) is not FakeTensor or t.constant is not None or t.layout is not torch.strided:
                return None
            storage = t.untyped_storage()._cdata
            if storage not in storages and storage in fresh:
                return None  # two results share a storage that no argument has
            fresh.add(storage)
            in_place = id(t) in places
            state = {} if in_place else {k: v for k, v in t.__dict__.items() if k not in ("_stated", "fake_mode")}
            results.append(
                Result(
                    places[id(t)] if in_place else storages.get(storage, -1),
                    in_place,
                    tuple(t.shape),
                    t.stride(),
                    int(t.storage_offset()),
                    t.dtype,
                    t._fake_device,
                    state,
                )
            )
        recipe = Recipe(tuple(results), kind)
        with torch._C._DisableTorchDispatch():
            built = build(recipe, tensors, self.fake)
        alike = all(_alike(a, b) for a, b in zip(outs, built if kind else (built,), strict=True))
        return recipe if alike else None


_lasting: dict[Any, bool] = {}
_recipes: dict[tuple[Any, ...], Recipe | None] = {}


def build(recipe: Recipe, tensors: list[Tensor], fake: FakeTensorMode) -> Any:
    """Build the results of a recipe for a call with these tensors. Torch's dispatch must be off."""
    built: list[Any] = []
    for r in recipe.results:
        if r is None or isinstance(r, int):
            built.append(r)
            continue
        if r.in_place:
            built.append(tensors[r.argument])
            continue
        if r.argument < 0:
            meta = _empty_strided(r.shape, r.stride, dtype=r.dtype, device="meta")
        else:
            meta = _empty(0, dtype=r.dtype, device="meta")
            meta.set_(tensors[r.argument].untyped_storage(), r.offset, r.shape, r.stride)
        tensor = Tensor._make_subclass(  # as FakeTensor.__new__ does
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=r.device
        )
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor.__dict__.update(r.state)
        tensor.fake_mode = fake
        built.append(tensor)
    if recipe.kind is None:
        return built[0]
    return built if recipe.kind is list else tuple(built)


def _alike(a: FakeTensor | int | None, b: FakeTensor | int | None) -> bool:
    """Whether two results are the same in shape, type, device, storage and dispatch."""
    if not isinstance(a, FakeTensor) or not isinstance(b, FakeTensor) or a is b:
        return a is b
    return (
        (a.shape, a.stride(), a.storage_offset(), a.dtype, a._fake_device, a.requires_grad)
        == (b.shape, b.stride(), b.storage_offset(), b.dtype, b._fake_device, b.requires_grad)
        and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        and _keys(a).raw_repr() == _keys(b).raw_repr()
        and a.__dict__.keys() - {"_stated"} == b.__dict__.keys()
    )
