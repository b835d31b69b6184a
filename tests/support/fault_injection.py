"""Faults injected into pool ranks: non-finite numbers where hardware or a bug might put them, and parameters that
arrive as late as they may."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from phalanx.runtime.any_module import parallelize
from phalanx.runtime.checkpoint.async_saver import Saver
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Call, Handle
from phalanx.runtime.data_parallel import logical_state, replica_check
from phalanx.runtime.process.environment import World
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.loss_scale import LossScale
from phalanx.training.training_step import StepResult, Training
from support import awkward_module
from support.rank_cases import over

VICTIM = "blocks.1.mlp.up.weight"


def held(training: Training) -> dict[str, torch.Tensor]:
    """Return this rank's share of the state, by name."""
    return {part.name: part.data for part in training.owned()}


def batches(world: World, spec: ModelSpec, job: Job, strategy: Strategy, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + world.rank)
    shape = (strategy.micro_batch, job.seq + 1)
    return [torch.randint(spec.vocab, shape, generator=generator) for _ in range(strategy.accumulation(job))]


def poison(training: Training, value: float, micro_batch: int, times: int) -> torch.utils.hooks.RemovableHandle:
    """Set three elements of this rank's gradient of VICTIM to `value` in a micro-batch, `times` times."""
    left, this = [times], weakref.ref(training)  # a parameter holds its hooks outside of Python's sight

    def spoil(g: torch.Tensor) -> torch.Tensor:
        if this().current.micro_batch != micro_batch or not left[0]:  # type: ignore[union-attr]
            return g
        left[0] -= 1
        g = g.clone()
        g.view(-1)[5:8] = value
        return g

    return dict(training.model.named_parameters())[VICTIM].register_hook(spoil)  # type: ignore[no-any-return]


def spoil_reduced(training: Training, times: int) -> None:
    """Set an element of this rank's part of the reduced gradients to NaN, `times` times."""
    finish, left = training.engine.finish, [times]

    def spoiled() -> None:
        finish()
        if left[0]:
            left[0] -= 1
            shard = training.engine.buckets[0].shard
            assert shard is not None
            shard[0] = float("nan")

    training.engine.finish = spoiled  # type: ignore[method-assign]


def spoiled_step(
    world: World, spec: ModelSpec, job: Job, strategy: Strategy, fault: str, transport: str = "native"
) -> dict[str, Any]:
    """Take a step spoiled by a fault on rank 1 and then a good one, and compare with the good one alone.

    Returns the messages, and the tensors that differ at the end.
    """
    comm = Comm(world, mesh(strategy), over(transport))
    ours, theirs = (Training(spec, job, strategy, comm, 0, "skip") for _ in range(2))
    if world.rank == 1:
        always, handle = 99, None
        if fault in ("gradient", "transient"):
            handle = poison(ours, float("nan"), 1, always if fault == "gradient" else 1)
        else:
            spoil_reduced(ours, always if fault == "reduced" else 1)
    said = ours.step(batches(world, spec, job, strategy, 0), 1e-2).skipped
    if world.rank == 1 and handle is not None:
        handle.remove()
    if ours.engine.compressor is not None:
        theirs.engine.compressor.draws = ours.engine.compressor.draws  # type: ignore[union-attr]
    good = batches(world, spec, job, strategy, 1)
    # Otherwise events of the first step would mix with those of the second in the order of the transports.
    results = [replace(t.step(good, 1e-2), skips=0) for t in (ours, theirs)] if fault != "reduced" else []
    pairs = zip(held(ours).items(), held(theirs).values(), strict=True)
    differ = [name for (name, a), b in pairs if not torch.equal(a, b)]
    comm.barrier()
    return {"said": said, "same": results[:1] == results[1:], "differ": differ, "skipped": ours.skipped}


def overflow_on_one(
    world: World, spec: ModelSpec, job: Job, strategy: Strategy
) -> list[tuple[StepResult, LossScale]]:
    """Take three fp16 steps, in the second of which a gradient overflows on rank 1 only."""
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, 0)
    training.loss_scale = LossScale(2.0**10)
    found = []
    for step in range(3):
        handle = poison(training, float("inf"), 0, 1 if step == 1 and world.rank == 1 else 0)
        before = {name: t.clone() for name, t in held(training).items()}
        result = training.step(batches(world, spec, job, strategy, step), 1e-2)
        handle.remove()
        after = held(training)
        assert bool(result.skipped) == all(torch.equal(before[n], t) for n, t in after.items() if "compr" not in n)
        assert training.loss_scale is not None
        found.append((result, training.loss_scale))
        replica_check.compare(training.engine, training.masters)
    comm.barrier()
    return found


