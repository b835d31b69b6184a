"""A recorded step as plain data: groups named by mesh axes, and the holders of memory at its peak: what every live
storage is, to which model or unit it belongs, and which line of the program allocated it for which operation.

Parameters and optimizer state are found among the objects that are alive when a step ends. fully_shard's gathered
parameters are distinguished from plain ones by its own records.
"""

from __future__ import annotations

import gc
import itertools
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from phalanx.observation.recorder.models import ModelNames, model_of
from phalanx.observation.recorder.places import shortened
from phalanx.observation.recorder.repetition import Life
from phalanx.observation.recorder.step import (
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    PLAIN,
    STATE,
    StepRecord,
    StepRecorder,
    inner_tensors,
)
from phalanx.schedule.event import Phase
from phalanx.schedule.observation import (
    STAY_GATHERED,
    Allocation,
    BackwardStart,
    Holder,
    KeptStorage,
    ObservedEvent,
    RankObservation,
    Site,
    Synchronisation,
    TrainedParameters,
    unit_of,
)

_UNNAMED_KIND = "inputs, buffers and other"
_MADE_IN = {"F": "activations", "opt": "tensors of the optimizer"}
_PLAIN_KINDS = (PARAMETERS, STATE, GATHERED, GRADIENTS)
"""Kinds that say enough: of these, the operation that allocated a tensor does not matter."""
_MOST_ALLOCATIONS = 64
"""The most allocations of an observation."""


def identify(recorder: StepRecorder) -> None:
    """Mark the live storages of parameters and optimizer state, with the models that they belong to."""
    models = _models_of_parameters(recorder.position.names)
    for kind, storages in ((PARAMETERS, _parameters()), (STATE, _optimizer_state())):
        for key, parameter in storages:
            if life := recorder.known.get(key):
                life.model = models.get(parameter, "")
                life.kind = kind if kind == STATE else life.kind or kind
    for key, module in _gathered():
        if (life := recorder.known.get(key)) and life.bytes:
            life.kind, life.operation = GATHERED, "all_gather"
            life.module = recorder.position.names.of(module, life.module)


def _storages(tensor: Any) -> Iterator[int]:
    if isinstance(tensor, Tensor):
        for inner in inner_tensors(tensor):
            yield inner.untyped_storage()._cdata


def _parameters() -> Iterator[tuple[int, int]]:
    """Yield the storages of all parameters that exist, each twice."""
    for x in gc.get_objects():
        if issubclass(type(x), nn.Parameter) or (issubclass(type(x), Tensor) and x.__dict__.get("_is_param")):
            yield from ((key, key) for key in _storages(x))


def _optimizer_state() -> Iterator[tuple[int, int]]:
    """Yield the storages of all optimizer state that exists, each with one of its parameter."""
    for x in gc.get_objects():
        if issubclass(type(x), torch.optim.Optimizer):
            for parameter, state in x.state.items():
                owner = next(_storages(parameter), 0)
                for value in state.values():
                    yield from ((key, owner) for key in _storages(value))


def _gathered() -> Iterator[tuple[int, nn.Module]]:
    """Yield the storages into which fully_shard gathers parameters, each with the module that it gathers for."""
    for group in _sharded():
        for parameter in group.fsdp_params:
            for tensor in (*parameter.all_gather_outputs, *getattr(parameter, "_unsharded_inner_tensors", ())):
                yield from ((key, group.modules[0]) for key in _storages(tensor))


def _sharded() -> list[FSDPParamGroup]:
    return [x for x in gc.get_objects() if issubclass(type(x), FSDPParamGroup)]


def _models_of_parameters(names: ModelNames) -> dict[int, str]:
    """Return the label of the model of every parameter that exists, by storage; empty if there is one model."""
    models = names.models()
    if len({label for label, _ in models}) < 2:
        return {}
    result = {key: label for label, model in models for p in model.parameters() for key in _storages(p)}
    labels = {id(inner): label for label, model in models for inner in model.modules()}
    for group in _sharded():  # while parameters are gathered, their module does not have the shards
        for parameter in group.fsdp_params:
            label = labels.get(id(group.modules[0]), "")
            result |= dict.fromkeys(_storages(parameter._sharded_param_data), label)
    return result


