"""Pipeline parallelism: one executor for every schedule. It runs a rank's list of actions in order; the schedule
alone decides what runs when (schedule/pipeline/schedules.py).

    RECV   posted where the list says, which is when the message is sent; awaited by the pass that needs it
    F      forward pass of a chunk, from the received stream or from tokens; autograd keeps what backward needs
    SEND   the result of a pass; awaited by the next send of its kind, which frees its memory
    B      backward pass, from the received gradient or the loss; hooks give gradients to the data-parallel engine
    I, W   the same in two parts: gradients of inputs, then the deferred gradients of weights
           (autograd/deferred_weight_grads.py)

Every rank has the micro-batches of its replica, so only the stream travels, in shapes that all ranks know beforehand.
A chunk's autograd graph begins and ends in nodes that hold no tensor: its output is freed when it has been sent, its
input in the first block's backward pass.
"""

import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd.deferred_weight_grads import DeferredGradients, DeferredUnits
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPE_NAMES
from phalanx.runtime.comm.recorder import RunningPass
from phalanx.runtime.comm.timeline import Span
from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.schedule.event import Phase
from phalanx.schedule.pipeline.actions import Action, PipelineSchedule, last_weight_grad_at

PASSES = ("F", "B", "I", "W")
SCHEDULE = "schedule"
"""Timeline track of the schedule's passes."""
Box = list[Tensor]
"""Carries one gradient between two autograd graphs; taking it out transfers the only reference."""
RunChunk = Callable[[Any, Tensor | None, int], Tensor]
"""(micro-batch, stream or None, local chunk) -> the stream, or from the last chunk the summed loss, ()."""
Shapes = Sequence[tuple[int, ...]]
"""The shape of the stream behind each chunk but the last."""


class _Begin(torch.autograd.Function):
    """Attaches a graph to the received stream; backward puts its gradient into a box."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, box: Box) -> Tensor:
        ctx.box = box
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None]:
        ctx.box.append(g)
        return None, None, None


class _End(torch.autograd.Function):
    """Returns a scalar in place of the stream; backward takes the stream's gradient from a box."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: Box) -> Tensor:
        ctx.box = box
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.box.pop(), None


class _InFlight:
    """A micro-batch between its forward and backward pass through a chunk: `end`, the scalar that represents its
    result; the boxes of the gradient of its output (`coming`) and of its input (`going`)."""

    def __init__(self) -> None:
        self.coming: Box = []
        self.going: Box = []
        self.end: Tensor | None = None


