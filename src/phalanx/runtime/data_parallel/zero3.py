"""ZeRO-3: a unit's parameters are gathered only while its forward or backward pass runs.

    forward of unit u    wait for u, start gathering u+1; then release u (but not the last unit, whose backward pass
                         is next)
    backward of unit u   wait for u, start gathering u-1; release u when its gradients are complete
    shared parameters    (`model`) are gathered before the module's forward pass and released like any unit

Experts that are sharded over other ranks than their unit have a bucket of their own, gathered and released with the
unit. Blocks may be gathered in 8 bits. Units take turns in two memories, and so do their experts.
Autograd would keep a unit's parameters alive through the tensors it saves: saved_tensors_hooks replace these by a
note of their place, which the backward pass looks up in the unit's current memory.

Shards of parameters in 8 bits, which ZeRO-3 gathers (schedule/gradients/sharding.py says what and why).

    after the optimizer   all-reduce of all matrices' largest magnitudes, and of other parameters; shards are rounded
    gather of a unit      all-gather of its bytes; matrices lie there as autograd/narrow_product.py reads them

Other parameters are whole on every rank from one update to the next, and are not gathered with their unit.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._C import _will_engine_execute_node as will_run
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from phalanx.runtime.autograd import narrow_product
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import same_place
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket, Piece, placeholder
from phalanx.schedule.event import Phase
from phalanx.schedule.gradients.buckets import SCALES, gathered_elements, gathers_in_8_bits, scales, slot_sizes, slots
from phalanx.spec.job import Precision
from phalanx.spec.number_formats import NUMBER_FORMATS

_MULTIPLE = NUMBER_FORMATS["float8"].multiple


class NarrowShards:
    """The rounded shards of buckets that are gathered over the same ranks. `memories`: the bytes in which each is
    gathered, which are free when `round` is called. `dtype`: the compute type."""

    def __init__(
        self, flats: Sequence[FlatBucket], memories: Sequence[Tensor], dtype: torch.dtype, comm: Comm
    ) -> None:
        self._flats, self._memories, self._dtype, self._comm = flats, memories, dtype, comm
        self.shards = {flat.name: comm.buffer(flat.part, torch.uint8) for flat in flats}
        """Shard of each bucket, (part,), the bytes of 8-bit floats."""
        every = [p for flat in flats for p in flat.bucket.parameters]
        # By parameter: its place in the all-reduced tensor, where all scales come first.
        self._places: dict[str, slice] = {}
        begins = 0
        for p in sorted(every, key=lambda p: not scales(p)):
            self._places[p.fqn] = slice(begins, begins + (scales(p) or p.numel))
            begins = self._places[p.fqn].stop
        self._numbers = comm.buffer(begins, torch.float32)
        self._matrices = sum(map(scales, every))
        self._back = torch.empty_like(self._numbers[: self._matrices])
        """Scale by which each matrix's 8-bit floats are multiplied."""
        self._whole = torch.empty_like(self._numbers[self._matrices :], dtype=dtype)
        """Parameters that are not matrices."""

    def place(
        self, flat: FlatBucket, memory: Tensor, parameters: dict[str, nn.Parameter], arrive: narrow_product.Arrive
    ) -> None:
        """Point a bucket's parameters to their places in `memory`, in which it is gathered; `arrive` waits for the
        gather."""
        views = flat.views(memory.view(narrow_product.E4M3))
        for p in flat.bucket.parameters:
            place = self._places[p.fqn]
            if scales(p):
                back = self._back[place] if p.of_experts else self._back[place.start]
                aligned = views[p.fqn].storage_offset() % _MULTIPLE == 0  # others may lie before this one
                parameters[p.fqn].in_8_bits = narrow_product.NarrowWeight(views[p.fqn], back, arrive, aligned)  # type: ignore[attr-defined]
            else:
                begins, ends = place.start - self._matrices, place.stop - self._matrices
                parameters[p.fqn].data = self._whole[begins:ends].view(p.shape)

    def round(self) -> None:
        """Find the scales, all ranks together, and round this rank's shards."""
        self._numbers.fill_(-math.inf)
        for flat in self._flats:
            self._announce(flat)
        first = self._flats[0]
        unit = first.bucket.kind(SCALES)
        self._comm.all_reduce(self._numbers, first.axis, unit=unit, phase="opt", reduction="max").wait()
        scale = narrow_product.scale_of(self._numbers[: self._matrices], narrow_product.E4M3)
        torch.reciprocal(scale, out=self._back)
        self._whole.copy_(self._numbers[self._matrices :])
        scale = scale.to(self._dtype)
        for flat, memory in zip(self._flats, self._memories, strict=True):
            narrow, wide = self.shards[flat.name].view(narrow_product.E4M3), memory.view(self._dtype)
            for piece, at in self._of_matrices(flat):
                values, into = piece.of(flat.master), piece.of(narrow)
                for part, rounded in zip(values.split(len(wide)), into.split(len(wide)), strict=True):
                    here = wide[: len(part)].copy_(part)  # in the compute type, as products round it
                    torch.mul(here, scale[at], out=rounded)

    def _announce(self, flat: FlatBucket) -> None:
        """Write this rank's share of a bucket to the all-reduced tensor: largest magnitudes of its parts of matrices,
        and parts of other parameters."""
        matrices = list(self._of_matrices(flat))
        if matrices:  # one after the other, and so are their scales
            largest = torch.stack(torch._foreach_norm([piece.of(flat.master) for piece, _ in matrices], math.inf))
            begins = matrices[0][1]
            self._numbers[begins : begins + len(matrices)].copy_(largest.to(self._dtype))
        for piece in flat.pieces():
            if not scales(piece.parameter):
                begins = self._places[piece.parameter.fqn].start
                here = self._numbers[begins + piece.start : begins + piece.stop]
                here.copy_(piece.of(flat.master).to(self._dtype))

    def _of_matrices(self, flat: FlatBucket) -> Iterator[tuple[Piece, int]]:
        """Yield the parts that this rank has of a bucket's matrices, cut by scale: (piece, place of its scale)."""
        for piece in flat.pieces():
            count = scales(piece.parameter)
            size = piece.parameter.numel // max(count, 1)
            for number in range(piece.start // size, -(-piece.stop // size)) if count else ():
                start, stop = max(piece.start, number * size), min(piece.stop, (number + 1) * size)
                part = Piece(piece.parameter, start, stop, piece.at + start - piece.start)
                yield part, self._places[piece.parameter.fqn].start + number


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
