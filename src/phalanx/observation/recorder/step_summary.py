"""A recorded step as plain data: groups named by mesh axes, and what held the memory when most was live."""

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

from phalanx.observation.recorder.any_step import GATHERED, PLAIN, AnyStep, Step, inner_tensors
from phalanx.observation.recorder.position import relative
from phalanx.observation.recorder.repetition import Life
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


def summarise(recorder: AnyStep, step: Step, groups: GroupNames) -> RankObservation:
    """Return a step as data. To be called when it ends, as what is a parameter or an optimizer's state is read from
    what is alive then."""
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
        holders=_held(step, recorder.device, [when], phase == "opt")[0],
        host_peak=step.peak.get("cpu", (0,))[0] if recorder.device != "cpu" else 0,
        synchronisations=tuple(Synchronisation(*what, n) for what, n in step.waits.items()),
        micro_batches=step.micro_batches,
        optimizers=tuple(recorder.position.optimizers),
        flops_by_type=dict(step.flops_by_type),
        trained=_trained(step),
        kept=_kept(recorder),
        backward_starts=_backward_starts(step, recorder.device),
    )


def _trained(step: Step) -> tuple[Trained, ...]:
    """Return the trained parameters, those of one unit and type together."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for t in step.trained.values():
        local, whole = totals.get((t.unit, t.dtype), (0, 0))
        totals[t.unit, t.dtype] = local + t.elements, whole + t.all_elements
    return tuple(Trained(name, *elements, dtype) for (name, dtype), elements in totals.items())


_OURS = 3
"""References to a tensor of a list that is iterated: the list's, the loop's, getrefcount's. C++ adds one where it
holds the tensor too, which then has more than the one use that its Python object is."""


def _kept(recorder: AnyStep) -> tuple[Kept, ...]:
    """Return what of the forward pass is still alive and held by no Python object, so by autograd's graph alone."""
    alive = {key for key, life in recorder.known.items() if life.place and life.module and not life.kind}
    if not alive:
        return ()
    for x in gc.get_objects():
        if type(x) in PLAIN and x.device.type != "meta" and x.layout == torch.strided:
            key = x.untyped_storage()._cdata
            if key in alive and sys.getrefcount(x) - (x._use_count() > 1) > _OURS:
                alive.remove(key)
    totals: Counter[tuple[str, tuple[str, int, str]]] = Counter()
    for key in alive:
        life = recorder.known[key]
        if life.device == recorder.device and life.place:
            totals[life.module, life.place] += life.bytes
    return tuple(Kept(m, Site(relative(p[0]), *p[1:]), n) for (m, p), n in totals.most_common())


def _events(step: Step, groups: GroupNames) -> list[Observed]:
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

    `axes`: axes that the user named, outermost first, with their sizes; they serve where a program makes its groups
    without a DeviceMesh.
    """

    def __init__(self, world: int, axes: Mapping[str, int] | None = None) -> None:
        self.world = world
        self.axes = dict(axes or {})
        self._named: dict[str, str] = {}

    def read_meshes(self) -> None:
        """Read the names of all groups of all meshes that exist. Flattened axes keep the names they were given."""
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
    steps: set[int] = set()
    for x in gc.get_objects():
        if issubclass(type(x), nn.Parameter) or (issubclass(type(x), torch.Tensor) and x.__dict__.get("_is_param")):
            steps.update(t.untyped_storage()._cdata for t in inner_tensors(x))
    return steps


def _optimizer_state() -> set[int]:
    steps: set[int] = set()
    for x in gc.get_objects():
        if issubclass(type(x), torch.optim.Optimizer):
            for state in x.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        steps.update(t.untyped_storage()._cdata for t in inner_tensors(value))
    return steps


_OTHER = "inputs, buffers and other"
_MADE_IN = {"F": "activations", "opt": "tensors of the optimizer"}


def _what(life: Life, began: int, optimizing: bool) -> tuple[str, str]:
    """Return the kind of a tensor that is live, and for those of the step their unit. `optimizing`: whether the last
    backward pass had ended then; what was made outside of passes before is for those that follow."""
    if life.born <= began or (life.phase == "opt" and not optimizing):
        return life.kind or _OTHER, ""
    return life.kind or _MADE_IN.get(life.phase, "tensors of the backward pass"), unit(life.module)


def _at_start(step: Step, device: str) -> dict[str, int]:
    """Return what was live when the step began, by kind."""
    totals: Counter[str] = Counter()
    for life in step.lives:
        if life.born <= step.began and life.device == device and life.bytes:
            totals[life.kind or _OTHER] += life.bytes
    return dict(totals)


def _backward_starts(step: Step, device: str) -> tuple[BackwardStart, ...]:
    """Return what was live as backward passes began, those that found the same together."""
    alike: dict[tuple[str, tuple[Holder, ...]], list[int]] = {}
    held_at = _held(step, device, [when for *_, when in step.backwards], optimizing=False)
    for (phase, micro_batch, _), held in zip(step.backwards, held_at, strict=True):
        alike.setdefault((phase, held), []).append(micro_batch)
    return tuple(BackwardStart(phase, tuple(batches), held) for (phase, held), batches in alike.items())


def _held(step: Step, device: str, times: Sequence[int], optimizing: bool) -> list[tuple[Holder, ...]]:
    """Return what was live at each of some ascending times, largest first."""
    totals: list[Counter[tuple[str, str]]] = [Counter() for _ in times]
    for life in step.lives:
        if life.device == device and life.bytes:
            what = _what(life, step.began, optimizing)
            for i in range(bisect_left(times, life.born), bisect_left(times, life.died)):
                totals[i][what] += life.bytes
    return [tuple(Holder(kind, module, n) for (kind, module), n in held.most_common()) for held in totals]
