"""A benchmark rank: our tensor and sequence parallelism, over Gloo and over shared memory, compared with DTensor's.

The model is that of the published baselines (zero.py) with an untied head, as `parallelize_module` splits it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm

from benchmarks.interleaved import Step, rounds
from benchmarks.programs import initialise, our_step
from benchmarks.zero import BATCH, SEQ, SIZES
from phalanx.nn.init import create
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

ROUNDS, STEPS = 5, 2


def dtensor_plan(spec: ModelSpec, sp: bool) -> dict[str, ParallelStyle]:
    """Return how each module is split, as in torch's tutorial on tensor parallelism.

    With sequence parallelism as in torchtitan: norms and the residual stream are split over the sequence.
    """
    stream = Shard(1) if sp else Replicate()
    plan: dict[str, ParallelStyle] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan["mlp.up"] = ColwiseParallel()
    plan |= {name: RowwiseParallel(output_layouts=stream) for name in ("attention.o", "mlp.down")}
    if sp:
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        for name, others in (("attention", (None,) * 3), ("mlp", (None,))):
            plan[name] = PrepareModuleInput(
                input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
            )
    whole = {f"blocks.{i}.{name}": style for i in range(spec.layers) for name, style in plan.items()}
    whole["embed.token"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    whole["head.linear"] = ColwiseParallel(input_layouts=stream, use_local_output=False)
    return whole | ({"head.norm": SequenceParallel()} if sp else {})


def dtensor_step(spec: ModelSpec, job: Job, ranks: int, sp: bool = False) -> Step:
    """Return the same step as in torch's tutorial on tensor parallelism: fused AdamW, clipping, parallel loss."""
    model = create(spec, torch.float32, torch.device("cpu"))
    initialise(model, spec, 0)
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), dtensor_plan(spec, sp))
    first, n = (dist.get_rank() * job.seq // ranks, job.seq // ranks) if sp else (0, job.seq)  # this rank's positions
    split: list[Tensor] = [p for p in model.parameters() if isinstance(p, DTensor)]
    rest: list[Tensor] = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": split}, {"params": rest}], lr=1e-3, fused=True)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        tokens, targets = batch[:, :-1], batch[:, 1:]
        x = model.embed.token(tokens) + model.embed.position.weight[first : first + n]
        for block in model.blocks.values():
            x = block(x)
        logits = model.head.linear(model.head.norm(x))  # (batch, seq, vocab), split over the vocabulary
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1)) * targets.numel()
            (loss / (job.global_batch * job.seq)).backward()
        if sp:  # each rank has computed its own positions
            dist.all_reduce(model.embed.position.weight.grad)
        norms = [get_total_norm([p.grad for p in own if p.grad is not None]) for own in (split, rest)]
        squares = [(n.full_tensor() if isinstance(n, DTensor) else n).square() for n in norms]
        factor = (job.clip / (sum(squares).sqrt() + 1e-6)).clamp(max=1.0)  # type: ignore[union-attr]
        for p in (*split, *rest):
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            assert local is not None
            local.mul_(factor)
        optimizer.step()
        loss.full_tensor().item()  # type: ignore[attr-defined]  # a DTensor

    return step


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)
    spec = build(ModelSpec, complete(SIZES | {"tied": False}), "model")

    def work() -> None:
        ranks, job = world.size, Job(BATCH, SEQ)
        comm = Comm(world, mesh(Strategy(dp=ranks)))
        strategy = Strategy(tp=ranks, micro_batch=BATCH)
        runs: dict[str, tuple[Step, int]] = {
            "parallelize_module": (dtensor_step(spec, job, ranks), ranks),
            "parallelize_module, sp": (dtensor_step(spec, job, ranks, sp=True), ranks),
        }
        for name, of in (("tp", strategy), ("sp", replace(strategy, sp=True))):
            runs[f"{name}, native"] = (our_step(spec, job, world, of, "native"), ranks)
            runs[f"{name}, shm"] = (our_step(spec, job, world, of, "shm"), ranks)
        alone = Training(spec, job, Strategy(micro_batch=BATCH), Comm(ALONE, mesh(Strategy())), 0)
        runs["one process"] = (lambda batch: alone.step([batch], 1e-3), 1)
        tokens = torch.randint(spec.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
        results = rounds(runs, tokens, comm, ROUNDS, STEPS)
        for name, (_, used) in runs.items():  # all ranks of a step see the same sequences
            if world.rank == 0:
                results[name]["tokens_per_s"] = [n / used for n in results[name]["tokens_per_s"]]
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 300, work)


if __name__ == "__main__":
    main()