@dataclass
class _Group:
    """Storages that the same line allocated for the same operation."""

    units: dict[str, None] = field(default_factory=dict)
    count: int = 0
    peak_bytes: int = 0
    backward_bytes: int = 0


class StepMemory:
    """A device's memory in a step, from the lives of its storages."""

    def __init__(self, step: StepRecord, device: str, names: ModelNames) -> None:
        self.step, self.names = step, names
        self.lives = [life for life in step.lives if life.device == device and life.bytes]
        self.backwards = [when for *_, when in step.backwards]

    def _kind_and_unit(self, life: Life) -> tuple[str, str]:
        """Return the kind of a live tensor, and its unit if the step made it, else its model. Tensors made outside of
        passes before the last backward pass are inputs of later ones."""
        before = life.born <= self.step.began
        if before and life.kind in (GATHERED, GRADIENTS):
            kind = STAY_GATHERED if life.kind == GATHERED else GRADIENTS
            return kind, unit_of(self.names.plain(life.module))
        outside = life.phase == "opt" and self.backwards and life.born <= self.backwards[-1]
        if before or outside or life.kind in (PARAMETERS, STATE):
            return life.kind or _UNNAMED_KIND, life.model
        kind = life.kind or _MADE_IN.get(life.phase, "tensors of the backward pass")
        return kind, unit_of(self.names.plain(life.module))

    def at_start(self) -> dict[str, int]:
        """Return the live bytes at the beginning of the step, by kind."""
        totals: Counter[str] = Counter()
        for life in self.lives:
            if life.born <= self.step.began:
                totals[self._kind_and_unit(life)[0]] += life.bytes
        return dict(totals)

    def holders(self, times: Sequence[int]) -> list[tuple[Holder, ...]]:
        """Return the holders of live bytes at each of the ascending times, largest first."""
        totals: list[Counter[tuple[str, str]]] = [Counter() for _ in times]
        for life in self.lives:
            kind_and_unit = self._kind_and_unit(life)
            for i in range(bisect_left(times, life.born), bisect_left(times, life.died)):
                totals[i][kind_and_unit] += life.bytes
        return [tuple(Holder(kind, module, n) for (kind, module), n in total.most_common()) for total in totals]

    def backward_starts(self) -> tuple[BackwardStart, ...]:
        """Return the holders of live bytes at the beginning of backward passes, grouped by equal ones."""
        alike: dict[tuple[Phase, tuple[Holder, ...]], list[int]] = {}
        for (phase, micro_batch, _), holders in zip(self.step.backwards, self.holders(self.backwards), strict=True):
            alike.setdefault((phase, holders), []).append(micro_batch)
        return tuple(BackwardStart(phase, tuple(batches), holders) for (phase, holders), batches in alike.items())

    def allocations(self, peak: int) -> tuple[Allocation, ...]:
        """Return the storages that were live at the peak (a time) or as the fullest backward pass began, grouped by
        the line that allocated them and the operation that did, largest first."""
        live = [sum(h.bytes for h in holders) for holders in self.holders(self.backwards)]
        fullest = self.backwards[live.index(max(live))] if live else -1
        groups: dict[tuple[Any, ...], _Group] = {}
        for life in self.lives:
            at_peak, at_backward = (life.born <= when < life.died for when in (peak, fullest))
            if not at_peak and not at_backward:
                continue
            kind, of = self._kind_and_unit(life)
            key: tuple[Any, ...] = kind, life.model or self.names.plain(model_of(life.module)), "", Site(), ()
            if kind not in _PLAIN_KINDS:
                logged = life.repeats or life
                saved_for = (
                    sorted(logged.saved_for) if kind != _UNNAMED_KIND else ()
                )  # repeated passes do not save inputs
                key = *key[:2], logged.operation, life.site or Site(), tuple(saved_for)
            group = groups.setdefault(key, _Group())
            group.units.setdefault(of)
            group.count += 1
            group.peak_bytes += life.bytes * at_peak
            group.backward_bytes += life.bytes * at_backward
        result = [
            Allocation(
                kind, model, op, shortened(site), saved, tuple(g.units), g.count, g.peak_bytes, g.backward_bytes
            )
            for (kind, model, op, site, saved), g in groups.items()
        ]
        return tuple(sorted(result, key=lambda a: -max(a.peak_bytes, a.backward_bytes))[:_MOST_ALLOCATIONS])


