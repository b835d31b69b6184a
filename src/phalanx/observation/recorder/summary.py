"""A recorded step as plain data: groups named by mesh axes, and the holders of memory at its peak."""

from __future__ import annotations

import gc
import itertools
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx.observation.recorder.places import shortened
from phalanx.observation.recorder.repetition import Life
from phalanx.observation.recorder.step import GATHERED, PLAIN, StepRecord, StepRecorder, inner_tensors
from phalanx.schedule.event import Phase
from phalanx.schedule.observation import (
    BackwardStart,
    Holder,
    Kept,
    Observed,
    RankObservation,
    Site,
    Synchronisation,
    Trained,
    unit,
)


def summarise(recorder: StepRecorder, step: StepRecord, groups: GroupNames) -> RankObservation:
    """Return a step as data. Call it when the step ends: parameters and optimizer state are identified among the
    objects that are alive then."""
    for kind, keys in (("parameters", _parameters()), ("optimizer state", _optimizer_state())):
        for key in keys:
            life = recorder.known.get(key)
            if life is not None:
                life.kind = GATHERED if kind == "parameters" and life.born > step.began else kind
    peak, when, phase, module = step.peak.get(recorder.device, (0, 0, "F", ""))
    return RankObservation(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        count=1,
        are="",
        step=step.number,
        events=tuple(_events(step, groups)),
        flops=dict(step.flops),
        start=_at_start(step, recorder.device),
        peak=peak,
        peak_phase=phase,
        peak_module=module,
        holders=_holders(step, recorder.device, [when], phase == "opt")[0],
        host_peak=step.peak.get("cpu", (0,))[0] if recorder.device != "cpu" else 0,
        synchronisations=tuple(Synchronisation(*wait, n) for wait, n in step.waits.items()),
        micro_batches=step.micro_batches,
        optimizers=tuple(recorder.position.optimizers),
        flops_by_type=dict(step.flops_by_type),
        trained=_trained(step),
        kept=_kept(recorder),
        backward_starts=_backward_starts(step, recorder.device),
    )


def _trained(step: StepRecord) -> tuple[Trained, ...]:
    """Return the trained parameters, summed by unit and type."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for t in step.trained.values():
        local, whole = totals.get((t.unit, t.dtype), (0, 0))
        totals[t.unit, t.dtype] = local + t.elements, whole + t.all_elements
    return tuple(Trained(name, *elements, dtype) for (name, dtype), elements in totals.items())


_OURS = 3
"""References to a tensor in a list that is iterated: the list's, the loop's, getrefcount's. C++ adds one if it holds
the tensor too; the tensor then has more uses than the one of its Python object."""


def _kept(recorder: StepRecorder) -> tuple[Kept, ...]:
    """Return storages of the forward pass that no Python object holds, so that only autograd's graph keeps them."""
    alive = {key for key, life in recorder.known.items() if life.site and life.module and not life.kind}
    if not alive:
        return ()
    for x in gc.get_objects():
        if type(x) in PLAIN and x.device.type != "meta" and x.layout == torch.strided:
            key = x.untyped_storage()._cdata
            if key in alive and sys.getrefcount(x) - (x._use_count() > 1) > _OURS:
                alive.remove(key)
    totals: Counter[tuple[str, Site]] = Counter()
    for key in alive:
        life = recorder.known[key]
        if life.device == recorder.device and life.site:
            totals[life.module, life.site] += life.bytes
    return tuple(Kept(module, shortened(site), n) for (module, site), n in totals.most_common())


def _events(step: StepRecord, groups: GroupNames) -> list[Observed]:
    result = []
    for o in step.events:
        e = o.event
        if e.kind == "compute":
            if e.flops or e.alloc or e.free:
                result.append(o)
        else:
            result.append(replace(o, event=replace(e, axis=groups.name(e.axis, o.ranks))))
    return result


