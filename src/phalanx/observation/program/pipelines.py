"""Torch's pipeline schedules, repeating the record of micro-batches that do the same (steady_state.py).

Schedule1F1B and ScheduleGPipe go through all of their actions, with every message. The passes of a stage (F:
forward, L: loss, B: backward) are executed for the first three micro-batches of each kind and for the last one, each
under a log of all that it did (recorder/repetition.py). A pass is repeated from the log if its last two executions
did the same, were given the same shapes, and the same content on the host, found the same parameters gathered, and
left nothing but their results behind. The last micro-batch must do the same again.

Where a pass must be executed whose forward pass was repeated, or the last micro-batch does something else, Unsteady
ends the observation, which starts again and executes every micro-batch. A pass is the program's own code: what it
does apart from torch's operations (prints, its own counters) happens for the micro-batches that are executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining import schedules as pipeline_schedules
from torch.distributed.pipelining import stage as pipeline_stage
from torch.nn.parallel import DistributedDataParallel

from phalanx.observation.fake.recorder import FakeStepRecorder
from phalanx.observation.fake.result_cache import Recipe, Result, build
from phalanx.observation.recorder.repetition import Life, Log, repeat
from phalanx.observation.steady_state import SteadyState

FIRST = 3
"""Micro-batches of a kind that are executed: the first may do something else, the next two must not."""


Key = tuple[Any, ...]
"""A pass, its arguments, and the sizes of the stage's storages when it began."""


@dataclass
class _Pass:
    """An executed pass. `results`: how to build each result, None for those that are no tensors; `lives`: the pass
    and number under which the storage of each was made; `structure`: the type of the container of the results."""

    log: Log
    results: tuple[Result | None, ...]
    lives: tuple[tuple[str, int] | None, ...]
    structure: type[Any] | None
    calls: dict[nn.Module, int]
    after_backward: bool
    returned: frozenset[tuple[str, int] | None]
    """The lives of all results of this micro-batch's passes until now."""
    steady: bool
    """Whether it left the stage's storages unchanged, and nothing behind but its results."""

    def same(self, other: _Pass) -> bool:
        """Whether two micro-batches did the same. Results of passes die when the schedule releases them."""
        ours, theirs = (
            (
                [e for e in p.log.entries if e[0] != "death" or e[1:] not in p.returned],
                *(p.results, p.lives, p.structure, p.calls, p.after_backward),
            )
            for p in (self, other)
        )
        return self.steady and other.steady and ours == theirs

    def matches(self, other: _Pass) -> bool:
        """Whether two micro-batches did the same, whenever their storages were freed: a schedule still holds outputs
        of its last micro-batch."""
        ours, theirs = ([e for e in p.log.entries if e[0] != "death"] for p in (self, other))
        return (ours, self.results, self.calls) == (theirs, other.results, other.calls)


@dataclass
class _Batch:
    """A micro-batch of the step: its number for the recorder, its arguments, whether its passes are executed, and
    what they allocated."""

    number: int
    kind: Key
    executed: bool
    lives: dict[str, list[Life]] = field(default_factory=dict)
    passes: list[_Pass] = field(default_factory=list)
    results: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """Results of repeated passes, by pass and number, until the backward pass frees them or has ended."""


