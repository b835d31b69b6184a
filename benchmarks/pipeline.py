"""A benchmark rank: our pipeline executor compared with torch.distributed.pipelining on one model and schedule.

A llama of the published baselines' size (zero.py), 8 micro-batches of one sequence. Both sides take complete steps:
passes, one all-reduce of loss and norm, clipping, fused AdamW; torch is given every shape beforehand. First both must
agree on loss and gradients. Then rounds are interleaved, so that other load on the machine affects both alike. Last,
each program runs alone: to compare the idle time of our ranks with the price of the schedule for the measured passes,
and for the peak live bytes of either side. One thread per rank.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs

from benchmarks.interleaved import Step, rounds
from phalanx.nn import functional
from phalanx.nn.decoder import Decoder
from phalanx.nn.init import create, draw
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.recorder import Recorder
from phalanx.runtime.model_parallel.pipeline import Pipeline
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.runtime.tracing.instrument import Tracker
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.actions import Action, PipelineSchedule
from phalanx.schedule.pipeline.schedules import SCHEDULES
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec, StageSpec, parameters
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

ROUNDS, STEPS = 5, 2
WATCHED = 5
"""Number of steps in which idle time is measured."""
SIZES = {"family": "llama", "vocab": 4096, "hidden": 256, "layers": 8, "heads": 8, "ffn": 768, "max_seq": 256}
SEQ, MICRO_BATCHES = 256, 8
CASES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def spec_of() -> ModelSpec:
    return build(ModelSpec, complete(SIZES), "model")


def strategy_of(name: str, ranks: int) -> Strategy:
    virtual = SCHEDULES[name].chunks if SCHEDULES[name].takes_virtual else 1
    return Strategy(pp=ranks, schedule=name, virtual=virtual)


class Chunk(nn.Module):
    """Some units of our decoder, as a stage for torch's pipelining."""

    def __init__(self, spec: ModelSpec, units: tuple[str, ...]) -> None:
        super().__init__()
        held = StageSpec.of(spec, (units,))
        self.decoder: Decoder = create(held, torch.float32, torch.device("cpu"))
        self.first, self.last = "embed" in units, "head" in units
        own = dict(self.decoder.named_parameters())
        with torch.no_grad():
            for p in parameters(held):
                own[p.fqn].copy_(torch.from_numpy(draw(spec, p, 0, 0, p.numel)).view(p.shape))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens or the residual stream to the residual stream or the logits."""
        if self.first:
            return self.decoder(x)  # type: ignore[no-any-return]
        return self.decoder(x[..., 0], x=x)  # type: ignore[no-any-return]


class Ours:
    def __init__(self, name: str, world: World) -> None:
        strategy = strategy_of(name, world.size)
        self.comm = Comm(world, mesh(strategy))
        self.training = Training(spec_of(), Job(MICRO_BATCHES, SEQ), strategy, self.comm, 0)

    def step(self, batch: Tensor) -> float:
        return self.training.step(list(batch.split(1)), 1e-3).loss

    def gradients(self) -> dict[str, Tensor]:
        return dict(self.training.engine.gradients())


class Theirs:
    """The same step, written as in torch's tutorial and torchtitan."""

    def __init__(self, name: str, world: World) -> None:
        spec, strategy, self.job = spec_of(), strategy_of(name, world.size), Job(MICRO_BATCHES, SEQ)
        cut, rank_of = stages.chunks(spec, strategy), stages.rank_of(strategy)
        tokens = torch.empty(1, SEQ, dtype=torch.int64, device="meta")
        stream = torch.empty(1, SEQ, spec.hidden, device="meta", requires_grad=True)
        logits = torch.empty(1, SEQ, spec.vocab, device="meta", requires_grad=True)
        self.chunks = {i: Chunk(spec, cut[i]) for i, rank in enumerate(rank_of) if rank == world.rank}
        held = [
            PipelineStage(
                chunk,
                i,
                len(cut),
                torch.device("cpu"),
                input_args=tokens if chunk.first else stream,
                output_args=logits if chunk.last else stream,
            )
            for i, chunk in self.chunks.items()
        ]
        make: Callable[..., Any] = getattr(torchs, CASES[name])
        single = issubclass(make, torchs.PipelineScheduleSingle)  # type: ignore[arg-type]
        self.schedule = make(held[0] if single else held, MICRO_BATCHES, loss_fn=self._loss, scale_grads=False)
        self.parameters = [p for chunk in self.chunks.values() for p in chunk.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, weight_decay=0.1, fused=True)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        summed = functional.cross_entropy(logits.flatten(0, 1), targets.reshape(-1))
        return summed / (self.job.global_batch * SEQ)

    def step(self, batch: Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        inputs = [batch[:, :-1]] if any(c.first for c in self.chunks.values()) else []
        targets = batch[:, 1:] if any(c.last for c in self.chunks.values()) else None
        losses: list[Tensor] = []
        self.schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        square = torch.stack(torch._foreach_norm(gradients)).square().sum()
        sums = torch.stack([sum(losses, torch.zeros(())).detach(), square])
        dist.all_reduce(sums)
        loss, square_there = sums.tolist()
        torch._foreach_mul_(gradients, min(1.0, self.job.clip / (square_there**0.5 + 1e-6)))
        self.optimizer.step()
        return float(loss)

    def gradients(self) -> dict[str, Tensor]:
        return {
            n: p.grad for c in self.chunks.values() for n, p in c.decoder.named_parameters() if p.grad is not None
        }


Program = Ours | Theirs


def agree(ours: Program, theirs: Program, batch: Tensor) -> None:
    """Require equal losses and gradients of one step of both from the same weights.

    Gradients may differ by one common clipping factor, because torch's norm in fp32 has fewer correct digits.
    """
    losses = ours.step(batch), theirs.step(batch)
    assert abs(losses[0] - losses[1]) < 1e-5 * losses[0], losses
    own, others = ours.gradients(), theirs.gradients()
    assert own.keys() == others.keys()
    factors = [float(g.double().norm() / others[name].double().norm()) for name, g in own.items()]
    assert all(abs(f - 1) < 1e-3 and abs(f / factors[0] - 1) < 1e-5 for f in factors), factors
    for g, name, factor in zip(own.values(), own, factors, strict=True):
        off = (g - factor * others[name]).double().norm() / g.double().norm()
        assert off < 1e-5, (name, float(off))


class Watched:
    """Records when each pass of our executor runs, and how long it waits for messages."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.spans: list[tuple[Action, float, float, float]] = []  # action, start, end, seconds waited
        self._waited = 0.0
        for name in ("_forward", "_backward", "_weights"):
            setattr(pipeline, name, self._pass(getattr(pipeline, name)))
        pipeline._arrived = self._wait(pipeline._arrived)  # type: ignore[method-assign]

    def _pass(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(action: Action, *args: Any, **kwargs: Any) -> Any:
            start, self._waited = time.perf_counter(), 0.0
            out = work(action, *args, **kwargs)
            self.spans.append((action, start, time.perf_counter(), self._waited))
            return out

        return watched

    def _wait(self, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(*args: Any) -> Tensor:
            start = time.perf_counter()
            out = work(*args)
            self._waited += time.perf_counter() - start
            return out

        return watched


Spans = list[tuple[Action, float, float, float]]
"""The passes of a rank: action, start, end, seconds waited for its message."""


@dataclass(frozen=True)
class Idle:
    """The idle share of the ranks in a step, and what explains it.

    `expected`: the schedule with the median seconds of its passes; `uneven`: with the seconds that each pass took in
    this step; `messages`: with the median time from the end of a pass to the start of one that waits for its message;
    `measured`; `between`: the share of the ranks' time that is neither a pass nor a wait for a message: sends and
    receives are issued there, and a send is awaited by the next of its kind."""

    expected: float
    uneven: float
    messages: float
    measured: float
    between: float


def idle(ours: Ours, batch: Tensor) -> Idle:
    """Return the idle share of our ranks, the median over the watched steps, with its causes."""
    pipeline, world = ours.training.pipeline, ours.comm.world
    watched = Watched(pipeline)
    steps: list[list[Spans]] = []
    for _ in range(WATCHED):
        watched.spans.clear()
        ours.comm.barrier()
        ours.step(batch)
        steps.append([list(own) for own in ours.comm.gather_objects(watched.spans, "world")])
    took: dict[tuple[str, int], list[float]] = {}
    late: list[float] = []
    for ranks in steps:
        ends = {action: stop for own in ranks for action, _, stop, _ in own}
        for own in ranks:
            for action, start, stop, waited in own:
                took.setdefault(action[:2], []).append(stop - start - waited)
                source = _source(action, pipeline.schedule)
                if source is not None and start < ends[source] <= start + waited:
                    late.append(start + waited - ends[source])
    typical = {key: median(times) for key, times in took.items()}
    transfer = median(late) if late else 0.0
    shares: list[Idle] = []
    for ranks in steps:
        each = {action: stop - start - waited for own in ranks for action, start, stop, waited in own}
        makespan = max(own[-1][2] for own in ranks) - min(own[0][1] for own in ranks)
        expected = _idle_share(pipeline.schedule, {action: typical[action[:2]] for action in each}, 0.0)
        uneven = _idle_share(pipeline.schedule, each, 0.0)
        messages = _idle_share(pipeline.schedule, each, transfer)
        measured = 1 - sum(each.values()) / (world.size * makespan)
        gaps = sum(after[1] - before[2] for own in ranks for before, after in pairwise(own))
        shares.append(Idle(expected, uneven, messages, measured, gaps / (world.size * makespan)))
    return Idle(*(median(getattr(share, f.name) for share in shares) for f in fields(Idle)))


def _source(action: Action, s: PipelineSchedule) -> Action | None:
    """Return the pass of another rank whose message a pass needs."""
    kind, chunk, m = action
    before = chunk - 1 if kind == "F" else chunk + 1
    if kind == "W" or not 0 <= before < s.chunks or s.rank_of[before] == s.rank_of[chunk]:
        return None
    back = "I" if any(a == ("I", before, m) for a in s.actions[s.rank_of[before]]) else "B"
    return Action("F" if kind == "F" else back, before, m)  # type: ignore[arg-type]


def _idle_share(s: PipelineSchedule, seconds: Mapping[Action, float], transfer: float) -> float:
    """Return the idle share of a schedule whose every pass takes its own `seconds`."""
    ends: dict[Action, float] = {}
    at, now = [0] * s.ranks, [0.0] * s.ranks
    passes = [[a for a in actions if a in seconds] for actions in s.actions]
    while any(at[r] < len(passes[r]) for r in range(s.ranks)):
        for r in range(s.ranks):
            while at[r] < len(passes[r]):
                action = passes[r][at[r]]
                source = _source(action, s)
                if source is not None and source not in ends:
                    break
                begin = now[r] if source is None else max(now[r], ends[source] + transfer)
                ends[action] = now[r] = begin + seconds[action]
                at[r] += 1
    return 1 - sum(seconds.values()) / (s.ranks * max(now))


def peak(program: Program, batch: Tensor) -> int:
    """Return the peak live bytes of the fullest rank in a warm step of a program that is alone in memory."""
    program.step(batch)
    gc.collect()
    with Tracker(Recorder()) as tracker:
        program.step(batch)
    most = torch.tensor(tracker.peak)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases: list[str] = arguments.get("cases") or list(CASES)

    def work() -> None:
        comm = Comm(world, mesh(Strategy(dp=world.size)))
        batch = torch.randint(SIZES["vocab"], (MICRO_BATCHES, SEQ + 1))  # type: ignore[call-overload]
        runs: dict[str, tuple[Step, int]] = {}
        for name in cases:
            ours, theirs = Ours(name, world), Theirs(name, world)
            agree(ours, theirs, batch)
            runs[f"{name}, ours"], runs[f"{name}, torch"] = (ours.step, world.size), (theirs.step, world.size)
        results: dict[str, Any] = dict(rounds(runs, batch, comm, ROUNDS, STEPS))
        for figures in results.values():  # all ranks of a step see the same sequences
            figures["tokens_per_s"] = [n / world.size for n in figures["tokens_per_s"]]
        runs.clear()
        del ours, theirs
        for name in cases:
            gc.collect()
            program = Ours(name, world)
            most = peak(program, batch)
            results[f"{name}, idle"] = asdict(idle(program, batch))
            del program
            gc.collect()
            results[f"{name}, peak"] = most, peak(Theirs(name, world), batch)
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 300, work)


if __name__ == "__main__":
    main()
