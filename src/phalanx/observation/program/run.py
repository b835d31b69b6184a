"""Observe one rank of a program in this process: the fake world and GPU, and the recorder of its second step."""

import re
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol
from unittest.mock import patch

import torch.utils
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from phalanx.observation.fake.calls import stated_answers, uncompiled
from phalanx.observation.fake.recorder import FakeStepRecorder
from phalanx.observation.fake.result_cache import fake_mode
from phalanx.observation.fake.world import Post, fake_gpus, frozen_objects, one_rank
from phalanx.observation.program.pipelines import repeated_micro_batches
from phalanx.observation.rank_classes import SECOND_MICRO_BATCH, WANTED_STEP
from phalanx.observation.recorder.places import OUTSIDE_PHALANX, raised, shortened
from phalanx.observation.recorder.step import StepRecord
from phalanx.observation.recorder.summary import GroupNames, summarise
from phalanx.observation.request import ObservationRequest
from phalanx.observation.unobservable import Unobservable
from phalanx.schedule.observation import RankObservation, Site


class _Enough(BaseException):
    """Ends the program once the wanted step is recorded. Not an Exception, so that programs do not catch it."""


class Peers(Post, Protocol):
    """The other observed ranks: processes.py."""

    def reached(self, place: int, so_far: RankObservation) -> None:
        """Report what this rank did until it reached a place, and wait until it may continue."""


def observe_rank(
    program: Callable[[], object], rank: int, request: ObservationRequest, peers: Peers | None = None
) -> tuple[RankObservation, str, dict[str, int]]:
    """Run `program` as one rank until the requested step has ended; return the record of that step, or of the latest
    one if the program ends before, the type of device that it computes on, and the mesh axes that it named.

    `peers` hears of the step before when its second micro-batch begins and when it ends. Raises Unobservable where no
    step was taken, or where an operation has no meaning on fake tensors; and Unsteady, unless every micro-batch of a
    pipeline is executed, where one does not represent others.
    """
    observed_step = request.step
    notes: dict[str, None] = {}
    results: list[RankObservation] = []
    names = GroupNames(request.world, request.axes)

    def note(text: str) -> None:
        notes[text] = None

    def ended(step: StepRecord) -> None:
        results.append(summarise(recorder, step, names))
        if step.number >= observed_step:
            raise _Enough
        if step.number == observed_step - 1 and peers is not None:
            peers.reached(WANTED_STEP, results[-1])

    def second_micro_batch() -> None:
        if recorder.step.number == observed_step - 1 and peers is not None:
            peers.reached(SECOND_MICRO_BATCH, summarise(recorder, recorder.step, names))

    fake = fake_mode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    recorder = FakeStepRecorder(fake, ended, request.branches)
    recorder.position.second = second_micro_batch
    ending = "ended"
    with ExitStack() as stack:
        stack.enter_context(frozen_objects())
        stack.enter_context(one_rank(rank, request.world, request.per_node, note, peers))
        on_node = min(request.per_node, request.world)
        gpus = stack.enter_context(fake_gpus(on_node, lambda: note("device cuda: redirected to a fake GPU")))
        stack.enter_context(stated_answers(recorder.answer, note))
        stack.enter_context(uncompiled(note))
        gpus.waits, gpus.live = recorder.waited, lambda: recorder.live["gpu"]
        # Torch keeps weak references to fake tensors, for which Module.to() would refuse to move parameters.
        stack.enter_context(patch.object(torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda _: [])))
        if not request.every_micro_batch:
            stack.enter_context(repeated_micro_batches(recorder, note))
        stack.enter_context(recorder.fake)
        stack.enter_context(recorder.recording())
        try:
            try:
                program()
            except SystemExit as end:
                ending = f"exited with {end.code or 0!r}, at {raised(end)},"
                if end.code not in (None, 0):
                    raise Unobservable(f"the program {ending.removesuffix(',')}") from end
            if recorder.position.stepped:
                recorder.finish()
        except _Enough:
            pass
        except _WITHOUT_MEANING as error:
            raise Unobservable(_meaningless(error)) from error
        except NotImplementedError as error:
            if "backend" not in str(error):
                raise
            raise Unobservable(_meaningless(error)) from error
        except Exception as error:
            if reason := _needs_cuda(error):
                raise Unobservable(reason) from error
            raise
    if not results:
        raise Unobservable(f"the program {ending} before its first step: no torch optimizer's step() was called")
    places = {place for operation, _, place in recorder.answered if operation == "item"}
    for place in request.branches.keys() - places:
        note(f"nothing is asked of a tensor at {place}, which --branches names")
    for (operation, value, place), count in recorder.answered.items():
        note(f"{operation} of a fake tensor: {value} ({count} x, {place})")
    if results[-1].step < observed_step:
        note("the program took one step: it includes the initialisation of a first step")
    return replace(results[-1], notes=tuple(notes)), recorder.device, names.axes


def _needs_cuda(error: Exception) -> str:
    """Return what of a program runs on a GPU alone, with the remedy, where an error says so; "" for another error."""
    if place := _triton_launch(error):
        return (
            f"a Triton kernel at {place} runs on a GPU alone: wrap it in torch.library.custom_op with a "
            "register_fake, or take the plain torch path in this run"
        )
    if "CUDA_HOME" in str(error):  # says torch.utils.cpp_extension where no compiler for CUDA is
        return (
            f"an extension is built for CUDA at {raised(error)}, and here is no compiler for it: give its "
            "operations fake kernels (torch.library.register_fake), or take the plain torch path in this run"
        )
    return ""


_WITHOUT_MEANING = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_OPERATION = re.compile(r"'?\b(\w+)(?:::|\.)(\w+)")


def _meaningless(error: BaseException) -> str:
    """Return one line about an operation that needs values: the call, the place, and the remedy."""
    name = getattr(error, "func", None) or ".".join(_operation(str(error)))
    return (
        f"{name} needs values of tensors, or is a kernel that does not declare shapes, at {raised(error)}: "
        "call it on the host, give it a fake kernel (torch.library.register_fake), or leave it out of this run"
    )


def _triton_launch(error: BaseException) -> str | None:
    """Return "file:line" of the launch of a Triton kernel if an error was raised in one: it looks for a driver."""
    package = getattr(sys.modules.get("triton"), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    inside = [i for i, f in enumerate(frames) if package and Path(f.filename).is_relative_to(Path(package).parent)]
    if not inside:
        return None
    callers = [f for f in frames[: inside[0]] if not f.filename.startswith(OUTSIDE_PHALANX)]
    return str(shortened(Site(callers[-1].filename, callers[-1].lineno or 0))) if callers else None


def _operation(message: str) -> tuple[str, ...]:
    operation = _OPERATION.search(message)
    return operation.groups() if operation else (message.splitlines()[0],)
