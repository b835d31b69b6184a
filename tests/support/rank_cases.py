"""Functions that pool ranks run: importable by name, so that a case is sent as a few plain objects."""

from __future__ import annotations

import gc
import io
import os
import random
import signal
import time
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from phalanx.cost.step.expand import expand
from phalanx.infer.sampling import Sampling
from phalanx.infer.text import answer, question
from phalanx.nn.weight_files import open_weights
from phalanx.observation.diff import differences, slack
from phalanx.observation.parity import parity
from phalanx.observation.parity.compression_error import examine_compressed
from phalanx.runtime.checkpoint import store
from phalanx.runtime.checkpoint.async_saver import Saver
from phalanx.runtime.checkpoint.boxes import full_part, share
from phalanx.runtime.checkpoint.manifest import CheckpointError
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.comm.recorder import Recorder
from phalanx.runtime.comm.schedule_executor import Executor
from phalanx.runtime.comm.transport import DONE, Call
from phalanx.runtime.data_parallel import logical_state, replica_check
from phalanx.runtime.process import gpus, status
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.agent import SECRET_VARIABLE
from phalanx.runtime.process.environment import ALONE, World
from phalanx.runtime.process.launch import RankFailure
from phalanx.runtime.process.objects import ForgedMessageError
from phalanx.runtime.process.rank import naming_rank
from phalanx.runtime.tracing import timelines
from phalanx.runtime.tracing.instrument import Tracker, instrument
from phalanx.runtime.tracing.timelines import passes
from phalanx.schedule.collectives.ir import Schedule
from phalanx.schedule.collectives.rank_program import program
from phalanx.schedule.layers.context import context
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Train
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.data import Batches
from phalanx.training.loss_scale import LossScale
from phalanx.training.trainer import learning_rate
from phalanx.training.training_step import Training
from support.sockets import Touch


def instrumented_step(
    world: World,
    spec: ModelSpec,
    job: Job,
    strategy: Strategy,
    transport: str = "native",
    balanced: bool = False,
    at: int | None = None,
) -> dict[str, Any]:
    """Compare a recorded step with its program; return differences, predicted and measured peak, and by how much
    these may differ.

    `balanced`: experts are chosen in turn, whatever the router says. `at`: which of the steps that replicas take
    alone.
    """
    if world.size > 1:
        time.sleep(0.05)  # Gloo's threads let go of the last case's tensors some moments after it is over
    gc.collect()
    others = Tracker(Recorder()).live  # every tensor is followed, those that other tests have left too
    comm = Comm(world, mesh(strategy), over(transport))
    training = Training(spec, job, strategy, comm, seed=0, balanced=balanced)
    if training.loss_scale is not None:
        training.loss_scale = LossScale(256.0)  # a step that overflows has no update
    training.alone = job.outer.last_sent(strategy.local) if at is None else at
    batches = _same_batches(world, spec, job, strategy)
    comm.timeline.begin()
    with instrument(training.model.units(), comm.recorder, lambda: training.current) as tracker:
        training.step(batches, lr=1e-3)
    comm.timeline.end()
    if training.outer is not None:
        training.outer.wait()
    comm.barrier()  # what is still under way would hold its memory into the next case
    program = expand(Layout(spec, job, strategy).rank_view(world.rank), at=at)
    expected = [replace(e, routed=e.routed and not balanced) for e in program.events]
    return {
        "differences": list(map(str, differences(expected, tuple(comm.recorder.events)))),
        "events": len(comm.recorder.events),
        "predicted_peak": program.peak_bytes,
        "slack": slack(program),
        "measured_peak": tracker.peak - others,
        "bytes": dict(comm.recorder.bytes_per_axis),
    }


def examine(
    world: World,
    spec: ModelSpec,
    job: Job,
    strategy: Strategy,
    dtype: Any,
    steps: int,
    transport: str = "shm",
    under: tuple[Any, ...] = ("sgd", "adamw"),
    lr: float = 1e-3,
) -> list[Any]:
    """Compare a strategy with one process, by optimizer.

    The default transport is shared memory, the fastest, for tests that are not about transports.
    """
    comm = Comm(world, mesh(strategy), over(transport))
    train = Train(lr=lr, steps=100, warmup=2, seed=3)
    found = [parity.examine(spec, job, strategy, train, comm, name, dtype, steps) for name in under]
    comm.barrier()
    return found