class Pipeline:
    """One rank of a pipeline. `place`: its index along pp; `shapes`: of the stream between chunks; `run`: the forward
    pass of a micro-batch through a local chunk; `chunks`: the numbers of the local chunks, in order; `now`: the pass
    that is running."""

    def __init__(
        self,
        comm: Comm,
        inner: LayerComm,
        schedule: PipelineSchedule,
        place: int,
        shapes: Shapes,
        dtype: torch.dtype,
        engine: DataParallel,
        run: RunChunk,
        deferred: DeferredGradients | None,
    ) -> None:
        self.comm, self.inner, self.schedule, self.place, self.engine = comm, inner, schedule, place, engine
        self.shapes, self.dtype, self._deferred = shapes, dtype, deferred
        self._method = weakref.WeakMethod(run)  # weak: its owner holds this pipeline, and must stay collectable
        self._names = {id(p): name for name, p in engine.parameters.items()}
        self.actions = schedule.actions[place]
        self.chunks = tuple(c for c, rank in enumerate(schedule.rank_of) if rank == place)
        self.now = RunningPass(0, "F")
        self._started = 0.0  # time at which the current pass had all its inputs
        self._finished = last_weight_grad_at(self.actions)
        self._anchor = torch.zeros((), requires_grad=True)
        self._clear()

    def _clear(self) -> None:
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._here: dict[tuple[Phase, int, int], Tensor] = {}  # computed, not yet sent or used
        self._arriving: dict[tuple[Phase, int, int], tuple[Tensor, Handle]] = {}
        self._leaving: dict[tuple[Phase, int], tuple[Tensor, Handle]] = {}
        self._weights_due: dict[tuple[int, int], DeferredUnits] = {}  # deferred gradients of weights

    def step(self, micro_batches: Sequence[Any], seed: float) -> Tensor:
        """Run all passes of a step, from the gradient `seed` of each loss. Returns the sum of the losses, (), fp64: 0
        on ranks without the head. Raises ValueError if the number of micro-batches is not the schedule's."""
        try:
            return self._step(micro_batches, seed)
        finally:
            self._clear()  # after an error, graphs without a backward pass would never be collected

    def _step(self, micro_batches: Sequence[Any], seed: float) -> Tensor:
        if len(micro_batches) != self.schedule.micro_batches:
            raise ValueError(f"{len(micro_batches)} micro-batches, the schedule is of {self.schedule.micro_batches}")
        total = torch.zeros((), dtype=torch.float64, device=self.comm.world.device)
        self.engine.begin()
        self.inner.seed = seed
        # Run the schedule's actions.
        for at, action in enumerate(self.actions):
            self.inner.micro_batch = action.micro_batch
            match action.kind:
                case "F":
                    loss = self._forward(action, micro_batches[action.micro_batch])
                    if loss is not None:
                        total += loss
                case "B" | "I":
                    self._backward(action, seed, last=self._finished[action.chunk] == at)
                case "W":
                    self._weights(action, last=self._finished[action.chunk] == at)
                case _:
                    self._message(action)
            if action.kind in PASSES and self.comm.timeline.following and self.schedule.ranks > 1:
                detail = {"kind": action.kind, "chunk": action.chunk, "micro_batch": action.micro_batch}
                span = Span(str(action), SCHEDULE, self._started, perf_counter(), detail)
                self.comm.timeline.passes.append(span)
        # Complete gradients and sends.
        self.engine.finish()
        for way in list(self._leaving):
            self._sent(*way)
        return total

    def _run(self, batch: Any, x: Tensor | None, chunk: int) -> Tensor:
        run = self._method()
        assert run is not None
        return run(batch, x, chunk)

    def _begins(self, action: Action, what: str) -> None:
        self.now = RunningPass(action.micro_batch, action.kind)  # type: ignore[arg-type]
        chunk = f" of chunk {action.chunk}" if self.schedule.chunks > 1 else ""
        self.comm.status.now(f"{what}{chunk} of micro-batch {action.micro_batch}")

    def _forward(self, action: Action, batch: Any) -> Tensor | None:
        _, chunk, m = action
        self._begins(action, "forward")
        self.engine.forward(m)
        passing = self._in_flight[chunk, m] = _InFlight()
        x = None
        if chunk:
            x = _Begin.apply(self._arrived("F", chunk, m), self._anchor, passing.going)
        self._started = perf_counter()
        out = self._run(batch, x, self.chunks.index(chunk))
        if chunk == self.schedule.chunks - 1:
            passing.end = out
            return out.detach()
        passing.end = _End.apply(out, passing.coming)
        self._here["F", chunk, m] = out.detach()
        return None

    def _backward(self, action: Action, seed: float, last: bool) -> None:
        kind, chunk, m = action
        self._begins(action, "backward" if kind == "B" else "gradients of inputs")
        passing = self._in_flight.pop((chunk, m))
        if chunk < self.schedule.chunks - 1:
            passing.coming.append(self._arrived("B", chunk, m))
            seed = 1.0
        self._started = perf_counter()
        assert passing.end is not None
        if kind == "B":
            self.engine.backward(m, last, self.chunks.index(chunk))
            passing.end.backward(torch.full_like(passing.end, seed))
            self.engine.settle()
        else:
            assert self._deferred is not None
            self.engine.defer_weights(m)
            self._deferred.active = True
            try:
                passing.end.backward(torch.full_like(passing.end, seed))
            finally:
                self._deferred.active = False
                self.engine.end_deferral()
            self._weights_due[chunk, m] = self._deferred.take()
        if chunk:
            self._here["B", chunk, m] = passing.going.pop()

    def _weights(self, action: Action, last: bool) -> None:
        _, chunk, m = action
        self._begins(action, "gradients of weights")
        self.engine.backward(m, last, self.chunks.index(chunk))
        left = self._weights_due.pop((chunk, m))
        self._started = perf_counter()
        while left:
            unit, gradients = left.pop(0)
            self.comm.recorder.compute("weight_grad", "W", unit, m, DTYPE_NAMES[self.dtype])
            gradients(lambda p, g, rows: self.engine.take(self._names[id(p)], g, rows))
        self.engine.settle()

    def _arrived(self, way: Phase, chunk: int, m: int) -> Tensor:
        """Return the input of a pass: the stream of the chunk before, or (`way` B) the gradient of the chunk
        after."""
        source = chunk - 1 if way == "F" else chunk + 1
        if self.schedule.rank_of[source] == self.place:
            return self._here.pop((way, source, m))
        tensor, handle = self._arriving.pop((way, chunk, m))
        handle.wait()
        return tensor

    def _message(self, action: Action) -> None:
        kind, chunk, m = action
        way: Phase = "F" if kind.endswith("F") else "B"
        onward = 1 if way == "F" else -1
        if kind.startswith("RECV"):
            shape = self.shapes[min(chunk, chunk - onward)]
            tensor = torch.empty(shape, dtype=self.dtype, device=self.comm.world.device)
            peer = self.schedule.rank_of[chunk - onward]
            self._arriving[way, chunk, m] = tensor, self.comm.receive(tensor, peer, way, chunk, m)
            return
        self._sent(way, chunk)
        tensor = self._here.pop((way, chunk, m))
        self._leaving[way, chunk] = (
            tensor,
            self.comm.send(tensor, self.schedule.rank_of[chunk + onward], way, chunk, m),
        )

    def _sent(self, way: Phase, chunk: int) -> None:
        """Wait for the last message of this direction and chunk, which frees its memory."""
        if (way, chunk) in self._leaving:
            self._leaving.pop((way, chunk))[1].wait()

    def evaluate(self, batch: Any, shapes: Shapes) -> Tensor:
        """Run a batch, whose stream has these shapes, through all chunks; all pipeline ranks together. Returns the
        summed loss, (), fp64: 0 on ranks without the head."""
        loss = torch.zeros((), dtype=torch.float64, device=self.comm.world.device)
        x = None
        for chunk, rank in enumerate(self.schedule.rank_of):
            if rank != self.place:
                continue
            before, after = (self._rank_of(c, rank) for c in (chunk - 1, chunk + 1))
            if before != rank:
                x = torch.empty(shapes[chunk - 1], dtype=self.dtype, device=self.comm.world.device)
                self.comm.receive(x, before, "F", chunk, 0).wait()
            x = self._run(batch, x, self.chunks.index(chunk))
            if after != rank:
                self.comm.send(x, after, "F", chunk, 0).wait()
            if chunk == self.schedule.chunks - 1:
                loss += x
        return loss

    def _rank_of(self, chunk: int, otherwise: int) -> int:
        return self.schedule.rank_of[chunk] if 0 <= chunk < self.schedule.chunks else otherwise
