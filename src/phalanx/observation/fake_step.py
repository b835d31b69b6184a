"""One rank's real training step on fake tensors, in a world of which no process was started.

Model, engine, compressor and optimizer are those that `train` runs. Replaced are tensors (torch's fake ones: shapes
without memory or kernels), the transport (null), and the values that the host reads (runtime/tracing/host_values.py).
A call to torch.distributed that bypasses comm fails the step, and so does any operation that depends on values.

The tensors are the host's, or those of an imagined GPU (observation/gpu.py): then the step also has to keep the rules
of a GPU (gpu_rules.py), and the times that the host waits for it are counted.
"""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.testing._internal.distributed import fake_pg  # its import registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx
from phalanx.observation.diff import RecordedMemory
from phalanx.observation.fake import device as gpu
from phalanx.observation.fake import gpu_rules, meta_ops
from phalanx.observation.fake.gpu_rules import AgainstTheRules, AsOnCuda
from phalanx.observation.steady_state import Steady, Unsteady
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.in_flight import NotIssued
from phalanx.runtime.comm.recorder import Recorder
from phalanx.runtime.data_parallel.compression import sparse
from phalanx.runtime.process.environment import World
from phalanx.runtime.tracing import host_values
from phalanx.runtime.tracing.instrument import Tracker, instrument
from phalanx.schedule.event import Event
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layers.context import Context
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training import parallelize
from phalanx.training.training_step import Training

T = TypeVar("T")

_PAST_COMM = ("c10d", "_c10d_functional", "_dtensor")


class Unverifiable(Exception):
    """The step did something that cannot be verified; the message says what and where."""


@dataclass(frozen=True)
class Recorded:
    """The record of a rank's step. `ran`: micro-batches that were executed; if they are fewer than the step has, the
    last but one of them stands for all between. `unawaited`: names of collectives that were never waited for.
    `waits`: where the host waits for the GPU in a step, and how often; empty on the host itself."""

    rank: int
    events: tuple[Event, ...]
    memory: RecordedMemory
    ran: int
    unawaited: tuple[str, ...]
    waits: Mapping[str, int] = field(default_factory=dict)


HOST = torch.device("cpu")


def gpu_device() -> torch.device:
    """Return the imagined GPU, which torch knows from then on."""
    gpu.register()
    return torch.device(gpu.NAME, 0)


@dataclass(frozen=True)
class Imagined(World):
    """A rank of a world that is not running, on the host or on an imagined GPU."""

    on: torch.device = HOST

    @property
    def device(self) -> torch.device:
        return self.on


class Shapes:
    """Weights that have shapes and no values."""

    def has(self, fqn: str) -> bool:
        return True

    def dtype(self, fqn: str) -> torch.dtype:
        return torch.float32

    def slice(self, fqn: str, start: int, stop: int) -> Tensor:
        return torch.empty(stop - start)