def continue_run(
    world: World, spec: ModelSpec, job: Job, strategy: Strategy, folder: Path, steps: tuple[int, int], transport: str
) -> list[float]:
    """Return losses of steps [from, to) of a run that resumes from `folder`.

    The run continues beyond `to` while it saves its state at `to` there.
    """
    comm = Comm(world, mesh(strategy), over(transport))
    training = Training(spec, job, strategy, comm, seed=5)
    start, stop = steps
    if start:
        training.load(folder, start)
    losses = []
    saver = Saver(folder, comm, keep=9)
    for step in range(start, stop + 1):
        if step == stop:
            saver.save(stop, training.owned(), {"seed": 5})
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(spec.vocab, (job.global_batch, job.seq + 1), generator=generator)
        mine = batch.view(strategy.dp, -1, strategy.micro_batch, job.seq + 1)[comm.mesh.replica(world.rank)]
        losses.append(training.step(list(map(training.context.cut, mine)), lr=1e-2).loss)
    saver.wait()
    training.engine.wait_parameters(
        list(training.engine.parameters)
    )  # nothing is under way for the next case to meet
    comm.barrier()
    return losses[:-1]


def _same_batches(world: World, spec: ModelSpec, job: Job, strategy: Strategy) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(mesh(strategy).replica(world.rank))
    shape = (strategy.micro_batch, job.seq + 1)
    tokens = [torch.randint(spec.vocab, shape, generator=generator) for _ in range(strategy.accumulation(job))]
    part = context(strategy, mesh(strategy), world.rank, job.seq)
    if job.documents == "packed":
        return [part.cut(batch).to(world.device) for batch in tokens]
    places = torch.arange(job.seq + 1) % (job.seq // 2 + 1)  # two documents in every sequence
    return [part.cut(torch.stack([batch, places.expand_as(batch)])).to(world.device) for batch in tokens]


def kept_and_sent(
    world: World, spec: ModelSpec, job: Job, strategy: Strategy, steps: int, transport: str
) -> float | None:
    """Return what compression loses over some steps; raise if replicas do not stay bit-identical."""
    comm = Comm(world, mesh(strategy), over(transport))
    found = examine_compressed(spec, job, strategy, Train(seed=3), comm, "float64", steps)
    training = Training(spec, job, strategy, comm, seed=0)
    training.step(_same_batches(world, spec, job, strategy), lr=1e-2)
    training.compare_replicas()
    comm.barrier()
    return found.lost_rel_max


def first_error(world: World, spec: ModelSpec, job: Job, strategy: Strategy) -> dict[str, float]:
    """Return the largest error of a compressed gradient, with two scales to judge it by.

    These are the sum over ranks of the largest magnitudes of their gradients, and the largest magnitude of the sum.
    """
    comm = Comm(world, mesh(strategy))
    batches = _same_batches(world, spec, job, strategy)
    largest = 0.0
    if world.rank == 0:
        alone = Training(spec, replace(job, global_batch=1), Strategy(), Comm(ALONE, mesh(Strategy())), seed=0)
        for rank in range(world.size):
            alone.step(_same_batches(replace(world, rank=rank), spec, job, strategy), lr=0.0)
            largest += max(float(g.abs().max()) for _, g in alone.engine.gradients()) / world.size
    found = []
    for compression in ("none", strategy.compression):
        training = Training(spec, job, replace(strategy, compression=compression), comm, seed=0)
        training.step(batches, lr=0.0)
        found.append({name: g.clone() for name, g in training.engine.gradients()})
    truth, ours = found
    error = max(float((ours[name] - g).abs().max()) for name, g in truth.items())
    comm.barrier()
    return {"error": error, "largest": largest, "largest_sum": max(float(g.abs().max()) for g in truth.values())}


def kept_in(world: World, spec: ModelSpec, job: Job, strategy: Strategy, folder: Path, step: int) -> float:
    """Return the norm of the compression residuals of a run that resumes from a checkpoint."""
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, seed=5)
    training.load(folder, step)
    kept = logical_state.residuals(training.engine).values()
    comm.barrier()
    return float(sum(t.square().sum() for t in kept)) ** 0.5