class _Step:
    """One step of a schedule: executes the passes of its stage, or repeats them."""

    def __init__(
        self, recorder: FakeStepRecorder, stage: Any, micro_batches: int, on_repeat: Callable[[], None]
    ) -> None:
        self.recorder, self.stage, self.last, self.on_repeat = recorder, stage, micro_batches - 1, on_repeat
        self.batches: dict[int, _Batch] = {}
        self._steady = SteadyState[_Pass](_Pass.same)

    def begin(self, chunk: int, key: Key) -> None:
        """Decide whether a micro-batch is executed."""
        executed = chunk == self.last or self._steady.executed(key) < FIRST or self._steady.steady(key) is None
        number = self.recorder.position.calls().get(self.stage.submod, 0)
        self.batches[chunk] = _Batch(number, key[2:], executed)

    def do(self, name: str, chunk: int, key: Key, call: Callable[[], Any], results: Callable[[Any], Any]) -> Any:
        """Execute a pass or repeat it; return its results."""
        batch = self.batches[chunk]
        out = self._execute(name, batch, key, call, results) if batch.executed else self._repeat(name, batch, key)
        if name == "B":
            batch.results.clear()
        return out

    def _execute(
        self, name: str, batch: _Batch, key: Key, call: Callable[[], Any], results: Callable[[Any], Any]
    ) -> Any:
        recorder = self.recorder
        position = recorder.position
        calls, sizes = position.calls(), recorder.sizes()
        log = recorder.log = Log(batch.number, name)
        try:
            out = call()
        finally:
            recorder.log = None
        batch.lives[name] = log.born
        returned = results(out)
        structure = type(returned) if isinstance(returned, list | tuple) else None
        described = [self._described(t, batch) for t in (returned if structure else (returned,))]
        lives = tuple(life for _, life in described)
        record = _Pass(
            log,
            tuple(result for result, _ in described),
            lives,
            structure,
            {m: n - calls.get(m, 0) for m, n in position.calls().items() if n != calls.get(m, 0)},
            position.after_backward,
            frozenset(lives).union(*(p.lives for p in batch.passes)),
            log.self_contained
            and sizes == recorder.sizes()
            and _UNKNOWN not in described
            and structure in (None, list, tuple),
        )
        batch.passes.append(record)
        if name == "B":
            record.steady &= _nothing_left(batch)
        self._steady.add(key, record, _Pass.matches)
        return out

    def _repeat(self, name: str, batch: _Batch, key: Key) -> Any:
        # Of the two records, the longer one says when its results are freed.
        record = max(self._steady.repeat(key), key=lambda p: len(p.log.entries))
        self.on_repeat()
        batch.lives[name] = repeat(self.recorder, record.log, batch.number, batch.lives, batch.results)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            tensors = build(Recipe(record.results, list), [], self.recorder.fake)
        for tensor, life in zip(tensors, record.lives, strict=True):
            if life is not None:
                self.recorder.adopt(tensor.untyped_storage(), batch.lives[life[0]][life[1]])
                batch.results[life] = tensor
        self.recorder.position.called(record.calls, record.after_backward)
        return tensors[0] if record.structure is None else record.structure(tensors)

    def _described(self, value: Any, batch: _Batch) -> tuple[Result | None, tuple[str, int] | None]:
        """Return how to build a result of a pass, and which storage it has."""
        if value is None:
            return None, None
        if type(value) is not FakeTensor or value.layout is not torch.strided or value.storage_offset():
            return _UNKNOWN
        life = self.recorder.known.get(value.untyped_storage()._cdata)
        if life is None or life.made_in is None or life.made_in[0] != batch.number:
            return _UNKNOWN
        elements = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        if not value.numel() or elements * value.element_size() != life.bytes:
            return _UNKNOWN
        result = Result(
            -1, False, tuple(value.shape), value.stride(), 0, value.dtype, value.device, dict(value.__dict__)
        )
        return result, life.made_in[1:]


def _visible(value: Any) -> Any:
    """Return all that a pass can see of its arguments: the shapes of tensors, and contents where there are any."""
    if isinstance(value, list | tuple):
        return tuple(_visible(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _visible(item)) for name, item in value.items())
    if type(value) is FakeTensor:
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if type(value) is Tensor:
        with unset_fake_temporarily():
            return value.shape, value.dtype, value.numpy().tobytes()
    return value if isinstance(value, int | float | str | None) else ("an object", id(value))


_UNKNOWN = (None, ("", 0))
"""A result that cannot be built again."""


