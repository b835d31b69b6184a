"""A recorded step as plain data: groups named by mesh axes, and the holders of memory at its peak."""

from __future__ import annotations

import gc
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.observation.recorder.memory import StepMemory, identify
from phalanx.observation.recorder.models import ModelNames
from phalanx.observation.recorder.places import shortened
from phalanx.observation.recorder.step import PLAIN, StepRecord, StepRecorder
from phalanx.schedule.event import Phase
from phalanx.schedule.observation import Kept, Observed, RankObservation, Site, Synchronisation, Trained


def summarise(recorder: StepRecorder, step: StepRecord, groups: GroupNames) -> RankObservation:
    """Return a step as data. Call it when the step ends: parameters and optimizer state are identified among the
    objects that are alive then."""
    identify(recorder)
    groups.read_meshes()
    names = recorder.position.names
    memory = StepMemory(step, recorder.device, names)
    peak, when, phase, module = step.peak.get(recorder.device, (0, 0, "F", ""))
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
        holders=memory.holders([when])[0],
        host_peak=step.peak.get("cpu", (0,))[0] if recorder.device != "cpu" else 0,
        synchronisations=tuple(
            Synchronisation(call, phase, names.plain(module), site, n)
            for (call, phase, module, site), n in step.waits.items()
        ),
        micro_batches=step.micro_batches,
        optimizers=tuple(recorder.position.optimizers),
        flops_by_type=dict(step.flops_by_type),
        trained=_trained(step, names),
        kept=_kept(recorder),
        backward_starts=memory.backward_starts(),
        models=names.several,
        allocations=memory.allocations(when),
    )


def _named_flops(step: StepRecord, names: ModelNames) -> dict[tuple[Phase, str], int]:
    """Return the FLOPs by pass and module."""
    totals: Counter[tuple[Phase, str]] = Counter()
    for (phase, module), n in step.flops.items():
        totals[phase, names.plain(module)] += n
    return dict(totals)


def _trained(step: StepRecord, names: ModelNames) -> tuple[Trained, ...]:
    """Return the trained parameters, summed by unit and type."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for t in step.trained.values():
        key = names.plain(t.unit), t.dtype
        local, whole = totals.get(key, (0, 0))
        totals[key] = local + t.elements, whole + t.all_elements
    return tuple(Trained(name, *elements, dtype) for (name, dtype), elements in totals.items())


_OURS = 3
"""References to a tensor in a list that is iterated: the list's, the loop's, getrefcount's. C++ adds one if it holds
the tensor too; the tensor then has more uses than the one of its Python object."""


def _kept(recorder: StepRecorder) -> tuple[Kept, ...]:
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
    return tuple(Kept(module, shortened(site), n) for (module, site), n in totals.most_common())


def _events(step: StepRecord, groups: GroupNames, names: ModelNames) -> Iterator[Observed]:
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