def summarise(recorder: StepRecorder, step: StepRecord, groups: GroupNames) -> RankObservation:
    """Return a step as data. Call it when the step ends: parameters and optimizer state are identified among the
    objects that are alive then."""
    identify(recorder)
    groups.read_meshes()
    names = recorder.position.names
    memory = StepMemory(step, recorder.device, names)
    peak, peak_at, phase, module = step.peak.get(recorder.device, (0, 0, "F", ""))
    return RankObservation(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        count=1,
        are="",
        step=step.number,
        events=tuple(_events(step, groups, names)),
        flops=_named_flops(step, names),
        start=memory.at_start(),
        peak=peak,
        peak_phase=phase,
        peak_module=names.plain(module),
        holders=memory.holders([peak_at])[0],
        host_peak=step.peak.get("cpu", (0,))[0] if recorder.device != "cpu" else 0,
        synchronisations=tuple(
            Synchronisation(call, phase, names.plain(module), site, n)
            for (call, phase, module, site), n in step.waits.items()
        ),
        micro_batches=step.micro_batches,
        optimizers=tuple(recorder.position.optimizers),
        flops_by_type=dict(step.flops_by_type),
        trained=_trained(step, names),
        kept=_kept_storages(recorder),
        backward_starts=memory.backward_starts(),
        models=names.several,
        allocations=memory.allocations(peak_at),
    )


def _named_flops(step: StepRecord, names: ModelNames) -> dict[tuple[Phase, str], int]:
    """Return the FLOPs by pass and module."""
    totals: Counter[tuple[Phase, str]] = Counter()
    for (phase, module), n in step.flops.items():
        totals[phase, names.plain(module)] += n
    return dict(totals)


def _trained(step: StepRecord, names: ModelNames) -> tuple[TrainedParameters, ...]:
    """Return the trained parameters, summed by unit and type."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for t in step.trained.values():
        key = names.plain(t.unit), t.dtype
        local, whole = totals.get(key, (0, 0))
        totals[key] = local + t.elements, whole + t.all_elements
    return tuple(TrainedParameters(name, *elements, dtype) for (name, dtype), elements in totals.items())


_OURS = 3
"""References to a tensor in a list that is iterated: the list's, the loop's, getrefcount's. C++ adds one if it holds
the tensor too; the tensor then has more uses than the one of its Python object."""


def _kept_storages(recorder: StepRecorder) -> tuple[KeptStorage, ...]:
    """Return storages of the forward pass that no Python object holds, so that only autograd's graph keeps them."""
    alive = {
        key
        for key, life in recorder.known.items()
        if life.phase == "F" and life.site and life.module and not life.kind
    }
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
            totals[recorder.position.names.plain(life.module), life.site] += life.bytes
    return tuple(KeptStorage(module, shortened(site), n) for (module, site), n in totals.most_common())


def _events(step: StepRecord, groups: GroupNames, names: ModelNames) -> Iterator[ObservedEvent]:
    for o in step.events:
        e = o.event
        if e.kind != "compute" or e.flops or e.alloc or e.free:
            axis = groups.name(e.axis, o.ranks) if e.kind != "compute" else e.axis
            yield replace(o, event=replace(e, axis=axis, unit=names.plain(e.unit)), module=names.plain(o.module))


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