def learn(world: World, spec: ModelSpec, job: Job, strategy: Strategy, steps: int, peak: float, text: bytes) -> float:
    """Train on the bytes of a text; return the mean loss over the last tenth of the run."""
    comm = Comm(world, mesh(strategy), over("shm"))
    training = Training(spec, job, strategy, comm, seed=1)
    batches = Batches(np.frombuffer(text, dtype=np.uint8).astype(np.int64), job.seq, job.global_batch, 1)
    losses = []
    for step in range(steps):
        share = batches.share(step, comm.mesh.replica(world.rank), strategy.dp, strategy.micro_batch)
        lr = learning_rate(Train(steps=steps, warmup=10), peak, step)
        losses.append(training.step([torch.from_numpy(training.context.cut(b)) for b in share], lr).loss)
    comm.barrier()
    return sum(losses[-steps // 10 :]) / (steps // 10)


def examine_broken(world: World, how: str, *case: Any) -> list[Any]:
    """Check parity of an engine that was broken on purpose."""
    from phalanx.runtime.data_parallel import engine as data_parallel

    engine = data_parallel.DataParallel
    original = engine._issue

    def mean_instead_of_sum(self: Any) -> None:
        self.buckets[self._next].gradients.div_(self.comm.world.size)  # the oracle's engine stays whole
        original(self)

    def forgets_last_bucket(self: Any) -> None:
        if self.comm.world.size > 1 and self._next == len(self.buckets) - 1:
            self._next += 1
        else:
            original(self)

    def forgets_experts(self: Any) -> None:
        if self._now[self._next].bucket.experts:
            self._next += 1
        else:
            original(self)

    broken = {"mean": mean_instead_of_sum, "forgets": forgets_last_bucket, "experts": forgets_experts}
    engine._issue = broken[how]  # type: ignore[method-assign]
    try:
        return examine(world, *case)
    finally:
        engine._issue = original  # type: ignore[method-assign]


def examine_broken_tensors(world: World, how: str, *case: Any) -> list[Any]:
    """Check parity with a layer that omits its part over the tp ranks."""
    from phalanx.runtime.model_parallel import tensor as tensor_parallel

    all_reduce = tensor_parallel.TensorParallel.all_reduce

    def bias_before_the_sum(
        ctx: Any, tp: Any, unit: str, owners: Any, made: bool, y: torch.Tensor, *biases: torch.Tensor
    ) -> torch.Tensor:
        if how == "bias on every rank" or tp.split.index == 0:
            for bias in biases:
                y.add_(bias)
        ctx.biases, ctx.adds = len(biases), how == "bias on every rank" or tp.split.index == 0
        tp.all_reduce(y, unit, "F").wait()
        ctx.mark_dirty(y)
        return y

    def its_backward(ctx: Any, g: torch.Tensor) -> Any:
        d_bias = g.reshape(-1, g.shape[-1]).sum(0) * ctx.adds
        return (None, None, None, None, g, *(d_bias for _ in range(ctx.biases)))

    def forgets(self: Any, tensor: torch.Tensor, unit: str, phase: Any, reduction: Any = "sum") -> Any:
        if phase == "B" and unit == "blocks.0":
            return DONE
        return all_reduce(self, tensor, unit, phase, reduction)

    with pytest.MonkeyPatch.context() as patch:
        if how == "no backward all-reduce":
            patch.setattr(tensor_parallel.TensorParallel, "all_reduce", forgets)
        else:
            patch.setattr(tensor_parallel._Sum, "forward", staticmethod(bias_before_the_sum))
            patch.setattr(tensor_parallel._Sum, "backward", staticmethod(its_backward))
        return examine(world, *case)


def examine_repeating(world: World, *case: Any) -> list[Any]:
    """Check parity with recomputed forward passes that omit their sums over ranks."""
    from phalanx.runtime.autograd.layer_comm import LayerComm

    all_reduce = LayerComm.all_reduce

    def forgets(self: LayerComm, *given: Any, **named: Any) -> Any:
        return DONE if self.again else all_reduce(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerComm, "all_reduce", forgets)
        return examine(world, *case)


def examine_broken_context(world: World, how: str, *case: Any) -> list[Any]:
    """Check parity with a mistake in a rank's part of the sequence."""
    from phalanx.runtime.model_parallel import context as context_parallel

    made, rectangle = context_parallel.ContextParallel.__init__, context_parallel._rectangle

    def from_0(self: Any, *args: Any) -> None:
        made(self, *args)
        self.own = torch.arange(len(self.own))

    def all_keys(cp: Any, source: int, tokens: int) -> tuple[slice, slice]:
        return rectangle(cp, source, tokens)[0], slice(0, tokens)

    with pytest.MonkeyPatch.context() as patch:
        if how == "positions from 0":
            patch.setattr(context_parallel.ContextParallel, "__init__", from_0)
        else:
            patch.setattr(context_parallel, "_rectangle", all_keys)
        return examine(world, *case)


def stepped_and_compared(world: World, spec: ModelSpec, job: Job, strategy: Strategy) -> None:
    """Take a step and compare the replicas; raise if they differ."""
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, seed=0)
    training.step(_same_batches(world, spec, job, strategy), lr=1e-2)
    training.compare_replicas()
    comm.barrier()


def die_in_a_ring(world: World, rank: int) -> None:
    """Kill one rank between two exchanges, while the others wait for what it would have passed on."""
    comm = Comm(world, mesh(Strategy(cp=world.size)))
    block, arriving = torch.zeros(2, 1000).add_(world.rank)
    for hop in range(2 * world.size):
        if world.rank == rank and hop == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.exchange(arriving, block, "ring", unit="blocks.0", phase="F").wait()
        block, arriving = arriving, block


def compared(
    world: World, spec: ModelSpec, job: Job, strategy: Strategy, transport: str, spoiled: dict[int, str]
) -> tuple[str, int]:
    """Take two steps, comparing the replicas after each; flip one bit on the ranks in `spoiled` and compare again.

    Returns the message of the last comparison, and the number of events that all comparisons recorded.
    """
    comm = Comm(world, mesh(strategy), over(transport))
    training = Training(spec, job, strategy, comm, seed=0)
    batch = torch.ones(strategy.micro_batch, job.seq + 1, dtype=torch.int64)
    recorded = 0
    for _ in range(2):
        training.step([batch] * strategy.accumulation(job), lr=1e-3)
        comm.recorder.clear()
        comm.recorder.keeping = True
        training.compare_replicas()
        comm.recorder.keeping = False
        recorded += len(comm.recorder.events)
    if world.rank in spoiled:
        kind, _, name = spoiled[world.rank].partition(" ")
        held = {
            "weight": training.engine.parameters,
            "master": training.masters,
            "buffer": dict(training.model.named_buffers()),
        }[kind]
        tensor = held[name].detach()
        integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        tensor.view(-1).view(integers)[0] ^= 1
    try:
        training.compare_replicas()
        said = ""
    except replica_check.ReplicasDiffer as error:
        said = str(error)
    comm.barrier()
    return said, recorded


def rank_and_sum(world: World) -> tuple[int, float]:
    comm = Comm(world, mesh(Strategy(dp=world.size)))
    total = torch.tensor([float(world.rank)])
    comm.all_reduce(total, "world", unit="test", phase="B").wait()
    return world.rank, float(total)


def raise_on(world: World, rank: int) -> None:
    if world.rank == rank:
        raise ValueError("on purpose")
    dist.barrier()


def sleep_on(world: World, rank: int) -> None:
    comm = Comm(world, mesh(Strategy(dp=world.size)))
    if world.rank == rank:
        comm.status.now("a nap")
        time.sleep(60)


RINGS = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "all_to_all": "pairwise"}


