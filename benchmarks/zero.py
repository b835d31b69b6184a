"""A benchmark rank: our ZeRO stages over Gloo and over shared memory, beside torch's own, on one model.

The model of the published baselines: GPT of 8 layers, d = 256, sequence 256, vocabulary 4,096, 2,048 tokens a step.
Rounds are interleaved, so that whatever else the machine does falls on all alike. One thread per rank.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx.measure.links import OPS
from phalanx.nn.decoder import Decoder
from phalanx.nn.initial import create, initialise
from phalanx.runtime import world as worlds
from phalanx.runtime.comm import Comm
from phalanx.runtime.launch import run_rank
from phalanx.runtime.world import ALONE
from phalanx.spec.choice import Choice
from phalanx.spec.job import Job, Optimizer
from phalanx.spec.jobfile import build
from phalanx.spec.mesh import mesh
from phalanx.spec.model import ModelSpec, complete
from phalanx.spec.plan import write_json
from phalanx.spec.strategy import Strategy
from phalanx.train.step import Training

ROUNDS, STEPS = 5, 2
SIZES = {"family": "gpt2", "vocab": 4096, "hidden": 256, "layers": 8, "heads": 8, "ffn": 1024, "max_seq": 256}
SEQ, BATCH = 256, 8

Step = Callable[[Tensor], object]


def _torch_step(spec: ModelSpec, job: Job, wrap: Callable[[Decoder], nn.Module]) -> Step:
    """Torch's own loop over the same model, as its tutorials write it."""
    model: Decoder = create(spec, torch.float32, torch.device("cpu"))
    initialise(model, spec, 0)
    wrapped = wrap(model)
    own = dict(wrapped.named_parameters())
    optimizer = torch.optim.AdamW(own.values(), lr=1e-3, fused=True)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = wrapped(batch[:, :-1], batch[:, 1:]) / (batch.shape[0] * SEQ)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), job.clip)
        optimizer.step()
        loss.item()

    return step


def _fsdp(reshard: bool) -> Callable[[Decoder], nn.Module]:
    def wrap(model: Decoder) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        return fully_shard(model, reshard_after_forward=reshard)

    return wrap


def _ours(spec: ModelSpec, job: Job, world: Any, strategy: Strategy, transport: Literal["native", "shm"]) -> Step:
    chosen = tuple(Choice(op, world.size, 0, transport) for op in OPS)
    training = Training(spec, job, strategy, Comm(world, mesh(strategy), chosen), 0)
    return lambda batch: training.step([batch], 1e-3)


def main() -> None:
    given = json.loads(sys.argv[1])
    world = worlds.external() or ALONE
    torch.set_num_threads(1)
    spec = build(ModelSpec, complete(SIZES), "model")

    def work() -> None:
        ranks, size = world.size, BATCH // world.size
        job = Job(BATCH, SEQ, optimizer=Optimizer())
        comm = Comm(world, mesh(Strategy(dp=ranks)))
        runs: dict[str, Step] = {
            "DistributedDataParallel": _torch_step(
                spec, job, lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True)
            ),
            "fully_shard, keep": _torch_step(spec, job, _fsdp(reshard=False)),
            "fully_shard, reshard": _torch_step(spec, job, _fsdp(reshard=True)),
        }
        for transport in ("native", "shm"):
            for zero in (0, 2, 3):
                strategy = Strategy(dp=ranks, zero=zero, micro_batch=size)  # type: ignore[arg-type]
                runs[f"zero={zero}, {transport}"] = _ours(spec, job, world, strategy, transport)  # type: ignore[arg-type]
        alone = Training(spec, Job(size, SEQ), Strategy(micro_batch=size), Comm(ALONE, mesh(Strategy())), 0)
        runs["one process"] = lambda batch: alone.step([batch], 1e-3)
        batch = torch.randint(spec.vocab, (size, SEQ + 1))
        found: dict[str, dict[str, list[float]]] = {n: {"tokens_per_s": [], "cpu_s_per_step": []} for n in runs}
        names = list(runs)
        for i in range(ROUNDS + 1):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                active = 1 if name == "one process" else ranks
                comm.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                if world.rank < active:
                    for _ in range(STEPS):
                        runs[name](batch)
                    seconds = time.perf_counter() - start
                used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
                comm.all_reduce(used, "world", unit="bench", phase="opt").wait()
                if world.rank == 0 and i:  # the first round warms up
                    found[name]["tokens_per_s"].append(STEPS * size * SEQ * active / seconds)
                    found[name]["cpu_s_per_step"].append(float(used) / STEPS)
        if world.rank == 0:
            write_json(Path(given["out"]), found)

    run_rank(world, 300, work)


if __name__ == "__main__":
    main()
