"""Gradient compression: error feedback must lose nothing, and its error is measured.

Compressed gradients equal no reference, so parity cannot examine them. But at lr = 0 every step has the same
gradient g, and after T steps, over all ranks:

    sum of the gradients sent + residual at the end  =  T g

The distance from g, of the first step and of the mean of T steps, measures the compression itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.observation.parity.parity import gradient_errors, random_batches
from phalanx.progress import in_progress
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel import logical_state
from phalanx.spec.job import Job, Precision, Train
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training


@dataclass(frozen=True)
class CompressionDeviation:
    """The deviation of compressed gradients. `lost_rel_max`: the largest relative difference between the sides of the
    equation above over all tensors, None without error feedback. `first_error`, `mean_error`: |sent - g|₂ / |g|₂ of
    the first step, and of the mean of all."""

    lost_rel_max: float | None
    first_error: float
    mean_error: float


def examine_compressed(
    spec: ModelSpec,
    job: Job,
    strategy: Strategy,
    train: Train,
    comm: Comm,
    dtype: str,
    steps: int,
    say: Callable[[str], None] = lambda _: None,
) -> CompressionDeviation:
    """Take `steps` equal steps with compression and one without, on all ranks of the strategy together. Returns the
    same result on each. `say`: prints a line of progress."""
    job = replace(job, precision=Precision(compute=dtype), clip=0.0)  # type: ignore[arg-type]
    batches = random_batches(spec, job, train.seed, steps=2)
    share = batches.share(0, comm.mesh.replica(comm.world.rank), strategy.dp, strategy.micro_batch)
    plain = Training(spec, job, replace(strategy, compression="none"), comm, train.seed)
    mine = [torch.from_numpy(plain.context.cut(b)).to(comm.world.device) for b in share]
    plain.step(mine, lr=0.0)
    truth = {name: g.clone() for name, g in plain.engine.gradients()}
    del plain
    ours = Training(spec, job, strategy, comm, train.seed)
    total = {name: torch.zeros_like(g) for name, g in truth.items()}
    first = 0.0
    for step in in_progress(range(steps), "compressed steps", say, steps):
        ours.step(mine, lr=0.0)
        for name, g in ours.engine.gradients():
            total[name] += g
        if step == 0:
            first = _distance(total, truth)
    mean = _distance({name: t / steps for name, t in total.items()}, truth)
    c = strategy.compressor
    if c is None or not c.feedback:
        return CompressionDeviation(None, first, mean)
    residuals = logical_state.residuals(ours.engine)
    accounted = {name: t + residuals[name] for name, t in total.items()}
    errors = gradient_errors(accounted, {name: g * steps for name, g in truth.items()})
    return CompressionDeviation(max(error for _, error in errors), first, mean)


def _distance(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Return |ours - truth|₂ / |truth|₂, over all tensors together."""
    difference = sum(float((ours[name] - g).square().sum()) for name, g in truth.items())
    total = sum(float(g.square().sum()) for g in truth.values())
    return float((difference / total) ** 0.5)
