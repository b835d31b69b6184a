"""ZeRO-3: a unit's parameters are gathered only while its forward or backward pass runs.

    forward of unit u    wait for u, start gathering u+1; then release u (but not the last unit, whose backward pass
                         is next)
    backward of unit u   wait for u, start gathering u-1; release u when its gradients are complete
    shared parameters    (`model`) are gathered before the module's forward pass and released like any unit

Experts that are sharded over other ranks than their unit have a bucket of their own, gathered and released with the
unit. Blocks may be gathered in 8 bits (narrow_shards.py). Units take turns in two memories, and so do their experts.
Autograd would keep a unit's parameters alive through the tensors it saves: saved_tensors_hooks replace these by a
note of their place, which the backward pass looks up in the unit's current memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain, count
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._C import _will_engine_execute_node as will_run
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import same_place
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket, placeholder
from phalanx.runtime.data_parallel.narrow_shards import NarrowShards
from phalanx.schedule.event import Phase
from phalanx.schedule.gradients.buckets import gathered_elements, gathers_in_8_bits, slot_sizes, slots
from phalanx.spec.job import Precision

SHARED = "model"


class _Unit:
    """The parameters of one unit, or of its experts; gathered they are views in `memory`, else placeholders."""

    def __init__(self, flat: FlatBucket, parameters: dict[str, nn.Parameter], memory: Tensor) -> None:
        self.flat, self.memory = flat, memory
        self.narrow: NarrowShards | None = None  # if it is gathered in 8 bits
        self.parameters = parameters
        self.views = {} if memory.dtype == torch.uint8 else flat.views(memory)
        self.placeholders = {name: placeholder(p) for name, p in parameters.items()}
        self.gathered = False
        for name, p in parameters.items():
            p.data = self.placeholders[name]


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that a compiled module runs between its graphs. The tracer, which takes two seconds to import, is
    there where something was compiled."""
    if "torch._dynamo" not in sys.modules:
        return hook
    untraced: Callable[..., None] = torch.compiler.disable(hook)
    return untraced


