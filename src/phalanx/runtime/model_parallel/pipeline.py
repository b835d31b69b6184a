"""Pipeline parallelism: one executor for every schedule. It runs a rank's list of actions, and nothing else decides
what comes when (schedule/pipeline.py).

    RECV   posted where the list says, which is when the message is sent; awaited by the pass that needs it
    F      of a chunk: from the stream that came, or from tokens; what its backward pass needs is kept by autograd
    SEND   of what a pass has made; awaited by the next one of its kind, and then its memory is free
    B      from the gradient that came, or from the loss; hooks give gradients to the data-parallel engine
    I, W   the same in two: gradients of weights are left, and made when their turn comes (weight_gradients.py)

Every rank has the tokens of its replica, so that the stream alone travels, of a shape that all know beforehand. A
chunk's own graph begins and ends in nodes that hold no tensor: its output dies when it has been sent, its input with
the first block's backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd.deferred_weight_grads import DeferredGradients, Left
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPE_NAMES
from phalanx.runtime.comm.recorder import Now
from phalanx.runtime.comm.timeline import Span
from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.schedule.event import Phase
from phalanx.schedule.pipeline.schedules import Action, PipelineSchedule, last_weight_grad_at

PASSES = ("F", "B", "I", "W")
SCHEDULE = "schedule"
"""The track of a timeline on which the schedule's passes are, as they were run."""
Box = list[Tensor]
"""One gradient, on its way from one graph to another: whoever takes it out is the only one who has it."""
Passed = Callable[[Tensor, Tensor | None, int], Tensor]
"""(micro-batch, stream, chunk) -> the stream, or of the last chunk the loss."""