class Guard(TorchDispatchMode):
    """Refuses collectives that bypass comm while the model is built; for a GPU also operations that mix its tensors
    with the host's. There the host may wait."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every call the wrapper that disables torch's compiler, as Tracker does."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked very often: answered without a dispatch
            return args[0].fake_device
        _refuse_past_comm(func)
        if self._device.type != "cpu":
            try:
                gpu_rules.require_one_place(func, args, kwargs or {}, self._device)
            except AgainstTheRules as error:
                raise Unverifiable(f"{error}, at {_place(traceback.extract_stack())}") from None
        out = meta_ops.run(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if out is None else out


def _refuse_past_comm(func: Any) -> None:
    if func.namespace in _PAST_COMM:
        raise Unverifiable(f"{func} bypasses comm, at {_place(traceback.extract_stack())}")


class Watch(Tracker):
    """Tracks the memory of this step's fake tensors, and refuses collectives that bypass comm; on a GPU also what
    breaks its rules. `flights` are the collectives under way."""

    device = HOST
    flights: Callable[[], Iterable[NotIssued]] = staticmethod(tuple)

    def __init__(self, recorder: Recorder) -> None:
        self._mode = active_fake_mode()
        super().__init__(recorder)

    def owns(self, tensor: Tensor) -> bool:
        """Fake tensors of another mode are a stranger's: whoever calls may hold some, or a compiler's cache does."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode and tensor.device.type != "meta"

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = meta_ops.run(func, args, kwargs)
        if out is not None:
            return out
        if self.device.type != "cpu":
            out, has_run = gpu_rules.run(func, args)
            if has_run:
                return out
        try:
            return super().call(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise Unverifiable(
                f"{func} looks at what a tensor holds, at {_place(traceback.extract_stack())}"
            ) from None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked very often: answered without a dispatch
            return args[0].fake_device
        _refuse_past_comm(func)
        if self.device.type == "cpu":
            return super().__torch_dispatch__(func, types, args, kwargs)
        try:
            gpu_rules.require(func, args, kwargs or {}, self.device)
            gpu_rules.require_free(func, args, kwargs or {}, self.flights())
        except AgainstTheRules as error:
            raise Unverifiable(f"{error}, at {_place(traceback.extract_stack())}") from None
        return super().__torch_dispatch__(func, types, args, kwargs)


def imagine(spec: ModelSpec, job: Job, strategy: Strategy, rank: int, device: torch.device = HOST) -> Recorded:
    """Take one training step as `rank` of the strategy's world and record it. Long accumulations are cut to their
    steady state: two successive micro-batches that do the same, and the last one (steady_state.py). Raises
    Unverifiable."""
    if sharding_of(strategy).keeps_gathered:
        return _imagine(spec, job, strategy, rank, 3, device)
    try:
        return _imagine(spec, job, strategy, rank, 2, device)
    except Unsteady:  # something that only the first micro-batch of a step does
        pass
    try:
        return _imagine(spec, job, strategy, rank, 3, device)
    except Unsteady as error:
        raise Unverifiable(str(error)) from None


def _imagine(
    spec: ModelSpec, job: Job, strategy: Strategy, rank: int, first: int, device: torch.device = HOST
) -> Recorded:
    read: Counter[tuple[int | None, str]] = Counter()  # by micro-batch (None outside of passes) and line
    training: Training | None = None

    def waits() -> None:
        now = training.current.micro_batch if training is not None else None
        read[now, _place(traceback.extract_stack())] += 1

    with without_content(first, waits if device.type != "cpu" else None):
        comm = Comm(Imagined(rank, strategy.world, 0, 1, device), mesh(strategy), null=True)
        with AsOnCuda(device) if device.type != "cpu" else nullcontext():
            with Guard(device):
                training = Training(spec, job, strategy, comm, seed=0, weights=Shapes())
            micro_batches = _micro_batches(job, strategy, device)

            def watch(recorder: Recorder) -> Watch:
                watching = Watch(recorder)
                watching.device, watching.flights = device, lambda: list(comm.unawaited.values())
                return watching

            with instrument(training.model.units(), comm.recorder, lambda: training.current, watch) as follows:
                if device.type == "cpu":
                    training.step(micro_batches, lr=1e-3)
                else:
                    training.issue(micro_batches, lr=1e-3)
                training.engine.wait_parameters(list(training.engine.parameters))  # as the next step would
                end = follows.live
        unawaited = tuple(dict.fromkeys(handle.name for handle in comm.unawaited.values()))
        memory = RecordedMemory(follows.start, *comm.recorder.before, end, follows.peak)
        assert isinstance(training.pipeline, Steady)
        ran = training.pipeline.ran
        where = _in_a_step(read, ran, len(micro_batches), first)
        return Recorded(rank, tuple(comm.recorder.events), memory, ran, unawaited, where)


class _Generator(torch.Generator):
    """The host's, wherever it is asked for."""

    def __new__(cls, device: object = None) -> Self:
        return super().__new__(cls)


def _in_a_step(read: Counter[tuple[int | None, str]], ran: int, count: int, first: int) -> dict[str, int]:
    """Return how often the host waits in a whole step of `count` micro-batches, by line, of which `ran` were
    executed: what the last of the `first` ones did stands for all that were not."""
    total: Counter[str] = Counter()
    for (micro_batch, place), times in read.items():
        total[place] += times * (1 + (count - ran) * (micro_batch == first - 1))
    return dict(total)


@contextmanager
def without_content(first: int, waits: Callable[[], None] | None = None) -> Iterator[None]:
    """Make every tensor a fake one; of each chunk the `first` micro-batches are executed (steady_state.py). `waits`
    is called where the host reads what a GPU holds."""

    def read(tensor: Tensor, otherwise: list[Any] | Callable[[], list[Any]]) -> list[Any]:
        if waits is not None and tensor.device.type != "cpu":
            waits()
        return otherwise() if callable(otherwise) else otherwise

    with ExitStack() as stack:
        if not _frozen_before():
            # Many small fake tensors trigger collections often; keep them from scanning all imported modules.
            gc.freeze()
            stack.callback(gc.unfreeze)
        if not dist.is_initialized():
            # Lets a call to torch.distributed reach Watch, in place of failing for want of a process group.
            stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))  # torch installs its own
            dist.init_process_group(dist.Backend.FAKE, store=fake_pg.FakeStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(patch.object(host_values, "read", read))
        stack.enter_context(patch.object(host_values, "later", lambda tensor, otherwise: lambda: otherwise))
        if waits is not None:  # an imagined GPU has no generator
            stack.enter_context(patch.object(torch, "Generator", _Generator))
        stack.enter_context(patch.object(host_values, "rounds", _first_and_last))
        stack.enter_context(patch.object(sparse, "_above", lambda size, bar, places: None))
        stack.enter_context(patch.object(parallelize, "Pipeline", partial(Steady, first)))
        try:
            stack.enter_context(FakeTensorMode())
            yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise Unverifiable(f"{error.func} looks at what a tensor holds, at {place_of(error)}") from error


@cache
def _frozen_before() -> bool:
    """Whether this program has frozen its objects itself: asked once, since the objects are counted one by one."""
    return gc.get_freeze_count() > 0


def _first_and_last(alike: Sequence[T]) -> Sequence[T]:
    return alike if len(alike) < 3 else [alike[0], alike[-1]]


def _place(frames: traceback.StackSummary) -> str:
    """Return "file:line (function)" of the innermost frame outside torch and the verifier, in Phalanx or its
    caller."""
    root = Path(phalanx.__file__).parent.parent
    observers = (
        str(Path(torch.__file__).parent),
        str(Path(__file__).parent),
        inspect.getfile(Tracker),
    )
    frame = next((f for f in reversed(frames) if not f.filename.startswith(observers)), frames[-1])
    path = Path(frame.filename)
    return f"{path.relative_to(root) if path.is_relative_to(root) else path}:{frame.lineno} ({frame.name})"


def place_of(error: BaseException) -> str:
    """Return where an error was raised: "file:line (function)", of the innermost frame outside torch."""
    return _place(traceback.extract_tb(error.__traceback__))


def _micro_batches(job: Job, strategy: Strategy, device: torch.device) -> list[Tensor]:
    part = Context(job.seq, strategy.ring, strategy.ulysses)
    shape = part.shape(strategy.micro_batch, job.documents == "separate")
    return [torch.empty(shape, dtype=torch.int64, device=device) for _ in range(strategy.accumulation(job))]