class ParameterGatherer:
    """Gathers and releases the parameters of a module's units. `prefetch`: units gathered ahead, 0 or 1; `keep`:
    gather once a step and release at its end. `begins`: callback as a unit's backward pass begins, before anything is
    gathered for it; its argument says of a unit whether it has a backward pass under way or still to come.
    `precision` determines which units are gathered in 8 bits."""

    def __init__(
        self,
        module: nn.Module,
        units: dict[str, nn.Module],
        buckets: list[FlatBucket],
        comm: Comm,
        prefetch: int,
        keep: bool,
        begins: weakref.WeakMethod[Callable[[Callable[[str], bool]], None]],
        precision: Precision,
    ) -> None:
        self.comm, self.prefetch, self.keep, self._begins = comm, prefetch, keep, begins
        self.order = [name for name in units if any(b.bucket.unit == name for b in buckets)]
        parameters = dict(module.named_parameters())
        dtype = parameters[buckets[0].bucket.parameters[0].fqn].dtype
        self._names: dict[str, list[str]] = {}  # of each unit's buckets, in the order of gathering
        for b in sorted(buckets, key=lambda b: b.bucket.experts):
            self._names.setdefault(b.bucket.unit, []).append(b.name)
        # Memory to gather into: a buffer per bucket if gathered once a step, else buffers that units use in turn.
        memories: list[tuple[FlatBucket, Tensor]] = []
        for experts in (False, True):
            kind = {b.bucket.unit: b for b in buckets if b.bucket.experts == experts}
            turns = [kind[name] for name in self.order if name in kind]
            sizes = [gathered_elements(b.bucket, b.padded, precision) for b in turns]
            if keep:
                memories += [(b, comm.buffer(n, dtype)) for b, n in zip(turns, sizes, strict=True)]
            else:
                shared = [comm.buffer(n, dtype) for n in slot_sizes(sizes)]
                memories += [(b, shared[slot]) for b, slot in zip(turns, slots(sizes), strict=True)]
            if SHARED in kind:
                memories.append((kind[SHARED], comm.buffer(kind[SHARED].padded, dtype)))
        # Units, with placeholders until they are gathered.
        self.units: dict[str, _Unit] = {}  # by the name of the bucket
        for b, memory in memories:
            own = {p.fqn: parameters[p.fqn] for p in b.bucket.parameters}
            memory = memory[: gathered_elements(b.bucket, b.padded, precision)]
            eight = gathers_in_8_bits(b.bucket, precision)
            self.units[b.name] = _Unit(b, own, memory.view(torch.uint8) if eight else memory)
        # Units that are gathered in 8 bits.
        self._narrow = []
        for experts in (False, True):
            held = [u for u in self.units.values() if u.flat.bucket.experts == experts]
            held = [u for u in held if gathers_in_8_bits(u.flat.bucket, precision)]
            if held:
                self._narrow.append(NarrowShards([u.flat for u in held], [u.memory for u in held], dtype, comm))
            for unit in held:
                unit.narrow = self._narrow[-1]
                unit.narrow.place(
                    unit.flat, unit.memory, unit.parameters, partial(self._arrived, weakref.ref(self), unit.flat.name)
                )
        self._micro_batch: int | None = None
        # Of each unit the calls whose backward passes have not begun, by number: what ends their forward passes.
        self._calls: dict[str, dict[int, list[Node]]] = {name: {} for name in self.order}
        self._numbers = count()
        self.called = 0
        """A sum over all calls so far, which is equal on ranks that called the same units in the same order."""
        self._watch(module, units)

    def _watch(self, module: nn.Module, units: dict[str, nn.Module]) -> None:
        gatherer = weakref.ref(self)

        def before(name: str) -> Any:
            saved: list[saved_tensors_hooks] = []

            def enter(_: nn.Module, args: object) -> None:
                gathered = gatherer()
                if gathered is not None:
                    gathered.forward_begins(name)
                    saved.append(gathered.note_places(name))
                    saved[-1].__enter__()

            def leave(_: nn.Module, args: object, out: Any) -> None:
                if saved:
                    saved.pop().__exit__(None, None, None)
                gathered = gatherer()
                if gathered is not None:
                    gathered.forward_ends(name, out)

            return _untraced(enter), _untraced(leave)

        # Units gather before their forward pass, and release after it.
        for name in self.order:
            enter, leave = before(name)
            units[name].register_forward_pre_hook(enter)
            units[name].register_forward_hook(leave, always_call=True)

        # Parameters that several units share are gathered for the whole pass.
        def all_begins(_: nn.Module, args: object) -> None:
            gathered = gatherer()
            if gathered is not None and SHARED in gathered.units:
                gathered.need(SHARED, "F")

        def all_ends(_: nn.Module, args: object, out: object) -> None:
            gathered = gatherer()
            if gathered is not None and SHARED in gathered.units and not torch.is_grad_enabled():
                gathered._release_unit(SHARED)

        module.register_forward_pre_hook(_untraced(all_begins))
        module.register_forward_hook(_untraced(all_ends))

    def micro_batch(self, index: int | None) -> None:
        """Set the micro-batch that collectives are recorded under; None outside of a step."""
        self._micro_batch = index

    def start(self, name: str, phase: Phase) -> None:
        """Start gathering a unit."""
        for bucket in self._names[name]:
            self._start(bucket, phase)

    def _start(self, name: str, phase: Phase) -> None:
        unit = self.units[name]
        if unit.gathered or unit.flat.gathering is not None:
            return
        for other in self.units.values():  # the memory's current user is done with it, or gathers again
            if other is not unit and same_place(other.memory, unit.memory):
                self._arrive(other)
                self._release(other)
        flat = unit.flat
        if unit.narrow is None:
            own = flat.own(unit.memory)
            own.copy_(flat.master)
        else:
            own = unit.narrow.shards[name]
        flat.gathering = self.comm.all_gather(
            unit.memory, own, flat.axis, unit=name, phase=phase, micro_batch=self._micro_batch
        )

    def need(self, name: str, phase: Phase) -> None:
        """Gather a unit and wait for it."""
        self.start(name, phase)
        for bucket in self._names[name]:
            self._need(bucket, phase)

    def _need(self, bucket: str, phase: Phase) -> None:
        self._start(bucket, phase)
        unit = self.units[bucket]
        self._arrive(unit)
        if not unit.gathered:
            for fqn, view in unit.views.items():
                unit.parameters[fqn].data = view
            unit.gathered = True

    @staticmethod
    def _arrived(this: weakref.ref[ParameterGatherer], bucket: str) -> None:
        """Wait for a bucket that a pass reads; gather it again if another unit took its memory."""
        gathered = this()
        if gathered is not None:
            gathered._need(bucket, "B")

    def _arrive(self, unit: _Unit) -> None:
        if unit.flat.gathering is not None:
            unit.flat.gathering.wait()
            unit.flat.gathering = None

    def forward_begins(self, name: str) -> None:
        """Gather a unit for its forward pass, and start on the next one."""
        self.called = crc32(name.encode(), self.called)
        self.need(name, "F")
        after = self.order.index(name) + 1
        if self.prefetch and after < len(self.order):
            self.start(self.order[after], "F")

    def forward_ends(self, name: str, out: Any) -> None:
        """Release a unit after its forward pass, and watch its outputs for the backward pass."""
        if not torch.is_grad_enabled():
            self._release_unit(name)
            return
        if name != self.order[-1] and not self.keep:
            self._release_unit(name)
        this, call = weakref.ref(self), next(self._numbers)

        def begins(_: Tensor) -> None:
            gathered = this()
            if gathered is not None:
                gathered.backward_begins(name, call)

        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        for tensor in outputs:
            tensor.register_hook(begins)
        self._calls[name][call] = [t.grad_fn for t in outputs if t.grad_fn is not None]

    def backward_begins(self, name: str, call: int) -> None:
        """Gather a unit for the backward pass of one of its calls, and start on the unit before it."""
        if self._calls[name].pop(call, None) is None:
            return  # it began by another output; one that it only hands on, as T5's bias, comes when its maker begins
        announce = self._begins()
        if announce is not None:
            announce(lambda unit: unit == name or any(map(will_run, chain(*self._calls.get(unit, {}).values()))))
        self.need(name, "B")
        before = self.order.index(name) - 1
        if self.prefetch and before >= 0:
            self.start(self.order[before], "B")

    def release(self, name: str) -> None:
        """Release a bucket whose gradients are complete, unless it is kept for the step."""
        if not self.keep:
            self._release(self.units[name])

    def end_of_step(self) -> None:
        """Release every unit, and wait for those in flight: the weights are about to change."""
        for unit in self.units.values():
            self._arrive(unit)
            self._release(unit)
        for calls in self._calls.values():
            calls.clear()
        self._micro_batch = None

    @torch.no_grad()
    def updated(self) -> None:
        """Publish updated masters: release every unit, and round those gathered in 8 bits."""
        self.end_of_step()
        for narrow in self._narrow:
            narrow.round()

    def _release_unit(self, name: str) -> None:
        for bucket in self._names[name]:
            self._release(self.units[bucket])

    def _release(self, unit: _Unit) -> None:
        if unit.gathered:
            for name in unit.views:
                unit.parameters[name].data = unit.placeholders[name]
            unit.gathered = False

    def note_places(self, name: str) -> saved_tensors_hooks:
        """Return hooks by which autograd saves the place of a unit's parameters instead of their memory."""
        own = {self.units[b].memory.untyped_storage()._cdata: self.units[b] for b in self._names[name]}

        def pack(tensor: Tensor) -> Any:
            unit = own.get(tensor.untyped_storage()._cdata)
            if unit is None or not unit.gathered:
                return tensor
            return (unit, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            unit, dtype, size, stride, offset = saved
            # Gather again if another unit took the memory (units out of order), or experts were released already.
            self._need(unit.flat.name, "B")
            return torch.as_strided(unit.memory.view(dtype), size, stride, offset)

        return saved_tensors_hooks(pack, unpack)
