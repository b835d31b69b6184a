"""A benchmark rank: tensor parallelism of ours, over Gloo and over shared memory, beside DTensor's.

The model of the published baselines (zero.py) with a head of its own, as `parallelize_module` splits it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm

from benchmarks.interleaved import Step, rounds
from benchmarks.programs import initialise, our_step
from benchmarks.zero import BATCH, SEQ, SIZES
from phalanx.nn.initial import create
from phalanx.runtime import world as worlds
from phalanx.runtime.comm import Comm
from phalanx.runtime.launch import run_rank
from phalanx.runtime.world import ALONE
from phalanx.spec.families import complete
from phalanx.spec.job import Job
from phalanx.spec.jobfile import build
from phalanx.spec.mesh import mesh
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import write_json
from phalanx.spec.strategy import Strategy
from phalanx.train.step import Training

ROUNDS, STEPS = 5, 2


def dtensor_step(spec: ModelSpec, job: Job, ranks: int) -> Step:
    """The same step as torch's tutorial on tensor parallelism writes it: fused AdamW, clipped, loss in parallel."""
    model = create(spec, torch.float32, torch.device("cpu"))
    initialise(model, spec, 0)
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
    plan |= {name: RowwiseParallel() for name in ("attention.o", "mlp.down")}
    whole = {f"blocks.{i}.{name}": style for i in range(spec.layers) for name, style in plan.items()}
    whole["embed.token"] = RowwiseParallel(input_layouts=Replicate())
    whole["head.linear"] = ColwiseParallel(use_local_output=False)
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), whole)
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    rest = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": split}, {"params": rest}], lr=1e-3, fused=True)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        tokens, targets = batch[:, :-1], batch[:, 1:]
        x = model.embed.token(tokens) + model.embed.position.weight[: tokens.shape[1]]
        for block in model.blocks:
            x = block(x)
        logits = model.head.linear(model.head.norm(x))
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1)) * targets.numel()
            (loss / (job.global_batch * job.seq)).backward()
        norms = [get_total_norm([p.grad for p in own if p.grad is not None]) for own in (split, rest)]
        squares = [(n.full_tensor() if isinstance(n, DTensor) else n).square() for n in norms]
        factor = (job.clip / (sum(squares).sqrt() + 1e-6)).clamp(max=1.0)  # type: ignore[union-attr]
        for p in (*split, *rest):
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            assert local is not None
            local.mul_(factor)
        optimizer.step()
        loss.full_tensor().item()

    return step


def main() -> None:
    given = json.loads(sys.argv[1])
    world = worlds.external() or ALONE
    torch.set_num_threads(1)
    spec = build(ModelSpec, complete(SIZES | {"tied": False}), "model")

    def work() -> None:
        ranks, job = world.size, Job(BATCH, SEQ)
        comm = Comm(world, mesh(Strategy(dp=ranks)))
        strategy = Strategy(tp=ranks, micro_batch=BATCH)
        runs: dict[str, tuple[Step, int]] = {
            "parallelize_module": (dtensor_step(spec, job, ranks), ranks),
            "tp, native": (our_step(spec, job, world, strategy, "native"), ranks),
            "tp, shm": (our_step(spec, job, world, strategy, "shm"), ranks),
        }
        alone = Training(spec, job, Strategy(micro_batch=BATCH), Comm(ALONE, mesh(Strategy())), 0)
        runs["one process"] = (lambda batch: alone.step([batch], 1e-3), 1)
        tokens = torch.randint(spec.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
        found = rounds(runs, tokens, comm, ROUNDS, STEPS)
        for name, (_, used) in runs.items():  # all ranks of a step see the same sequences
            if world.rank == 0:
                found[name]["tokens_per_s"] = [n / used for n in found[name]["tokens_per_s"]]
        if world.rank == 0:
            write_json(Path(given["out"]), found)

    run_rank(world, 300, work)


if __name__ == "__main__":
    main()