def over(transport: Any) -> tuple[Choice, ...]:
    """Use one transport for everything."""
    return tuple(
        Choice(op, size, 0, transport, RINGS[op] if transport == "p2p" else "")
        for op in RINGS
        for size in (2, 3, 4, 6)
    )


def _values(rank: int, n: int, dtype: Any, seed: int) -> torch.Tensor:
    """Return small integers and powers of two, whose sums and products are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return 2 ** torch.randint(0, 3, (n,), generator=generator).to(torch.float64).to(dtype)


def through_the_host(world: World, *case: Any) -> Any:
    """`examine` where ranks share a GPU, so that all they send is copied to the host first."""
    with patch.object(gpus, "shares_gpu", lambda host, ranks: True):
        return examine(world, *case)


def transport_case(
    world: World,
    transport: Any,
    op: str,
    algorithm: str,
    dtype_name: str,
    reduction: Any,
    ranks: tuple[int, ...],
    n: int,
    own: bool,
    seed: int,
    splits: list[list[int]] | None = None,
) -> None:
    """Compare one collective with its definition; `own`: in a buffer from comm.buffer."""
    if world.rank not in ranks:
        return
    p, me, dtype = len(ranks), ranks.index(world.rank), DTYPES[dtype_name]
    comm = Comm(world, mesh(Strategy(dp=world.size)), over("shm"))

    def memory(given: torch.Tensor) -> torch.Tensor:
        return comm.buffer(given.numel(), dtype).copy_(given) if own else given.clone()

    combine = {
        "sum": lambda t: t.sum(0),
        "avg": lambda t: t.sum(0) / p,
        "min": lambda t: t.amin(0),
        "max": lambda t: t.amax(0),
        "product": lambda t: t.prod(0),
    }[reduction]
    parts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if op == "all_reduce":
        everyone = [_values(r, n, dtype, seed) for r in ranks]
        source = target = memory(everyone[me])
        wanted = combine(torch.stack(everyone).double())
    elif op == "reduce_scatter":
        everyone = [_values(r, p * n, dtype, seed) for r in ranks]
        source = memory(everyone[me])
        target = source[me * n : (me + 1) * n] if seed % 2 else memory(torch.zeros(n, dtype=dtype))
        wanted = combine(torch.stack(everyone).double())[me * n : (me + 1) * n]
    elif op == "all_gather":
        everyone = [_values(r, n, dtype, seed) for r in ranks]
        target = memory(torch.zeros(p * n, dtype=dtype))
        source = memory(everyone[me])
        if seed % 2:
            source = target[me * n : (me + 1) * n].copy_(source)
        wanted = torch.cat(everyone).double()
    else:
        sizes = splits or [[n] * p for _ in ranks]
        everyone = [_values(r, sum(sizes[i]), dtype, seed) for i, r in enumerate(ranks)]
        source, target = memory(everyone[me]), memory(torch.zeros(sum(row[me] for row in sizes), dtype=dtype))
        if splits:
            parts = tuple(sizes[me]), tuple(row[me] for row in sizes)
        wanted = torch.cat([t.split(sizes[i])[me] for i, t in enumerate(everyone)]).double()
    comm.start(Call(op, ranks, me, source, target, reduction, *parts), transport, algorithm).wait()
    assert torch.equal(target.double(), wanted.to(dtype).double()), (target, wanted)


def run_schedule(world: World, schedule: Schedule, grouped: bool, ahead: int | None = None) -> Any:
    """Run a schedule on a buffer of 100 (rank + 1) + index; return the buffer. `ahead`: bytes that may be staged."""
    buffer = torch.arange(schedule.size, dtype=torch.float64) + 100.0 * (world.rank + 1)
    with pytest.MonkeyPatch.context() as patch:
        if ahead is not None:
            patch.setattr("phalanx.runtime.comm.schedule_executor._STAGING_BYTES", ahead)
        return _run_schedule(world, schedule, grouped, buffer)


def _run_schedule(world: World, schedule: Schedule, grouped: bool, buffer: torch.Tensor) -> Any:
    executor = Executor(worlds.group(tuple(range(world.size))), grouped)
    long = None if grouped else 3  # elements: most messages go in parts, in the order in which they are needed
    executor.run(program(schedule, world.rank, long), lambda low, high: buffer[low:high], "sum", buffer)
    return buffer.numpy()


def many_at_once(world: World, seed: int, count: int) -> None:
    """Issue all-reduces over three transports and several groups in one order; wait in each rank's own order."""
    comm = Comm(world, mesh(Strategy(dp=world.size)), over("shm"))
    shared, own = random.Random(seed), random.Random(seed * 7 + world.rank)
    issued = []
    for i in range(count):
        ranks = shared.choice([(0, 1, 2, 3), (0, 1), (2, 3), (1, 2), (0, 2, 3)])
        transport: Any = shared.choice(["shm", "shm", "p2p", "native"])
        n = shared.choice([1, 100, 50_000])
        if world.rank not in ranks:
            continue
        buffer = comm.buffer(n, torch.float64) if i % 2 else torch.zeros(n, dtype=torch.float64)
        buffer.fill_(world.rank + 1 + i)
        call = Call("all_reduce", ranks, ranks.index(world.rank), buffer, buffer)
        issued.append((comm.start(call, transport, "ring"), buffer, sum(r + 1 + i for r in ranks)))
        if own.random() < 0.1:
            issued[own.randrange(len(issued))][0].wait()
    own.shuffle(issued)
    for handle, buffer, wanted in issued:
        handle.wait()
        assert bool((buffer == wanted).all()), (buffer, wanted)


