"""An instrumented step: FLOPs by unit and live tensor bytes, observed below autograd.

A dispatch mode sees every operation of the step, forward and backward. It counts FLOPs by torch's own formulas
(attention by ours: torch counts none on the CPU) and follows every storage from the operation that returns it until
its last reference dies. This is slow, so it is done in one step of a run. On CUDA, memory is what the allocator says.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from phalanx.runtime.comm import shm
from phalanx.runtime.comm.dtypes import DTYPE_NAMES
from phalanx.runtime.comm.recorder import Recorder, RunningPass
from phalanx.runtime.tracing.unit_hooks import unit_hooks

_aten = torch.ops.aten
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")


def _attention_flops(name: str, args: tuple[Any, ...]) -> int:
    """Return model FLOPs: 4 b h s² d forward (two products over the full square), twice that backward."""
    backward = "backward" in name
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    b, h, s, d = query.shape
    return (2 if backward else 1) * 4 * int(b) * int(h) * int(s) * int(key.shape[-2]) * int(d)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the FLOPs of an operation that returned `out`: of matrix products, convolutions and attention."""
    known = _formulas.get(func, "unknown")
    if known is None:
        return 0
    packet = func._overloadpacket
    name = packet.__name__
    if name.startswith(_ATTENTION):
        return _attention_flops(name, args)
    if packet is _aten._grouped_mm:  # every row, or element of the summed dimension, belongs to one group
        return 2 * int(args[0].numel()) * int(args[1].shape[-1])
    if packet is _aten.convolution_backward:  # each gradient takes as many as the output, also where there are groups
        gradient, x, weight = args[:3]
        positions = int((x if args[7] else gradient).shape[2:].numel())
        gradients = int(args[10][0]) + int(args[10][1])
        return gradients * 2 * int(x.shape[0]) * positions * int(weight.numel())
    if packet in flop_registry:
        return int(flop_registry[packet](*args[: _OPERANDS.get(func)], **kwargs, out_val=out))
    _formulas[func] = None
    return 0


_OPERANDS: dict[Any, int] = {_aten.mm.dtype_out: 2, _aten.addmm.dtype_out: 3}
"""FLOP formulas of products with an explicit result type, which torch's formulas do not accept."""
_formulas: dict[Any, None] = {}
"""Operations without FLOPs."""


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has bytes of its own: wrappers of others (DTensor, those that a compiler keeps) have none."""
    try:
        return tensor.is_sparse or tensor.untyped_storage().data_ptr() >= 0
    except RuntimeError:
        return False


class Tracker(TorchDispatchMode):
    """Counts FLOPs into a recorder and follows live bytes.

    `live`: bytes now; `start`: bytes live at the beginning; `peak`: the most since then; `highest`: the most since it
    was last set.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.live = self.peak = self.highest = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        for item in gc.get_objects():
            # type() rather than isinstance, which reads __class__ and so initialises lazy objects
            if issubclass(type(item), Tensor) and self.owns(item):
                self._follow(item)
        self.start = self.live

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every call the wrapper that disables torch's compiler: nothing is compiled here."""
        return False

    def owns(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor that exists when the step begins counts."""
        return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor) and _has_memory(tensor)

    def _follow(self, tensor: Tensor) -> None:
        if tensor.is_sparse:
            self._follow(tensor._indices())
            self._follow(tensor._values())
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or shm.is_arena_view(tensor):
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak, self.highest = max(self.peak, self.live), max(self.highest, self.live)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; subclasses may replace this."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self.call(func, args, kwargs or {})
        for item in (*args, *(out if isinstance(out, tuple | list) else (out,))):
            if isinstance(item, Tensor):
                self._follow(item)
            elif isinstance(item, list | tuple):
                for tensor in item:
                    if isinstance(tensor, Tensor):
                        self._follow(tensor)
        if flops := flops_of(func, args, kwargs or {}, out):
            self.recorder.flops(flops)
        return out


@contextmanager
def instrument(
    units: dict[str, nn.Module],
    recorder: Recorder,
    now: Callable[[], RunningPass],
    tracker: Callable[[Recorder], Tracker] = Tracker,
) -> Iterator[Tracker]:
    """Record a step: its collectives and each unit's forward and backward pass with FLOPs and live bytes.

    `now` returns the running micro-batch and phase. A unit's backward pass begins when its output's gradient
    arrives.
    """
    recorder.clear()

    def before(unit: str, module: nn.Module) -> None:
        recorder.compute("forward", "F", unit, now().micro_batch, _dtype(module))

    def after(unit: str, module: nn.Module, out: Tensor) -> None:
        def back(_: Tensor) -> None:
            m, phase = now()
            recorder.compute("input_grad" if phase == "I" else "backward", phase, unit, m, _dtype(module))

        if out.requires_grad:
            out.register_hook(back)

    # Hooks mark where each unit's passes begin.
    with unit_hooks(units, before, after):
        # Garbage of earlier steps would count as live.
        gc.collect()
        try:
            with tracker(recorder) as follows:
                recorder.keeping, recorder.meter = True, follows
                yield follows
                recorder.over()
        finally:
            recorder.keeping, recorder.meter = False, None


def _dtype(module: nn.Module) -> str:
    return DTYPE_NAMES[next(module.parameters()).dtype]