class GroupNames:
    """Names process groups by the mesh axis that they lie along.

    `axes`: the user's axes, outermost first, with their sizes, for programs that make their groups without a
    DeviceMesh.
    """

    def __init__(self, world: int, axes: Mapping[str, int] | None = None) -> None:
        self.world = world
        self.axes = dict(axes or {})
        self._named: dict[str, str] = {}

    def read_meshes(self) -> None:
        """Read the names of all groups of all existing meshes. Flattened axes keep their own names."""
        for mesh in [x for x in gc.get_objects() if issubclass(type(x), DeviceMesh)]:
            names = mesh.mesh_dim_names
            groups = getattr(mesh, "_dim_group_names", None) or ()
            for i, group in enumerate(groups):
                name = names[i] if names and i < len(names) else ""
                if name and not self._named.get(str(group)):
                    self._named[str(group)] = name
                    self.axes.setdefault(name, int(mesh.size(i)))

    def name(self, group: str, ranks: Sequence[int]) -> str:
        """Return the name of a group: its mesh axis, "world", or the ranks it holds."""
        if group in self._named:
            return self._named[group]
        strides = {b - a for a, b in itertools.pairwise(ranks)}
        stride = strides.pop() if len(strides) == 1 else 0
        inner = 1
        for axis, size in reversed(self.axes.items()):
            if len(ranks) == size and stride == inner:
                return axis
            inner *= size
        if len(ranks) == self.world:
            return "world"
        if stride == 1:
            return f"{len(ranks)} neighbours"
        return f"{len(ranks)} ranks, {stride} apart" if stride else f"{len(ranks)} ranks"


def _parameters() -> set[int]:
    storages: set[int] = set()
    for x in gc.get_objects():
        if issubclass(type(x), nn.Parameter) or (issubclass(type(x), torch.Tensor) and x.__dict__.get("_is_param")):
            storages.update(t.untyped_storage()._cdata for t in inner_tensors(x))
    return storages


def _optimizer_state() -> set[int]:
    storages: set[int] = set()
    for x in gc.get_objects():
        if issubclass(type(x), torch.optim.Optimizer):
            for state in x.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        storages.update(t.untyped_storage()._cdata for t in inner_tensors(value))
    return storages


_OTHER = "inputs, buffers and other"
_MADE_IN = {"F": "activations", "opt": "tensors of the optimizer"}


def _kind_and_unit(life: Life, began: int, optimizing: bool) -> tuple[str, str]:
    """Return the kind of a live tensor, and its unit if the step made it. `optimizing`: whether the last backward
    pass had ended; tensors made outside of passes before that are inputs of later ones."""
    if life.born <= began or (life.phase == "opt" and not optimizing):
        return life.kind or _OTHER, ""
    return life.kind or _MADE_IN.get(life.phase, "tensors of the backward pass"), unit(life.module)


def _at_start(step: StepRecord, device: str) -> dict[str, int]:
    """Return the live bytes at the beginning of the step, by kind."""
    totals: Counter[str] = Counter()
    for life in step.lives:
        if life.born <= step.began and life.device == device and life.bytes:
            totals[life.kind or _OTHER] += life.bytes
    return dict(totals)


def _backward_starts(step: StepRecord, device: str) -> tuple[BackwardStart, ...]:
    """Return the holders of live bytes at the beginning of backward passes, grouped by equal ones."""
    alike: dict[tuple[Phase, tuple[Holder, ...]], list[int]] = {}
    holders_at = _holders(step, device, [when for *_, when in step.backwards], optimizing=False)
    for (phase, micro_batch, _), holders in zip(step.backwards, holders_at, strict=True):
        alike.setdefault((phase, holders), []).append(micro_batch)
    return tuple(BackwardStart(phase, tuple(batches), holders) for (phase, holders), batches in alike.items())


def _holders(step: StepRecord, device: str, times: Sequence[int], optimizing: bool) -> list[tuple[Holder, ...]]:
    """Return the holders of live bytes at each of the ascending times, largest first."""
    totals: list[Counter[tuple[str, str]]] = [Counter() for _ in times]
    for life in step.lives:
        if life.device == device and life.bytes:
            kind_and_unit = _kind_and_unit(life, step.began, optimizing)
            for i in range(bisect_left(times, life.born), bisect_left(times, life.died)):
                totals[i][kind_and_unit] += life.bytes
    return [tuple(Holder(kind, module, n) for (kind, module), n in total.most_common()) for total in totals]