def loopback_bytes(world: World, size: int) -> tuple[int, int]:
    """Return bytes over the loopback interface by a reduce-scatter of ours and of Gloo.

    Each is the least of three, because traffic of other programs is counted too.
    """
    comm = Comm(world, mesh(Strategy(dp=world.size)))
    source = torch.zeros(size // 4)
    ranks = tuple(range(world.size))
    call = Call("reduce_scatter", ranks, world.rank, source, source.new_empty(size // 4 // world.size))
    found: dict[str, list[int]] = {"p2p": [], "native": []}
    for transport in ("p2p", "native") * 3:
        comm.barrier()
        before = _loopback()
        comm.barrier()  # nobody sends before everybody has read the counter
        comm.start(call, transport, "ring").wait()  # type: ignore[arg-type]
        comm.barrier()
        found[transport].append(_loopback() - before)
    return min(found["p2p"]), min(found["native"])


def _loopback() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[0])


def used_again(world: World) -> None:
    comm = Comm(world, mesh(Strategy(dp=world.size)), over("shm"))

    def total(dtype: torch.dtype) -> float:
        tensor = comm.buffer(1 << 16, dtype).fill_(2**26)
        comm.all_reduce(tensor, "world", unit="test", phase="B").wait()
        return float(tensor[-1])

    assert [total(dtype) for dtype in (torch.float32, torch.int32, torch.float32)] == [2.0**27] * 3
    target = comm.buffer(64, torch.float32)
    for value in (1.0, 2.0, 3.0):
        source = comm.buffer(128, torch.float32) if value == 1.0 else torch.zeros(128)
        source.fill_(value)
        comm.reduce_scatter(target, source, "world", unit="test", phase="B").wait()
        assert target.tolist() == [2 * value] * 64
        del source


def uneven_choice(world: World) -> None:
    """Let one rank send little and the other much."""
    choices = (Choice("all_to_all", 2, 0, "native"), Choice("all_to_all", 2, 4096, "shm"))
    comm = Comm(world, mesh(Strategy(dp=world.size)), choices)
    sends, receives = ((5, 5), (5, 5000)) if world.rank == 0 else ((5000, 5), (5, 5))
    source, target = torch.ones(sum(sends)), torch.zeros(sum(receives))
    comm.all_to_all(target, source, "world", unit="test", phase="F", sends=sends, receives=receives).wait()
    assert bool((target == 1).all())


def broken_program(world: World, dtype: str = "") -> None:
    comm = Comm(world, mesh(Strategy(dp=world.size)), over("shm"))
    a, b = comm.buffer(8, torch.float32), comm.buffer(16, torch.float32)
    if dtype:
        other = comm.buffer(8, DTYPES[dtype]) if world.rank else a
        comm.all_reduce(other, "world", unit="test", phase="B").wait()
    elif world.rank:
        comm.all_gather(b, a, "world", unit="test", phase="B").wait()
    else:
        comm.all_reduce(a, "world", unit="test", phase="B").wait()


def die_in_shm(world: World, rank: int) -> None:
    comm = Comm(world, mesh(Strategy(dp=world.size)), over("shm"))
    buffer = comm.buffer(8, torch.float32)
    comm.all_reduce(buffer, "world", unit="gradients", phase="B").wait()
    if world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(buffer, "world", unit="gradients", phase="B").wait()


def without_arena(world: World, rank: int) -> str:
    """Leave one rank without an arena, so that all use torch's collectives; return this rank's messages."""
    from phalanx.runtime.comm import shm

    shm._arenas.clear()
    here = shm.attach()
    if world.rank == rank:
        here.arena, here.reason = None, "for a test"
    comm = Comm(world, mesh(Strategy(dp=world.size)), over("shm"))
    total = torch.tensor([float(world.rank)])
    with redirect_stderr(io.StringIO()) as said:
        comm.all_reduce(total, "world", unit="test", phase="B").wait()
    assert float(total) == sum(range(world.size))
    return said.getvalue()


def _step_times(comm: Comm) -> dict[str, Any]:
    times = comm.timeline.times()
    assert times is not None
    return {
        "compute_s": times.compute_s,
        "exposed_s": times.exposed_communication_s,
        "hidden_s": times.hidden_communication_s,
        "axes": {
            axis: {"active_s": t.active_s, "exposed_s": t.exposed_s, "overlap": t.overlap}
            for axis, t in times.axes.items()
        },
    }


def late_peer(world: World, transport: str, late_s: float, busy_s: float, op: str = "all_reduce") -> dict[str, Any]:
    """Take a step of one collective to which the last rank is late, while the others are busy before they wait."""
    comm = Comm(world, mesh(Strategy(dp=world.size)), over(transport))
    part, whole = torch.ones(100), torch.ones(100 * world.size)

    def issue() -> Any:
        if op == "all_reduce":
            return comm.all_reduce(whole, "world", unit="test", phase="B")
        if op == "all_gather":
            return comm.all_gather(whole, part, "world", unit="test", phase="B")
        if op == "reduce_scatter":
            return comm.reduce_scatter(part, whole, "world", unit="test", phase="B")
        return comm.all_to_all(whole.clone(), whole, "world", unit="test", phase="B")

    issue().wait()  # groups meet, threads start
    comm.barrier()
    comm.timeline.begin()
    last = world.rank == world.size - 1
    if last:
        time.sleep(late_s)
    handle = issue()
    if not last:
        time.sleep(busy_s)
    handle.wait()
    comm.timeline.end()
    comm.barrier()
    return _step_times(comm)


def completed_by_another(world: World, late_s: float) -> dict[str, Any]:
    """Complete an operation over dp_shard inside the wait for one over dp_replicate, over shared memory."""
    comm = Comm(world, mesh(Strategy(dp=4, zero=1, shard=2)), over("shm"))
    a, b = torch.ones(100), torch.ones(100)

    def issue() -> list[Any]:
        return [
            comm.all_reduce(t, axis, unit="test", phase="B") for t, axis in ((a, "dp_shard"), (b, "dp_replicate"))
        ]

    for handle in issue():
        handle.wait()
    comm.barrier()
    comm.timeline.begin()
    if world.rank % 2:
        time.sleep(late_s)
    first, second = issue()
    second.wait()
    time.sleep(late_s / 2)
    first.wait()
    comm.timeline.end()
    comm.barrier()
    return _step_times(comm)


def two_steps(world: World, late_s: float) -> list[dict[str, Any]]:
    """Issue a collective in one step and wait for it in the next, to which the other rank is late.

    After that comes a collective between steps, and an empty step.
    """
    comm = Comm(world, mesh(Strategy(dp=world.size)))
    tensor = torch.ones(100)
    comm.all_reduce(tensor, "world", unit="test", phase="B").wait()
    comm.barrier()
    found = []
    comm.timeline.begin()
    handle = None if world.rank else comm.all_reduce(tensor, "world", unit="test", phase="B")
    comm.timeline.end()
    found.append(_step_times(comm))
    time.sleep(late_s)
    comm.timeline.begin()
    if handle is None:
        time.sleep(late_s)
        handle = comm.all_reduce(tensor, "world", unit="test", phase="B")
    handle.wait()
    comm.timeline.end()
    found.append(_step_times(comm))
    comm.all_reduce(tensor, "world", unit="evaluation", phase="opt").wait()  # no part of a step
    comm.timeline.begin()
    comm.timeline.end()
    found.append(_step_times(comm))
    return found


def traced_step(
    world: World, spec: ModelSpec, job: Job, strategy: Strategy, transport: str
) -> tuple[timelines.RankTimeline, int]:
    """Return the timeline of the second of two steps, and how many collectives the recorder saw in it."""
    comm = Comm(world, mesh(strategy), over(transport))
    training = Training(spec, job, strategy, comm, seed=0)
    batches = [torch.zeros(strategy.micro_batch, job.seq + 1, dtype=torch.int64)] * strategy.accumulation(job)
    training.step(batches, lr=1e-3)
    comm.recorder.keeping = True
    comm.timeline.begin()
    with passes(training.model.units(), training.optimizer, comm.timeline, lambda: training.current):
        training.step(batches, lr=1e-3)
    comm.timeline.end()
    told = timelines.rank_timeline(world.rank, comm.mesh.coordinates(world.rank), comm.timeline.spans())
    gathered = comm.gather_objects(told, "world")
    assert [t.rank for t in gathered] == list(range(world.size))
    comm.barrier()
    return told, sum(e.kind == "collective" for e in comm.recorder.events)


def first_loss(
    world: World, spec: ModelSpec, job: Job, strategy: Strategy, weights: Path, tokens: torch.Tensor
) -> float:
    """Return the loss of the first step from stored weights, with each rank on its share of `tokens`."""
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, 0, weights=open_weights(weights, spec))
    mine = tokens.view(strategy.dp, -1, strategy.micro_batch, job.seq + 1)[comm.mesh.replica(world.rank)]
    loss = training.step(list(map(training.context.cut, mine)), lr=0.0).loss
    comm.barrier()
    return loss


def logits_of(world: World, folder: Path, strategy: Strategy, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of stored weights for this replica's share of some tokens."""
    comm, spec = Comm(world, mesh(strategy)), make_model({"config": str(folder / "config.json")}, folder)[0]
    job = Job(strategy.dp * strategy.micro_batch, tokens.shape[1])
    training = Training(spec, job, strategy, comm, 0, weights=open_weights(folder, spec))
    with torch.no_grad():
        own = training.model(tokens.view(strategy.dp, -1, tokens.shape[1])[comm.mesh.replica(world.rank)])
    parts = comm.gather_objects(own, "tp")
    comm.barrier()
    return torch.cat(parts, -1)[..., : spec.vocab]


def write_on(world: World, run: Path, prompt: str, how: Sampling) -> str:
    """Continue a prompt on tensor-parallel ranks."""
    strategy = Strategy(tp=world.size)
    comm = Comm(world, mesh(strategy))
    (text,) = answer(question(run, [prompt], how, strategy), comm)
    comm.barrier()
    return prompt + text


def fails_waiting(world: World, late: int) -> str:
    """Return a rank's message under torchrun when a collective has timed out because one rank did not arrive."""
    if world.rank == late:
        time.sleep(4.5)  # busy elsewhere, until all others have given up
        return ""
    try:
        with naming_rank(world):
            status.page(world.rank).arrive("all_reduce of a", "world", range(world.size))
            raise RuntimeError("Timed out waiting 10 ms for recv operation to complete")
    except RankFailure as failure:
        return str(failure)
    raise AssertionError("unreachable")


def evaluates_unevenly(world: World, spec: ModelSpec, job: Job, strategy: Strategy) -> float:
    """Return the loss per token on three sequences, of which the first replica has two and each other at most one."""
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, seed=5)
    sequences = torch.randint(spec.vocab, (3, 1, job.seq + 1), generator=torch.Generator().manual_seed(0))
    mine = sequences[comm.mesh.replica(world.rank) :: strategy.dp]
    loss, tokens = training.evaluate(list(map(training.context.cut, mine)), passes=-(-3 // strategy.dp))
    return loss / tokens


def gathers_with_secrets(world: World, secrets: list[str], folder: Path) -> str:
    """Return the ranks' numbers, or this rank's error. With two secrets the second rank sends what makes a folder."""
    foreign = world.rank == 1 and len(set(secrets)) > 1
    os.environ[SECRET_VARIABLE] = secrets[world.rank]
    try:
        everyone = Comm(world, mesh(Strategy(dp=world.size))).gather_objects(
            Touch(folder) if foreign else world.rank, "world"
        )
        return " ".join(map(str, everyone))
    except ForgedMessageError as error:
        return str(error)
    finally:
        del os.environ[SECRET_VARIABLE]


def one_cannot_write(world: World, folder: Path, which: int) -> str:
    """Return this rank's message when one rank cannot write; all ranks continue together."""
    comm = Comm(world, mesh(Strategy(dp=world.size)))
    saver, write = Saver(folder, comm, keep=1), store.write

    def fails(*args: Any) -> None:
        if world.rank == which:
            raise OSError(5, "gone")
        write(*args)

    store.write = fails
    try:
        saver.save(1, share([full_part("a", torch.zeros(9))], world.rank, world.size), {})
        saver.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        store.write = write
        comm.barrier()
    raise AssertionError("unreachable")
