"""One rank's real training step on fake tensors, in a world without other processes.

Model, engine, compressor and optimizer are those that `train` runs. Replaced are tensors (torch's fake ones: shapes
without memory or kernels), the transport (null), and the values that the host reads (runtime/tracing/host_values.py).
A call to torch.distributed that bypasses comm fails the step, and so does any operation that depends on values.

The tensors are on the host or on the fake GPU (fake/device.py). On a GPU, the step must also keep the rules of one
(fake/gpu_rules.py), and the times that the host waits for it are counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.observation.diff import RecordedMemory
from phalanx.observation.fake import gpu_rules
from phalanx.observation.fake.device import NAME, register
from phalanx.observation.fake.gpu_rules import AgainstTheRules
from phalanx.observation.fake.result_cache import ResultCache, fake_mode
from phalanx.observation.fake.world import fake_gpus, frozen_objects, process_group
from phalanx.observation.recorder.collective_ops import NAMESPACES
from phalanx.observation.recorder.operations import tensors
from phalanx.observation.recorder.places import OUTSIDE_OBSERVATION, caller_line, raised
from phalanx.observation.trainer.pipeline import RepeatingPipeline
from phalanx.observation.unobservable import Unobservable, Unsteady
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.handles import UnissuedHandle
from phalanx.runtime.comm.recorder import Recorder
from phalanx.runtime.data_parallel.compression import sparse
from phalanx.runtime.process.environment import World
from phalanx.runtime.tracing import host_values
from phalanx.runtime.tracing.instrument import Tracker, instrument
from phalanx.schedule.event import Event
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layers.context import Context
from phalanx.schedule.observation import Site
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training import parallelize
from phalanx.training.training_step import Training

T = TypeVar("T")
HOST = torch.device("cpu")
_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True)
class RecordedStep:
    """The record of a rank's step. `ran`: micro-batches that were executed; if the step has more, the last but one of
    them represents all between. `unawaited`: names of collectives that were never waited for. `waits`: how often the
    host waits for the GPU in a step, by line; empty on the host itself."""

    rank: int
    events: tuple[Event, ...]
    memory: RecordedMemory
    ran: int
    unawaited: tuple[str, ...]
    waits: Mapping[str, int] = field(default_factory=dict)


def gpu_device() -> torch.device:
    """Return the fake GPU, which torch knows from then on."""
    register()
    return torch.device(NAME, 0)


@dataclass(frozen=True)
class FakeRank(World):
    """A rank of a world that is not running, on the host or on the fake GPU."""

    on: torch.device = HOST

    @property
    def device(self) -> torch.device:
        return self.on


class FakeWeights:
    """Weights that have shapes and no values."""

    def has(self, fqn: str) -> bool:
        return True

    def dtype(self, fqn: str) -> torch.dtype:
        return torch.float32

    def slice(self, fqn: str, start: int, stop: int) -> Tensor:
        return torch.empty(stop - start)


class _Operations:
    """Runs operations on fake tensors of a device. Refuses collectives that bypass comm and operations that depend on
    values; on a GPU also operations that break its rules, given the collectives under way (`flights`). While a model
    is built (`building`) the host may wait."""

    def __init__(
        self, device: torch.device, building: bool, flights: Callable[[], Iterable[UnissuedHandle]] = tuple
    ) -> None:
        mode = active_fake_mode()
        assert mode is not None
        self.mode, self._device, self._building, self._flights = mode, device, building, flights
        self._run = ResultCache(mode).run

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace in NAMESPACES:
            raise Unobservable(f"{func} bypasses comm, at {_line(caller_line(OUTSIDE_OBSERVATION))}")
        if self._device.type != "cpu":
            try:
                self._require_rules(func, args, kwargs)
            except AgainstTheRules as error:
                raise Unobservable(f"{error}, at {_line(caller_line(OUTSIDE_OBSERVATION))}") from None
            if gpu_rules.returns_nothing(func):
                return None
            if func is torch.ops.aten._scaled_mm.out:  # torch's fake kernel of it asks the device for memory
                return kwargs["out"]
        try:
            return self._run(func, args, kwargs, tensors(args, kwargs))
        except _VALUES:
            raise Unobservable(
                f"{func} reads the value of a tensor, at {_line(caller_line(OUTSIDE_OBSERVATION))}"
            ) from None

    def _require_rules(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._building:
            gpu_rules.require_one_place(func, args, kwargs, self._device)
            return
        gpu_rules.require(func, args, kwargs, self._device)
        gpu_rules.require_free(func, args, kwargs, self._flights())


class Building(TorchDispatchMode):
    """Runs the operations that build a model, without recording them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = _Operations(device, building=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every call the wrapper that disables torch's compiler, as Tracker does."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # frequent, so answered without a dispatch
            return args[0].fake_device
        return self._operations.run(func, args, kwargs or {})


class FakeTracker(Tracker):
    """Tracks the memory of a step's fake tensors, and runs its operations."""

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device = HOST,
        flights: Callable[[], Iterable[UnissuedHandle]] = tuple,
    ) -> None:
        self._operations = _Operations(device, building=False, flights=flights)
        super().__init__(recorder)

    def owns(self, tensor: Tensor) -> bool:
        """Leave out fake tensors of other modes: the caller may hold some, or a compiler's cache."""
        mode = self._operations.mode
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and tensor.device.type != "meta"

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._operations.run(func, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)


