"""Measure bytes of live tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.recorder import Recorder
from phalanx.runtime.process.environment import ALONE
from phalanx.runtime.tracing.instrument import Tracker
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from support.split_backward_cases import Part, batches


def live(spec: ModelSpec, job: Job, s: Strategy, after: Callable[[Part, torch.Tensor], Any]) -> int:
    """Return the bytes that a forward pass, and then `after`, leave alive."""
    part = Part(spec, job, s, Comm(ALONE, mesh(s)))
    part.splits()
    (batch,) = batches(spec, job, s, part, 1)
    gc.collect()
    with Tracker(Recorder()) as tracker:
        kept = after(part, part.forward(batch))
        found = tracker.live - tracker.start
        del kept
    return found