def _nothing_left(batch: _Batch) -> bool:
    """Whether all storages that the passes of a micro-batch made died in them, except their results'."""
    died = {entry[1:] for p in batch.passes for entry in p.log.entries if entry[0] == "death"}
    returned = {life for p in batch.passes for life in p.lives}
    every = {life.made_in[1:] for lives in batch.lives.values() for life in lives if life.made_in is not None}
    return every <= died | returned


@contextmanager
def repeated_micro_batches(recorder: FakeStepRecorder, note: Callable[[str], None]) -> Iterator[None]:
    """Execute few of the micro-batches that do the same in torch's 1F1B and GPipe schedules."""
    steps: dict[int, _Step] = {}  # by the id of the stage
    base, schedule = pipeline_stage._PipelineStageBase, pipeline_schedules._PipelineSchedule
    forward: Any = base.forward_one_chunk
    backward: Any = base.backward_one_chunk
    loss: Any = schedule._maybe_compute_loss

    def on_repeat() -> None:
        note(
            "equal micro-batches of a pipeline: run until two did the same, and the last; repeated from their record"
        )

    def forwards(stage: Any, chunk: int, args: Any, kwargs: Any = None, save_forward_output: bool = True) -> Any:
        step = steps.get(id(stage))
        if step is None:
            return forward(stage, chunk, args, kwargs, save_forward_output)
        key = ("F", recorder.sizes(), _visible(args), _visible(kwargs or {}))
        step.begin(chunk, key)
        executed = step.batches[chunk].executed
        run = partial(forward, stage, chunk, args, kwargs, save_forward_output)
        out = step.do("F", chunk, key, run, lambda out: out)
        if not executed:
            stage.fwd_cache[chunk] = (out if isinstance(out, tuple) else (out,), [])
            if stage.is_last and save_forward_output:
                stage.output_chunks.append(out)
        return out

    def losses(self: Any, stage: Any, output: Any, target_mbs: Any, chunk: int, *args: Any, **kwargs: Any) -> None:
        step = steps.get(id(stage))
        if step is None or not stage.is_last:
            loss(self, stage, output, target_mbs, chunk, *args, **kwargs)
            return
        executed = step.batches[chunk].executed
        key = ("L", step.batches[chunk].kind, _visible(target_mbs and target_mbs[chunk]))
        run = partial(loss, self, stage, output, target_mbs, chunk, *args, **kwargs)
        out = step.do("L", chunk, key, run, lambda _: self._internal_losses[-1])
        if not executed:
            self._internal_losses.append(out)

    def backwards(
        stage: Any, chunk: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        step = steps.get(id(stage))
        if step is None:
            backward(stage, chunk, loss, full_backward, last_backward)
            return
        reduces = last_backward and isinstance(stage.submod, DistributedDataParallel)
        key = ("B", recorder.sizes(), step.batches[chunk].kind, reduces)
        executed = step.batches[chunk].executed
        if not executed:
            stage.fwd_cache.pop(chunk)
        run = partial(backward, stage, chunk, loss, full_backward, last_backward)
        out = step.do("B", chunk, key, run, lambda _: stage.bwd_cache[chunk])
        if not executed:
            stage.bwd_cache[chunk] = out
        del step.batches[chunk]

    def steps_of(kind: Any) -> Any:
        run = kind._step_microbatches

        def step_microbatches(self: Any, *args: Any, **kwargs: Any) -> Any:
            stage = self._stage
            if type(self) is kind and self._has_backward and stage.has_backward and stage.dw_builder is None:
                steps[id(stage)] = _Step(recorder, stage, self._n_microbatches, on_repeat)
            try:
                return run(self, *args, **kwargs)
            finally:
                steps.pop(id(stage), None)

        return patch.object(kind, "_step_microbatches", step_microbatches)

    with (
        steps_of(Schedule1F1B),
        steps_of(ScheduleGPipe),
        patch.object(base, "forward_one_chunk", forwards),
        patch.object(base, "backward_one_chunk", backwards),
        patch.object(schedule, "_maybe_compute_loss", losses),
    ):
        yield