def record_step(
    spec: ModelSpec, job: Job, strategy: Strategy, rank: int, device: torch.device = HOST
) -> RecordedStep:
    """Take one training step as `rank` of the strategy's world and record it. Long accumulations are cut to their
    steady state: two successive micro-batches that do the same, and the last one (pipeline.py). Raises
    Unobservable."""
    if not sharding_of(strategy).keeps_gathered:
        try:
            return record_cut_step(spec, job, strategy, rank, 2, device)
        except Unsteady:  # something that only the first micro-batch of a step does
            pass
    try:
        return record_cut_step(spec, job, strategy, rank, 3, device)
    except Unsteady as error:
        raise Unobservable(str(error)) from None


def record_cut_step(
    spec: ModelSpec, job: Job, strategy: Strategy, rank: int, first: int, device: torch.device = HOST
) -> RecordedStep:
    """Record a step of which the `first` micro-batches of each chunk are executed, and the last. Raises Unsteady if
    they do not represent those between."""
    reads: Counter[tuple[int | None, str]] = Counter()  # by micro-batch (None outside of passes) and line
    training: Training | None = None

    def waits() -> None:
        now = training.current.micro_batch if training is not None else None
        reads[now, _line(caller_line(OUTSIDE_OBSERVATION))] += 1

    with fake_tensors(first, waits if device.type != "cpu" else None):
        comm = Comm(FakeRank(rank, strategy.world, 0, 1, device), mesh(strategy), null=True)
        with Building(device):
            training = Training(spec, job, strategy, comm, seed=0, weights=FakeWeights())
        micro_batches = _micro_batches(training.context, job, strategy, device)
        tracker = partial(FakeTracker, device=device, flights=lambda: list(comm.unawaited.values()))
        with instrument(training.model.units(), comm.recorder, lambda: training.current, tracker) as tracked:
            training.alone = job.outer.last_sent(strategy.local)
            if device.type == "cpu" or strategy.local:
                training.step(micro_batches, lr=1e-3)
            else:
                training.issue(micro_batches, lr=1e-3)
            training.engine.wait_parameters(list(training.engine.parameters))  # as the next step would
            if training.outer is not None:
                training.outer.wait()
            end = tracked.live
        unawaited = tuple(dict.fromkeys(handle.name for handle in comm.unawaited.values()))
        memory = RecordedMemory(tracked.start, *comm.recorder.before, end, tracked.peak)
        assert isinstance(training.pipeline, RepeatingPipeline)
        ran = training.pipeline.ran
        in_step = _of_whole_step(reads, ran, len(micro_batches), first)
        return RecordedStep(rank, tuple(comm.recorder.events), memory, ran, unawaited, in_step)


def _of_whole_step(reads: Counter[tuple[int | None, str]], ran: int, count: int, first: int) -> dict[str, int]:
    """Return how often the host waits in a step of `count` micro-batches, by line, from the `reads` of the `ran`
    executed ones, of which the last of the `first` represents all that were not."""
    total: Counter[str] = Counter()
    for (micro_batch, line), times in reads.items():
        total[line] += times * (1 + (count - ran) * (micro_batch == first - 1))
    return dict(total)


class _HostGenerator(torch.Generator):
    """The host's generator, for any device: the fake GPU has none."""

    def __new__(cls, device: object = None) -> Self:
        return super().__new__(cls)


@contextmanager
def fake_tensors(first: int, waits: Callable[[], None] | None = None) -> Iterator[None]:
    """Make every tensor a fake one; of each chunk the `first` micro-batches are executed (pipeline.py). On the fake
    GPU, `waits` is called where the host reads from it."""

    def read(tensor: Tensor, otherwise: list[Any] | Callable[[], list[Any]]) -> list[Any]:
        if waits is not None and tensor.device.type != "cpu":
            waits()
        return otherwise() if callable(otherwise) else otherwise

    with ExitStack() as stack:
        stack.enter_context(frozen_objects())
        stack.enter_context(process_group())
        stack.enter_context(patch.object(host_values, "read", read))
        stack.enter_context(patch.object(host_values, "later", lambda tensor, otherwise: lambda: otherwise))
        stack.enter_context(patch.object(host_values, "rounds", _first_and_last))
        stack.enter_context(patch.object(sparse, "_places_above", lambda size, bar, places: None))
        stack.enter_context(patch.object(parallelize, "Pipeline", partial(RepeatingPipeline, first)))
        if waits is not None:
            stack.enter_context(patch.object(torch, "Generator", _HostGenerator))
            stack.enter_context(fake_gpus(1))
        try:
            stack.enter_context(fake_mode())
            yield
        except _VALUES as error:
            line = _line(raised(error, OUTSIDE_OBSERVATION))
            raise Unobservable(f"{error.func} reads the value of a tensor, at {line}") from error


def _first_and_last(alike: Sequence[T]) -> Sequence[T]:
    return alike if len(alike) < 3 else [alike[0], alike[-1]]


def _line(site: Site) -> str:
    return f"{site} ({site.function})"


def error_line(error: BaseException) -> str:
    """Return one line about an error of a step: its type, message and place."""
    place = _line(raised(error, OUTSIDE_OBSERVATION))
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}, at {place}"


def _micro_batches(part: Context, job: Job, strategy: Strategy, device: torch.device) -> list[Tensor]:
    shape = part.shape(strategy.micro_batch, job.batch_rows)
    return [torch.empty(shape, dtype=torch.int64, device=device) for _ in range(strategy.accumulation(job))]
