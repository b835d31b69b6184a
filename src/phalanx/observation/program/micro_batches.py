"""The steady state of torch's pipelines: of the many micro-batches that do the same in a stage, few are run.

Schedule1F1B and ScheduleGPipe go through all of their actions, with every message. The passes of a stage (F:
forward, L: loss, B: backward) are run for the first three micro-batches of each kind and for the last one, each
under a log of all that it did (recorder/repetition.py). A pass is repeated from the log where its last two
runs did the same, were given the same shapes, and the same content on the host, found the same parameters gathered,
and left nothing but their results behind. The last micro-batch must do again what was repeated.

Where a pass must be run whose forward pass was repeated, or the last micro-batch does something else, Unsteady ends
the observation, and it is made again with every micro-batch run. A pass is the program's own code: what it does
beside torch's operations (prints, counters of its own) happens for the micro-batches that are run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining import schedules as pipeline_schedules
from torch.distributed.pipelining import stage as pipeline_stage
from torch.nn.parallel import DistributedDataParallel

from phalanx.observation.fake.contentless import Contentless
from phalanx.observation.fake.remembered import Entry, Result, build
from phalanx.observation.recorder.repetition import Life, Log, repeat

FIRST = 3
"""Micro-batches of a kind that are run: what the first does may differ, the next two must not."""


class Unsteady(BaseException):
    """A repeated micro-batch turned out to need its passes. Not an Exception, so that programs do not catch it."""


Key = tuple[Any, ...]
"""A pass, what it was given, and what the stage's storages were when it began."""


@dataclass
class _Pass:
    """A pass that was run. `results`: how to make what it returned, None for what is no tensor; `lives`: the pass and
    number under which the storage of each was made; `structure`: of the results."""

    log: Log
    results: tuple[Result | None, ...]
    lives: tuple[tuple[str, int] | None, ...]
    structure: type[Any] | None
    calls: dict[nn.Module, int]
    after_backward: bool
    returned: frozenset[tuple[str, int] | None]
    """The lives of what the passes of this micro-batch returned until now."""
    steady: bool
    """Whether it left the stage's storages as it found them, and nothing else behind but its results."""

    def same(self, other: _Pass) -> bool:
        """Whether two micro-batches did the same. What passes return dies when the schedule lets go of it."""
        ours, theirs = (
            (
                [e for e in p.log.entries if e[0] != "death" or e[1:] not in p.returned],
                *(p.results, p.lives, p.structure, p.calls, p.after_backward),
            )
            for p in (self, other)
        )
        return self.steady and other.steady and ours == theirs

    def did(self, other: _Pass) -> bool:
        """Whether two micro-batches did the same, but for when what they made was freed: a schedule still holds what
        its last micro-batch returned."""
        ours, theirs = ([e for e in p.log.entries if e[0] != "death"] for p in (self, other))
        return (ours, self.results, self.calls) == (theirs, other.results, other.calls)


@dataclass
class _Batch:
    """A micro-batch of the step: its number for the recorder, what it was given, whether its passes are run, and what
    they made."""

    number: int
    kind: Key
    run: bool
    lives: dict[str, list[Life]] = field(default_factory=dict)
    passes: list[_Pass] = field(default_factory=list)
    held: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """What repeated passes returned, by pass and number, until the backward pass frees it or has ended."""


class _Step:
    """One step of a schedule: runs the passes of its stage, or repeats them."""

    def __init__(self, recorder: Contentless, stage: Any, micro_batches: int, repeated: Callable[[], None]) -> None:
        self.recorder, self.stage, self.last, self.tell = recorder, stage, micro_batches - 1, repeated
        self.ran: Counter[Key] = Counter()
        self.repeated: set[Key] = set()
        self.batches: dict[int, _Batch] = {}
        self._passes: dict[Key, list[_Pass]] = {}

    def begin(self, chunk: int, key: Key) -> None:
        """Decide whether a micro-batch is run."""
        run = chunk == self.last or self.ran[key] < FIRST or self._steady(key) is None
        number = self.recorder.position.calls().get(self.stage.submod, 0)
        self.batches[chunk] = _Batch(number, key[2:], run)

    def do(self, name: str, chunk: int, key: Key, call: Callable[[], Any], results: Callable[[Any], Any]) -> Any:
        """Run a pass and return what it returned, or repeat it and return its results."""
        batch = self.batches[chunk]
        out = self._run(name, batch, key, call, results) if batch.run else self._repeat(name, batch, key)
        if name == "B":
            batch.held.clear()
        return out

    def _steady(self, key: Key) -> _Pass | None:
        """Return the pass that stands for all of its kind, if there is one."""
        passes = self._passes.get(key, [])
        if len(passes) < 2 or not passes[-1].same(passes[-2]):
            return None
        return max(passes, key=lambda p: len(p.log.entries))  # of two, the one that says when its results are freed

    def _run(self, name: str, batch: _Batch, key: Key, call: Callable[[], Any], results: Callable[[Any], Any]) -> Any:
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
        ran = _Pass(
            log,
            tuple(result for result, _ in described),
            lives,
            structure,
            {m: n - calls.get(m, 0) for m, n in position.calls().items() if n != calls.get(m, 0)},
            position.after_backward,
            frozenset(lives).union(*(p.lives for p in batch.passes)),
            log.own and sizes == recorder.sizes() and _UNKNOWN not in described and structure in (None, list, tuple),
        )
        batch.passes.append(ran)
        if name == "B":
            ran.steady &= _nothing_left(batch)
        if key in self.repeated and not ran.did(self._passes[key][-1]):
            raise Unsteady
        self._passes[key] = [*self._passes.get(key, [])[-1:], ran]
        self.ran[key] += 1
        return out

    def _repeat(self, name: str, batch: _Batch, key: Key) -> Any:
        ran = self._steady(key)
        if ran is None:
            raise Unsteady
        self.repeated.add(key)
        self.tell()
        batch.lives[name] = repeat(self.recorder, ran.log, batch.number, batch.lives, batch.held)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            tensors = build(Entry(ran.results, list), [])
        for tensor, life in zip(tensors, ran.lives, strict=True):
            if life is not None:
                self.recorder.adopt(tensor.untyped_storage(), batch.lives[life[0]][life[1]])
                batch.held[life] = tensor
        self.recorder.position.called(ran.calls, ran.after_backward)
        return tensors[0] if ran.structure is None else ran.structure(tensors)

    def _described(self, value: Any, batch: _Batch) -> tuple[Result | None, tuple[str, int] | None]:
        """Return how to make a result of a pass, and which storage it is."""
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