def norm_and_kept(world: World, spec: ModelSpec, job: Job, strategy: Strategy, scale: float) -> tuple[float, float]:
    """Return the gradient norm of a second step, and the norm of all compression residuals after it."""
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, 0)
    norm = 0.0
    for step in range(2):
        if training.loss_scale is not None:
            training.loss_scale = LossScale(scale * 2**step)  # it grows on the way
        result = training.step(batches(world, spec, job, strategy, step), 1e-2)
        assert not result.skipped
        norm = result.grad_norm
    kept = list(logical_state.residuals(training.engine).values())
    comm.barrier()
    return norm, float(sum(t.double().square().sum() for t in kept)) ** 0.5


class Late(Comm):
    """A transport whose all-gathers complete as late as allowed.

    They send what their source held when they were issued, and arrive when they are waited for. Those that are never
    waited for arrive after the others, into the same memory.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.under_way: list[Underway] = []

    def start(self, call: Call, *how: Any) -> Handle:
        if call.op != "all_gather":
            return super().start(call, *how)
        sent, really = replace(call, source=call.source.clone()), super().start
        self.under_way.append(Underway(self, call.target.data_ptr(), lambda: really(sent, *how).wait()))
        return self.under_way[-1]


class Underway:
    def __init__(self, comm: Late, target: int, arrive: Callable[[], object]) -> None:
        self.comm, self.target, self.arrive = comm, target, arrive

    def wait(self) -> None:
        under_way = self.comm.under_way
        forgotten = [e for e in under_way[: under_way.index(self)] if e.target == self.target]
        for each in (self, *forgotten):
            under_way.remove(each)
            each.arrive()


def resumed_while_weights_travel(
    world: World, spec: ModelSpec, job: Job, strategy: Strategy, folder: Path
) -> tuple[list[StepResult], list[str]]:
    """Load a checkpoint into a training whose own initial weights are still being gathered.

    Returns the next step of the saved training and of the resumed one, and the state that differs after it.
    """
    goes_on = Training(spec, job, strategy, Comm(world, mesh(strategy)), 0)
    goes_on.step(batches(world, spec, job, strategy, 0), 1e-2)
    saver = Saver(folder, goes_on.comm, 1)
    saver.save(1, goes_on.owned(), {})
    saver.wait()
    comm = Late(world, mesh(strategy))
    resumed = Training(spec, job, strategy, comm, 1)
    assert comm.under_way, "nothing travels: the case says nothing"
    resumed.load(folder, 1)
    results = [t.step(batches(world, spec, job, strategy, 1), 1e-2) for t in (goes_on, resumed)]
    for training in (goes_on, resumed):
        training.engine.wait_parameters(list(training.engine.parameters))
    pairs = zip(held(goes_on).items(), held(resumed).values(), strict=True)
    differ = [name for (name, a), b in pairs if not torch.equal(a, b)]
    goes_on.comm.barrier()
    return results, differ


def resumed_with_residuals(
    world: World, spec: ModelSpec, job: Job, strategy: Strategy, folder: Path, most: int
) -> tuple[list[StepResult], list[StepResult]]:
    """Save a training under error feedback after two steps, where up to `most` ranks save their own residuals; return
    its next three steps and those of another training that loads the checkpoint."""
    with patch.object(logical_state, "OWN_RANKS", most):
        goes_on, resumed = (Training(spec, job, strategy, Comm(world, mesh(strategy)), seed) for seed in (0, 1))
        for i in range(2):
            goes_on.step(batches(world, spec, job, strategy, i), 1e-2)
        saver = Saver(folder, goes_on.comm, 1)
        saver.save(2, goes_on.owned(), {})
        saver.wait()
        resumed.load(folder, 2)
    steps = [[t.step(batches(world, spec, job, strategy, i), 1e-2) for i in (2, 3, 4)] for t in (goes_on, resumed)]
    goes_on.comm.barrier()
    return steps[0], steps[1]


def skips_while_others_synchronise(world: World, spec: ModelSpec, job: Job, strategy: Strategy) -> tuple[str, float]:
    """Take the steps between two synchronisations of replicas that take steps alone; on rank 0 the norm of the last
    gradient is not a number. Returns why the last step was skipped, and the sum of the masters after it."""
    training = Training(spec, job, strategy, Comm(world, mesh(strategy)), 0, nonfinite="skip")
    for i in range(strategy.local - 1):
        training.step(batches(world, spec, job, strategy, i), 1e-2)
    nan = torch.tensor(torch.nan, dtype=torch.float64)
    with patch.object(training.engine, "norm_square", lambda: nan) if world.rank == 0 else nullcontext():
        skipped = training.step(batches(world, spec, job, strategy, strategy.local), 1e-2).skipped
    training.comm.barrier()
    return skipped, sum(float(t.detach().double().sum()) for t in training.masters.values())


def odd_passes_while_weights_travel(world: World, line: str, depth: int) -> dict[str, Any]:
    """Run `awkward_module.odd_passes` with late all-gathers."""
    with patch.object(parallelize, "Comm", Late):
        return awkward_module.odd_passes(world, line, depth)
