"""One rank's real training step on fake tensors, in a world of which no process was started.

Model, engine, compressor and optimizer are those that `train` runs. Replaced are tensors (torch's fake ones: shapes
without memory or kernels), the transport (null), and the values that the host reads (runtime/observe/host_values.py).
A call to torch.distributed that bypasses comm fails the step, and so does any operation that depends on values.
"""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.testing._internal.distributed import fake_pg  # its import registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel.compression import sparse
from phalanx.runtime.observe import host_values
from phalanx.runtime.observe.instrument import Tracker, instrument
from phalanx.runtime.process.world import World
from phalanx.schedule.event import Event
from phalanx.schedule.layers.context import Context
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.train import parallelize
from phalanx.train.training_step import Training
from phalanx.verify import meta_ops
from phalanx.verify.diff import RecordedMemory
from phalanx.verify.steady_state import Steady, Unsteady

T = TypeVar("T")

_PAST_COMM = ("c10d", "_c10d_functional", "_dtensor")


class Unverifiable(Exception):
    """The step did something that cannot be verified; the message says what and where."""


@dataclass(frozen=True)
class Recorded:
    """The record of a rank's step. `ran`: micro-batches that were executed; if they are fewer than the step has, the
    last but one of them stands for all between. `unawaited`: names of collectives that were never waited for."""

    rank: int
    events: tuple[Event, ...]
    memory: RecordedMemory
    ran: int
    unawaited: tuple[str, ...]


@dataclass(frozen=True)
class Imagined(World):
    """A rank of a world that is not running. On the CPU, since fake tensors need kernels that this torch has."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


class Shapes:
    """Weights that have shapes and no values."""

    def has(self, fqn: str) -> bool:
        return True

    def dtype(self, fqn: str) -> torch.dtype:
        return torch.float32

    def slice(self, fqn: str, start: int, stop: int) -> Tensor:
        return torch.empty(stop - start)


class Guard(TorchDispatchMode):
    """Refuses collectives that bypass comm while the model is built."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _refuse_past_comm(func)
        out = meta_ops.run(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if out is None else out


def _refuse_past_comm(func: Any) -> None:
    if func.namespace in _PAST_COMM:
        raise Unverifiable(f"{func} bypasses comm, at {_place(traceback.extract_stack())}")


class Watch(Tracker):
    """Tracks the memory of fake tensors, and refuses collectives that bypass comm."""

    def owns(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and super().owns(tensor)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = meta_ops.run(func, args, kwargs)
        if out is not None:
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
        return super().__torch_dispatch__(func, types, args, kwargs)


def imagine(spec: ModelSpec, job: Job, strategy: Strategy, rank: int) -> Recorded:
    """Take one training step as `rank` of the strategy's world and record it. Long accumulations are cut to their
    steady state: two successive micro-batches that do the same, and the last one (steady_state.py). Raises
    Unverifiable."""
    if strategy.effective_zero == 3 and strategy.gathers_once:
        return _imagine(spec, job, strategy, rank, first=3)
    try:
        return _imagine(spec, job, strategy, rank, first=2)
    except Unsteady:  # something that only the first micro-batch of a step does
        pass
    try:
        return _imagine(spec, job, strategy, rank, first=3)
    except Unsteady as error:
        raise Unverifiable(str(error)) from None


def _imagine(spec: ModelSpec, job: Job, strategy: Strategy, rank: int, first: int) -> Recorded:
    with without_content(first):
        comm = Comm(Imagined(rank, strategy.world, 0, 1), mesh(strategy), null=True)
        with Guard():
            training = Training(spec, job, strategy, comm, seed=0, weights=Shapes())
        micro_batches = _micro_batches(job, strategy)
        with instrument(training.model.units(), comm.recorder, lambda: training.current, Watch) as follows:
            training.step(micro_batches, lr=1e-3)
            training.engine.wait_parameters(list(training.engine.parameters))  # as the next step would
            end = follows.live
        unawaited = tuple(dict.fromkeys(handle.name for handle in comm.unawaited.values()))
        memory = RecordedMemory(follows.start, *comm.recorder.before, end, follows.peak)
        assert isinstance(training.pipeline, Steady)
        return Recorded(rank, tuple(comm.recorder.events), memory, training.pipeline.ran, unawaited)


@contextmanager
def without_content(first: int) -> Iterator[None]:
    """Make every tensor a fake one; of each chunk the `first` micro-batches are executed (steady_state.py)."""
    with ExitStack() as stack:
        if not gc.get_freeze_count():
            # Many small fake tensors trigger collections often; keep them from scanning all imported modules.
            gc.freeze()
            stack.callback(gc.unfreeze)
        if not dist.is_initialized():
            # Lets a call to torch.distributed reach Watch, in place of failing for want of a process group.
            stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))  # torch installs its own
            dist.init_process_group(dist.Backend.FAKE, store=fake_pg.FakeStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(patch.object(host_values, "read", _otherwise))
        stack.enter_context(patch.object(host_values, "rounds", _first_and_last))
        stack.enter_context(patch.object(sparse, "_above", lambda size, bar, places: None))
        stack.enter_context(patch.object(parallelize, "Pipeline", partial(Steady, first)))
        try:
            stack.enter_context(FakeTensorMode())
            yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise Unverifiable(f"{error.func} looks at what a tensor holds, at {place_of(error)}") from error


def _otherwise(tensor: Tensor, otherwise: list[Any] | Callable[[], list[Any]]) -> list[Any]:
    return otherwise() if callable(otherwise) else otherwise


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


def _micro_batches(job: Job, strategy: Strategy) -> list[Tensor]:
    part = Context(job.seq, strategy.ring, strategy.ulysses)
    shape = part.shape(strategy.micro_batch, job.documents == "separate")
    return [torch.empty(shape, dtype=torch.int64) for _ in range(strategy.accumulation(job))]