def _given(value: Any) -> Any:
    """Return all that a pass can see of what it is given: shapes, and the content of what has one."""
    if isinstance(value, list | tuple):
        return tuple(_given(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _given(item)) for name, item in value.items())
    if type(value) is FakeTensor:
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if type(value) is Tensor:
        with unset_fake_temporarily():
            return value.shape, value.dtype, value.numpy().tobytes()
    return value if isinstance(value, int | float | str | None) else ("an object", id(value))


_UNKNOWN = (None, ("", 0))
"""A result that cannot be made again."""


def _nothing_left(batch: _Batch) -> bool:
    """Whether all that the passes of a micro-batch made died in them, but for their results."""
    died = {entry[1:] for p in batch.passes for entry in p.log.entries if entry[0] == "death"}
    returned = {life for p in batch.passes for life in p.lives}
    every = {life.made_in[1:] for lives in batch.lives.values() for life in lives if life.made_in is not None}
    return every <= died | returned


@contextmanager
def repeated_micro_batches(recorder: Contentless, note: Callable[[str], None]) -> Iterator[None]:
    """Run few of the micro-batches that do the same in torch's 1F1B and GPipe schedules."""
    steps: dict[int, _Step] = {}  # by the id of the stage
    base, schedule = pipeline_stage._PipelineStageBase, pipeline_schedules._PipelineSchedule
    forward: Any = base.forward_one_chunk
    backward: Any = base.backward_one_chunk
    loss: Any = schedule._maybe_compute_loss

    def tell() -> None:
        note(
            "equal micro-batches of a pipeline: run until two did the same, and the last; repeated from their record"
        )

    def forwards(stage: Any, chunk: int, args: Any, kwargs: Any = None, save_forward_output: bool = True) -> Any:
        step = steps.get(id(stage))
        if step is None:
            return forward(stage, chunk, args, kwargs, save_forward_output)
        key = ("F", recorder.sizes(), _given(args), _given(kwargs or {}))
        step.begin(chunk, key)
        run = step.batches[chunk].run
        out = step.do(
            "F", chunk, key, lambda: forward(stage, chunk, args, kwargs, save_forward_output), lambda out: out
        )
        if not run:
            stage.fwd_cache[chunk] = (out if isinstance(out, tuple) else (out,), [])
            if stage.is_last and save_forward_output:
                stage.output_chunks.append(out)
        return out

    def losses(self: Any, stage: Any, output: Any, target_mbs: Any, chunk: int, *args: Any, **kwargs: Any) -> None:
        step = steps.get(id(stage))
        if step is None or not stage.is_last:
            loss(self, stage, output, target_mbs, chunk, *args, **kwargs)
            return
        run = step.batches[chunk].run
        out = step.do(
            "L",
            chunk,
            ("L", step.batches[chunk].kind, _given(target_mbs and target_mbs[chunk])),
            lambda: loss(self, stage, output, target_mbs, chunk, *args, **kwargs),
            lambda _: self._internal_losses[-1],
        )
        if not run:
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
        run = step.batches[chunk].run
        if not run:
            stage.fwd_cache.pop(chunk)
        out = step.do(
            "B",
            chunk,
            key,
            lambda: backward(stage, chunk, loss, full_backward, last_backward),
            lambda _: stage.bwd_cache[chunk],
        )
        if not run:
            stage.bwd_cache[chunk] = out
        del step.batches[chunk]

    def steps_of(kind: Any) -> Any:
        run = kind._step_microbatches

        def step_microbatches(self: Any, *args: Any, **kwargs: Any) -> Any:
            stage = self._stage
            if type(self) is kind and self._has_backward and stage.has_backward and stage.dw_builder is None:
                steps[id(stage)] = _Step(recorder, stage, self._n_microbatches, tell)
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