class _Begin(torch.autograd.Function):
    """The stream as it came, with a graph behind: its gradient is left in a box."""

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
    """A scalar in place of the stream, whose gradient is taken from a box."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: Box) -> Tensor:
        ctx.box = box
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.box.pop(), None


class _Open:
    """A micro-batch between its forward and its backward pass through a chunk: the scalar that stands for its
    result, and the boxes of the gradients that come and that go on."""

    def __init__(self) -> None:
        self.coming: Box = []
        self.going: Box = []
        self.end: Tensor | None = None


class Pipeline:
    """A rank's part of a pipeline. `shape`: of the stream that travels; `chunks`: the numbers of those that `model`
    has, in its order."""

    def __init__(
        self,
        comm: Comm,
        inner: LayerComm,
        schedule: PipelineSchedule,
        place: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        engine: DataParallel,
        run: Passed,
        put_off: DeferredGradients | None,
    ) -> None:
        self.comm, self.inner, self.schedule, self.place, self.engine = comm, inner, schedule, place, engine
        self.shape, self.dtype, self._put_off = shape, dtype, put_off
        self._method = weakref.WeakMethod(run)  # whose owner has this pipeline, and may be let go
        self._names = {id(p): name for name, p in engine.parameters.items()}
        self.actions = schedule.actions[place]
        self.chunks = tuple(c for c, rank in enumerate(schedule.rank_of) if rank == place)
        self.now = Now(0, "F")
        self._started = 0.0  # the pass that runs, when all that it needs was there
        self._finished = last_weight_grad_at(self.actions)
        self._anchor = torch.zeros((), requires_grad=True)
        self._clear()

    def _clear(self) -> None:
        self._open: dict[tuple[int, int], _Open] = {}
        self._here: dict[tuple[Phase, int, int], Tensor] = {}  # made, and not yet passed on
        self._arriving: dict[tuple[Phase, int, int], tuple[Tensor, Handle]] = {}
        self._leaving: dict[tuple[Phase, int], tuple[Tensor, Handle]] = {}
        self._left_over: dict[tuple[int, int], Left] = {}  # gradients of weights that are due

    def step(self, micro_batches: Sequence[Tensor], seed: float) -> Tensor:
        """The passes of a step, from the gradient `seed` of each loss. The sum of the losses, (), fp64: 0 on a rank
        that has none."""
        try:
            return self._step(micro_batches, seed)
        finally:
            self._clear()  # graphs of passes that had no backward pass would never be collected

    def _step(self, micro_batches: Sequence[Tensor], seed: float) -> Tensor:
        if len(micro_batches) != self.schedule.micro_batches:
            raise ValueError(f"{len(micro_batches)} micro-batches, the schedule is of {self.schedule.micro_batches}")
        total = torch.zeros((), dtype=torch.float64, device=self.comm.world.device)
        self.engine.begin()
        self.inner.seed = seed
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
        self.engine.finish()
        for way in list(self._leaving):
            self._sent(*way)
        return total

    def _run(self, batch: Tensor, x: Tensor | None, chunk: int) -> Tensor:
        run = self._method()
        assert run is not None
        return run(batch, x, chunk)

    def _begins(self, action: Action, what: str) -> None:
        self.now = Now(action.micro_batch, action.kind)  # type: ignore[arg-type]
        chunk = f" of chunk {action.chunk}" if self.schedule.chunks > 1 else ""
        self.comm.status.now(f"{what}{chunk} of micro-batch {action.micro_batch}")

    def _forward(self, action: Action, batch: Tensor) -> Tensor | None:
        _, chunk, m = action
        self._begins(action, "forward")
        self.engine.forward(m)
        opened = self._open[chunk, m] = _Open()
        x = None
        if chunk:
            x = _Begin.apply(self._arrived("F", chunk, m), self._anchor, opened.going)
        self._started = perf_counter()
        out = self._run(batch, x, self.chunks.index(chunk))
        if chunk == self.schedule.chunks - 1:
            opened.end = out
            return out.detach()
        opened.end = _End.apply(out, opened.coming)
        self._here["F", chunk, m] = out.detach()
        return None

    def _backward(self, action: Action, seed: float, last: bool) -> None:
        kind, chunk, m = action
        self._begins(action, "backward" if kind == "B" else "gradients of inputs")
        opened = self._open.pop((chunk, m))
        if chunk < self.schedule.chunks - 1:
            opened.coming.append(self._arrived("B", chunk, m))
            seed = 1.0
        self._started = perf_counter()
        assert opened.end is not None
        if kind == "B":
            self.engine.backward(m, last, self.chunks.index(chunk))
            opened.end.backward(torch.full_like(opened.end, seed))
            self.engine.settle()
        else:
            assert self._put_off is not None
            self.engine.inputs(m)
            self._put_off.active = True
            try:
                opened.end.backward(torch.full_like(opened.end, seed))
            finally:
                self._put_off.active = False
                self.engine.inputs_over()
            self._left_over[chunk, m] = self._put_off.take()
        if chunk:
            self._here["B", chunk, m] = opened.going.pop()

    def _weights(self, action: Action, last: bool) -> None:
        _, chunk, m = action
        self._begins(action, "gradients of weights")
        self.engine.backward(m, last, self.chunks.index(chunk))
        left = self._left_over.pop((chunk, m))
        self._started = perf_counter()
        while left:
            unit, gradients = left.pop(0)
            self.comm.recorder.compute("weight_grad", "W", unit, m, DTYPE_NAMES[self.dtype])
            gradients(lambda p, g, rows: self.engine.take(self._names[id(p)], g, rows))
        self.engine.settle()

    def _arrived(self, way: Phase, chunk: int, m: int) -> Tensor:
        """What the chunk before, or for its backward pass the one behind, has made."""
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
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.comm.world.device)
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
        """Wait for the last message of its kind."""
        if (way, chunk) in self._leaving:
            self._leaving.pop((way, chunk))[1].wait()

    def evaluate(self, batch: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The loss of a batch, whose stream has this shape, through all chunks: 0 on a rank that has none."""
        loss = torch.zeros((), dtype=torch.float64, device=self.comm.world.device)
        x = None
        for chunk, rank in enumerate(self.schedule.rank_of):
            if rank != self.place:
                continue
            before, after = (self._rank_of(c, rank) for c in (chunk - 1, chunk + 1))
            if before != rank:
                x = torch.empty(shape, dtype=self.dtype, device=self.comm.world.device)
                self.comm.receive(x, before, "F", chunk, 0).wait()
            x = self._run(batch, x, self.chunks.index(chunk))
            if after != rank:
                self.comm.send(x, after, "F", chunk, 0).wait()
            if chunk == self.schedule.chunks - 1:
                loss += x
        return loss

    def _rank_of(self, chunk: int, otherwise: int) -> int:
        return self.schedule.rank_of[chunk] if 0 <= chunk < self.schedule.chunks else otherwise
