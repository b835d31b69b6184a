"""A training step of any torch program, seen from below autograd: collectives, FLOPs, live bytes, waits of the host.

A dispatch mode sees every operation of a program, forward, backward and optimizer, on real tensors or on fake ones
(fake/recorder.py). It knows nothing of the libraries above it: whatever DDP, fully_shard, DTensor or a pipeline does
arrives here. Live bytes follow every storage from the operation that returns it until its last reference dies;
storages that are resized (as FSDP2 frees and refills gathered parameters) are followed too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from phalanx.observation.recorder import collective_ops
from phalanx.observation.recorder.operations import (
    WAITS,
    allocates_only,
    operation,
    returns_view,
    saved_for_backward,
    tensors,
    wait_of,
)
from phalanx.observation.recorder.places import innermost
from phalanx.observation.recorder.position import OUTSIDE, ModuleCall, Position
from phalanx.observation.recorder.repetition import LIVES, Life, Log
from phalanx.runtime.tracing.instrument import flops_of
from phalanx.schedule.event import Event, Phase
from phalanx.schedule.observation import ObservedEvent, Site, TrainedParameters, unit_of

GATHERED, GRADIENTS, PARAMETERS, STATE = "gathered parameters", "gradients", "parameters", "optimizer state"
PLAIN = frozenset((Tensor, nn.Parameter, nn.Buffer, FakeTensor))
_aten = torch.ops.aten
_BELOW_FUNCTIONS = ("aten", "_c10d_functional")
"""Operations of torch: a program's function modes must not see the calls that their Python code makes. Operations of
other libraries may have fake kernels in Python, which are programs like any other."""
_COPIES = (_aten._to_copy.default, _aten.copy_.default)


@dataclass
class StepRecord:
    """The record between two step boundaries. `began`: the count of changes of live bytes at its beginning."""

    number: int
    began: int = 0
    events: list[ObservedEvent] = field(default_factory=list)
    flops: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    flops_by_type: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, Phase, str, Site]] = field(default_factory=Counter)
    lives: list[Life] = field(default_factory=list)
    peak: dict[str, tuple[int, int, Phase, str]] = field(default_factory=dict)
    """By type of device: the most live bytes, when (a count of changes), and in which phase and module."""
    micro_batches: int = 0
    backwards: list[tuple[Phase, int, int]] = field(default_factory=list)
    """The backward passes: phase, micro-batch, and when (a count of changes) they began."""
    trained: dict[int, TrainedParameters] = field(default_factory=dict)
    """The parameters that optimizers update, by id."""


class StepRecorder(TorchDispatchMode):
    """Records every step of a program. `on_step` is called at each step boundary with the completed step."""

    def __init__(self, on_step: Callable[[StepRecord], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_step = on_step
        self.position = Position(self.finish)
        self.position.begins_backward = self._saved
        self.device = "cpu"
        """The type of device on which the program computes."""
        self.live: Counter[str] = Counter()
        self.step = StepRecord(1)
        self.clock = 0
        self.known: dict[int, Life] = {}
        self.log: Log | None = None
        """The log of the pass that runs, which may be repeated later."""
        self._sized: set[int] = set()
        self._backwards = 0
        self._now: tuple[Phase, ModuleCall] = ("F", OUTSIDE)
        self._func: Any = None  # the operation that runs
        self._segment: int = -1  # index of the compute event that runs
        self._segment_key: tuple[str, str, int | None] | None = None
        self._segment_live = self._segment_peak = self._segment_flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @contextmanager
    def recording(self) -> Iterator[StepRecorder]:
        """Record all operations inside the block."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self._resized(storage)
            return out

        hooks = (
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        )
        try:
            with (
                patch.object(torch.UntypedStorage, "resize_", resized),
                self.position.parts_of_backward(),
                self.position.backward_passes(),
                self.position.owners_in_fsdp(),
                self,
            ):
                yield self
        finally:
            for hook in hooks:
                hook.remove()
            self.position.close()

    # Live bytes

    def _change(self, device: str, by: int) -> None:
        self.clock += 1
        self.live[device] += by
        live = self.live[device]
        if by > 0 and live > self.step.peak.get(device, (0,))[0]:
            phase, call = self._now
            self.step.peak[device] = (live, self.clock, phase, call.module)
        if device == self.device:
            self._segment_peak = max(self._segment_peak, live)

    def follow(self, tensor: Tensor, kind: str = "") -> None:
        """Count a tensor's storage as live until its last reference dies."""
        device = tensor.device.type
        if device == "meta" or tensor.is_sparse:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self.known.get(key)
        if known is not None:
            if known.buffer and (kind or not (known.operation or returns_view(self._func))):
                known.operation = kind or self._operation_name()
            return
        if device != "cpu" and self.device == "cpu":
            self.device = device
        phase, call = self._now
        size = storage.nbytes()
        life = Life(device, size, self.clock + 1, kind, self.position.owner(call), phase)
        if phase == "F" or phase == "opt":
            life.site = innermost()
        life.buffer = allocates_only(self._func)
        life.operation = "" if life.buffer else self._operation_name()
        if self.log is not None:
            self.log.birth(life)
        self.adopt(storage, life)
        self.begin(life)

    def _operation_name(self) -> str:
        """Return the name of the operation that runs, in backward of the one whose gradient it computes."""
        of = self.position.backward_of() if self._func.namespace == "aten" else ""
        return f"backward of {of}" if of else operation(self._func)

    def _saved(self, results: Iterable[Any]) -> None:
        """Note for which operations the graph of some tensors keeps storages."""
        with torch._C._DisableTorchDispatch():
            for key, name in saved_for_backward(results):
                if life := self.known.get(key):
                    life.saved_for |= {name}

    def adopt(self, storage: torch.UntypedStorage, life: Life) -> None:
        """End a life with the last reference to its storage, unless it has ended by then."""
        key = storage._cdata

        def freed(_: Any) -> None:
            ended = self.known.pop(key)
            if ended.died == LIVES:
                if self.log is not None:
                    self.log.death(ended)
                self.end(ended)

        life.ref = weakref.ref(storage, freed)
        self.known[key] = life

    def begin(self, life: Life) -> None:
        """Count a life's bytes from now on."""
        self.step.lives.append(life)
        self._change(life.device, life.bytes)

    def end(self, life: Life) -> None:
        """Count a life's bytes no longer."""
        life.died = self.clock + 1
        self._change(life.device, -life.bytes)

    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return the storages that were ever resized, with their current sizes: what is gathered and what is not."""
        return tuple(sorted((key, self.known[key].bytes) for key in self._sized if key in self.known))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        old = self.known.get(storage._cdata)
        size = storage.nbytes()
        if old is None or old.bytes == size:
            return
        self._sized.add(storage._cdata)
        owner = self.position.owner(self.position.now()[1])
        if self.log is not None:
            self.log.entries.append(("resize", storage._cdata, old.bytes, size, owner))
        self.resize(storage._cdata, size, owner)

    def resize(self, key: int, size: int, owner: str) -> None:
        """Count a storage at its new size from now on. `owner`: the module for which it was resized."""
        old = self.known[key]
        old.died = self.clock + 1
        kind = GATHERED if size else old.kind
        life = Life(old.device, size, old.died, kind, owner, self._now[0], ref=old.ref, site=old.site)
        life.operation = "all_gather" if size else old.operation
        self.known[key] = life
        self.step.lives.append(life)
        self._change(old.device, size - old.bytes)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    local = sum(t.numel() for t in inner_tensors(p))
                    module = unit_of(self.position.names.of_parameter(p))
                    self.step.trained[id(p)] = TrainedParameters(module, local, p.numel(), dtype_name(p.dtype))
                for kind, tensor in ((PARAMETERS, p), (GRADIENTS, p.grad)):
                    for t in inner_tensors(tensor):
                        if life := self.known.get(t.untyped_storage()._cdata):
                            life.kind = GRADIENTS if kind == GRADIENTS else life.kind or kind

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for state in optimizer.state.values():
            for t in (t for value in tensors(*state.values()) for t in inner_tensors(value)):
                if life := self.known.get(t.untyped_storage()._cdata):
                    life.kind = STATE

    # Operations

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; subclasses may replace this."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # frequent
            return self.call(func, args, kwargs or {})
        if func.namespace == "profiler":  # record_function: marks, which compute nothing
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))
        for t in types:
            if t not in PLAIN:
                return NotImplemented  # a wrapper such as DTensor: operations on its inner tensors arrive here
        if func.namespace in _BELOW_FUNCTIONS:
            with torch._C.DisableTorchFunction():
                return self._operation(func, args, kwargs or {})
        return self._operation(func, args, kwargs or {})

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.at(self.position.now())
        kind = ""
        if func.namespace in collective_ops.NAMESPACES:
            kind = self._collective(func, args, kwargs)
        elif func in WAITS or func in _COPIES:
            self._wait(func, args, kwargs)
        out = self.call(func, args, kwargs)
        self._func = func
        for tensor in tensors(args, out):
            if type(tensor) in PLAIN:  # wrappers such as AsyncCollectiveTensor have no storage of their own
                self.follow(tensor, kind)
        if flops := flops_of(func, args, kwargs, out):
            self.count(flops, dtype_name(tensors(args)[0].dtype))
        return out

    def at(self, now: tuple[Phase, ModuleCall]) -> None:
        """Set the phase and the module's call that run now."""
        phase, call = now
        if (phase == "B" or phase == "I") and call.micro_batch is not None:
            before, last = self._now
            if before != phase or last.micro_batch != call.micro_batch or self._backwards != self.position.backwards:
                self.step.backwards.append((phase, call.micro_batch, self.clock))
            self._backwards = self.position.backwards
        self._now = now
        if self.log is not None:
            self.log.at(now)
        self._enter()

    def count(self, flops: int, dtype: str) -> None:
        """Count FLOPs of the call that runs now."""
        phase, call = self._now
        self.step.flops[phase, call.module] += flops
        self.step.flops_by_type[dtype] += flops
        self._segment_flops += flops
        if self.log is not None:
            self.log.entries.append(("flops", flops, dtype))

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        issued = collective_ops.read(func, args, kwargs)
        if not issued:
            return ""
        phase, call = self._now
        site, module = self.position.site(), self.position.owner(call)
        for c in issued:
            message = c.op in ("send", "recv")
            between = message and phase == "opt" and not self.position.stepped  # backward passes of a pipeline
            event = Event(
                "p2p" if message else "collective",
                c.op,
                "B" if between else phase,
                unit_of(module),
                c.group.group_name,
                c.group.size(),
                c.peer,
                dtype_name(c.dtype),
                micro_batch=call.micro_batch,
                bytes=c.bytes,
            )
            self.issued(ObservedEvent(event, module, site, c.ranks, str(func)))
        return f"buffers of {issued[0].op}"

    def issued(self, observed: ObservedEvent) -> None:
        """Record a collective or a message."""
        self.step.events.append(observed)
        if self.log is not None:
            self.log.event(observed)

    def _wait(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in _COPIES:  # the host waits only for one to its memory that is not pinned
            source, to = (args[1], args[0].device) if func is _aten.copy_.default else (args[0], kwargs.get("device"))
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if to is None or to.type != "cpu" or source.device.type == "cpu" or not blocking:
                return
            self.waited("copy to the host")
        elif args[0].device.type != "cpu" and (name := wait_of(func, kwargs)):
            self.waited(name)

    def answered_again(self, operation: str, value: str, place: str) -> None:
        """Count a value that a repeated pass was given, where tensors have none."""

    def waited(self, call: str) -> None:
        """Record that the host waits for the device here."""
        self.waits_at(call, self.position.site())

    def waits_at(self, call: str, site: Site) -> None:
        """Record that the host waits at a line of the program."""
        phase, at = self._now
        self.step.waits[call, phase, at.module, site] += 1
        if self.log is not None:
            self.log.entries.append(("wait", call, site))

    # Passes

    def _enter(self) -> None:
        """Begin a compute event where phase, unit or micro-batch change."""
        phase, call = self._now
        key = phase, unit_of(call.module), call.micro_batch
        if key != self._segment_key:
            self._close()
            self._segment, self._segment_key = len(self.step.events), key
            event = Event("compute", _OP[phase], phase, key[1], micro_batch=call.micro_batch)
            self.step.events.append(ObservedEvent(event, key[1]))

    def _close(self) -> None:
        live = self.live[self.device]
        if self._segment >= 0:
            at = self.step.events[self._segment]
            alloc, free = self._segment_peak - self._segment_live, self._segment_peak - live
            event = replace(at.event, flops=self._segment_flops, alloc=alloc, free=free)
            self.step.events[self._segment] = replace(at, event=event)
        self._segment, self._segment_key, self._segment_flops = -1, None, 0
        self._segment_live = self._segment_peak = live

    # Steps

    def finish(self) -> None:
        """End the step and begin the next one."""
        self._close()
        ended = self.step
        ended.number -= self.position.partial
        ended.micro_batches = self.position.micro_batches
        self.step = StepRecord(ended.number + 1, self.clock, lives=list(self.known.values()))
        for device, live in self.live.items():
            self.step.peak[device] = (live, self.clock, "F", "")
        self.on_step(ended)


_OP = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad", "opt": "optimizer"}


def inner_tensors(tensor: Tensor | None) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor, or a wrapper such as DTensor, holds."""
    if tensor is None:
        return
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from inner_tensors(inner)
    else:
        yield tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in events, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
