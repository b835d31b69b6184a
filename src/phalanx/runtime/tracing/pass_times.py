"""The times of a step's passes: when each unit's forward and backward ran, and the optimizer.

forward     of a unit: from the call of its module until that returns
backward    of a unit: from the arrival of its output's gradient until that of the preceding unit's arrives, or until
            the backward pass of the model ends
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from phalanx.runtime.comm.recorder import Now
from phalanx.runtime.comm.timeline import COMPUTE, CommTimeline, Span


class _Watch:
    """Turns the beginnings and ends of passes into spans on a timeline; one pass runs at a time."""

    def __init__(self, timeline: CommTimeline) -> None:
        self.timeline = timeline
        self.current: tuple[str, dict[str, Any], float] | None = None

    def begin(self, op: str, unit: str = "", micro_batch: int | None = None) -> None:
        self.end()
        detail: dict[str, Any] = {"op": op} | ({"unit": unit, "micro_batch": micro_batch} if unit else {})
        self.current = (f"{op} {unit}".strip(), detail, perf_counter())

    def begin_backward(self, unit: str, micro_batch: int) -> None:
        if self.current is None:  # the first unit of this backward pass
            Variable._execution_engine.queue_callback(self.end)
        self.begin("backward", unit, micro_batch)

    def end(self) -> None:
        if self.current is not None:
            name, detail, start = self.current
            self.timeline.passes.append(Span(name, COMPUTE, start, perf_counter(), detail))
            self.current = None


@contextmanager
def passes(
    units: dict[str, nn.Module], optimizer: torch.optim.Optimizer, timeline: CommTimeline, now: Callable[[], Now]
) -> Iterator[None]:
    """Record the passes of a step on its timeline: each unit's forward and backward, and the optimizer."""
    watch = _Watch(timeline)

    def forward(unit: str) -> Callable[..., None]:
        return lambda *_: watch.begin("forward", unit, now().micro_batch)

    def over(unit: str) -> Callable[..., None]:
        def after(_: nn.Module, args: object, out: Tensor) -> None:
            watch.end()
            if out.requires_grad:
                out.register_hook(lambda _: watch.begin_backward(unit, now().micro_batch))

        return after

    hooks: list[Any] = [
        optimizer.register_step_pre_hook(lambda *_: watch.begin("optimizer")),
        optimizer.register_step_post_hook(lambda *_: watch.end()),
    ]
    for unit, module in units.items():
        hooks += [module.register_forward_pre_hook(forward(unit)), module.register_forward_hook(over(unit))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
