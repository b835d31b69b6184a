"""How any module is cut for the engine: its units, its buckets, and checks for parameters that cannot be
parallelized."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from phalanx.runtime.comm.dtypes import DTYPE_NAMES
from phalanx.runtime.data_parallel.zero3 import SHARED
from phalanx.schedule.gradients.buckets import Bucket, fill
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.spec.errors import InputError
from phalanx.spec.job import DTYPE_BYTES, Precision
from phalanx.spec.model.spec import Parameter
from phalanx.spec.strategy.spec import Strategy


def require_spreadable(module: nn.Module) -> None:
    """Refuse parameters that the engine cannot handle: on the meta device, not real, sharing memory, or already
    parallelized. Raises InputError with the parameter's name."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, p in module.named_parameters():
        if p.is_meta:
            raise InputError("module", name, "is on the meta device, and has no values", "use to_empty and fill it")
        if hasattr(p, "gradient_rows"):
            raise InputError("module", name, "is already parallelized", "create the module again")
        if not p.requires_grad:
            continue
        if not p.is_floating_point():
            raise InputError("module", name, f"is of {p.dtype}", "only real numbers are reduced; freeze it")
        low = int(p.storage_offset())
        high = int(low + sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True)) + 1)
        for other_low, other_high, other in spans.setdefault(p.untyped_storage().data_ptr(), []):
            if p.numel() and low < other_high and other_low < high:
                raise InputError("module", name, f"shares memory with {other}", "use one parameter twice instead")
        spans[p.untyped_storage().data_ptr()].append((low, high, name))


def common_dtype(trained: dict[str, nn.Parameter]) -> str:
    """Return the name of the type that all trained parameters share. Raises InputError if there is none."""
    if not trained:
        raise InputError("module", None, "has no parameter that requires a gradient")
    first_of: dict[torch.dtype, str] = {}
    for name, p in trained.items():
        first_of.setdefault(p.dtype, name)
    if len(first_of) > 1:
        each = ", ".join(f"{name} is {DTYPE_NAMES.get(dtype, dtype)}" for dtype, name in first_of.items())
        raise InputError("module", None, f"has parameters of several types ({each})", "say which by precision=")
    return DTYPE_NAMES.get(next(iter(first_of)), str(next(iter(first_of))))


def find_units(module: nn.Module, modules: Sequence[nn.Module] | None) -> dict[str, nn.Module]:
    """Return units by their name in the module, in forward order: `modules`, or by default the members of the
    outermost ModuleLists and Sequentials. Raises InputError if one is not in the module or has no forward pass, or if
    two nest."""
    names = {id(m): name for name, m in module.named_modules()}
    if modules is None:
        lists = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        outermost = [m for n, m in lists if not any(n != o and (not o or n.startswith(f"{o}.")) for o, _ in lists)]
        modules = [m for outer in outermost for m in _members(outer) if next(m.parameters(), None) is not None]
        modules = list({id(m): m for m in modules}.values())
    units: dict[str, nn.Module] = {}
    for unit in modules:
        name = names.get(id(unit))
        if not name or name == SHARED:
            reason = "is not a part of the module" if not name else "cannot be a unit's name"
            raise InputError("units", name or type(unit).__name__, reason)
        if not _has_forward(unit):
            reason = f"is a {type(unit).__name__} without a forward pass, before which it would be gathered"
            raise InputError("units", name, reason, "name the modules in it that are called")
        other = next((o for o in units if name.startswith(f"{o}.") or o.startswith(f"{name}.")), None)
        if other is not None:
            raise InputError("units", name, f"contains, or is contained in, {other}", "units do not nest")
        units[name] = unit
    return units


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in a list that have a forward pass: of a list in it its members."""
    for child in module.children():
        if _has_forward(child):
            yield child
        else:
            yield from _members(child)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def require_calls(units: Mapping[str, nn.Module]) -> None:
    """Make the first forward pass raise InputError where a part of a unit is called and the unit itself is not, as by
    `for attention, mlp in blocks`: nothing would gather the unit's parameters, or wait for them."""

    def watch(name: str, unit: nn.Module, part: str, m: nn.Module) -> None:
        def first(*_: Any) -> None:
            handle.remove()
            if m is unit:
                called.add(name)
            elif name not in called:
                reason = f"is not called itself, but its {part} is, for which nothing gathers parameters"
                remedy = "call the unit, or name what is called: units=[...]"
                raise InputError("units", name, reason, remedy)

        handle = m.register_forward_pre_hook(first, prepend=True)

    called: set[str] = set()
    users = Counter(id(p) for unit in units.values() for p in unit.parameters())
    for name, unit in units.items():
        for part, m in unit.named_modules():
            if m is unit or any(p.requires_grad and users[id(p)] == 1 for p in m.parameters(recurse=False)):
                watch(name, unit, part, m)


def recompute_units(units: dict[str, nn.Module]) -> None:
    """Make each unit keep only its inputs and run its forward pass again in the backward pass. Raises InputError for
    a unit with running statistics, which would count a batch twice, and if there are no units."""
    if not units:
        raise InputError("strategy.recompute", "full", "repeats units, and the module has none", "say units=[...]")
    for name, unit in units.items():
        for inner, m in unit.named_modules():
            if isinstance(m, _NormBase) and m.track_running_stats:
                reason = f"runs units twice, and {name}.{inner} would count each batch twice"
                raise InputError("strategy.recompute", "full", reason, "use torch.utils.checkpoint around the others")
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


def cut_chunks(
    trained: dict[str, nn.Parameter],
    units: dict[str, nn.Module],
    s: Strategy,
    precision: Precision,
    chunks: Sequence[Sequence[str]],
) -> tuple[tuple[Bucket, ...], list[list[int]]]:
    """Fill buckets that cross no chunk of a pipeline rank; `chunks`: the names of the children of each. Returns the
    buckets in the order of the backward pass, and the buckets of each chunk."""
    buckets: list[Bucket] = []
    of_chunks: list[list[int]] = []
    for children in reversed(chunks):
        own = {name: p for name, p in trained.items() if name.partition(".")[0] in children}
        cut = cut_buckets(own, {n: m for n, m in units.items() if n in children}, s, precision)
        of_chunks.insert(0, [len(buckets) + i for i in range(len(cut))])
        buckets += [replace(b, index=len(buckets) + i) for i, b in enumerate(cut)]
    return tuple(buckets), of_chunks


def cut_buckets(
    trained: dict[str, nn.Parameter], units: dict[str, nn.Module], s: Strategy, precision: Precision
) -> tuple[Bucket, ...]:
    """Fill buckets with the parameters in reverse order of the module, which is about the order in which gradients
    become ready; at ZeRO-3 one bucket for each unit."""
    users: dict[int, list[str]] = {}
    for name, unit in units.items():
        for p in unit.parameters():
            users.setdefault(id(p), []).append(name)
    order = []
    for name, p in reversed(trained.items()):
        mine = users.get(id(p), [])
        order.append(Parameter(name, tuple(p.shape), "column", mine[0] if len(mine) == 1 else SHARED))
    if not sharding_of(s).parameters:
        order = [replace(p, unit="") for p in order]
        return fill(order, DTYPE_BYTES[precision.reduce_dtype], s.bucket_bytes)
    by_unit: dict[str, list[Parameter]] = {name: [] for name in (*reversed(units), SHARED)}
    for parameter in order:
        by_unit[parameter.unit].append(parameter)
    return tuple(Bucket(i, tuple(own), u) for i, (u, own) in enumerate((u, o) for u, o in by_unit.items() if o))
