"""A benchmark rank: peak live tensor bytes in a warm step of one program, alone in its process.

The model is that of benchmarks/zero.py. Tensors are tracked as in an instrumented step, over two steps: the first
finds what existed before, the second counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.interleaved import Step
from benchmarks.programs import ddp, fsdp, our_step, torch_step
from benchmarks.zero import BATCH, SEQ, SIZES
from phalanx.runtime.comm.recorder import Recorder
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.runtime.tracing.instrument import Tracker
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

WARM = 2
PAIRS = (
    ("zero=0", "DistributedDataParallel"),
    ("zero=2", "fully_shard, keep"),
    ("zero=3", "fully_shard, reshard"),
)


class Fullest(Tracker):
    """Track storages that fully_shard frees and fills in place, by reading their sizes after every operation."""

    def __init__(self) -> None:
        super().__init__(Recorder())
        self.fullest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        storages = [known() for known in list(self._known.values())]
        self.fullest = max(self.fullest, sum(storage.nbytes() for storage in storages if storage is not None))
        return out


def _program(name: str, world: World) -> Step:
    spec = build(ModelSpec, complete(SIZES), "model")
    job = Job(BATCH, SEQ)
    wraps = {
        "DistributedDataParallel": ddp,
        "fully_shard, keep": fsdp(reshard=False),
        "fully_shard, reshard": fsdp(reshard=True),
    }
    if name in wraps:
        return torch_step(spec, job, wraps[name])
    stage, transport = name.removeprefix("zero=").split(", ")
    strategy = Strategy(dp=world.size, zero=int(stage), micro_batch=BATCH // world.size)  # type: ignore[arg-type]
    return our_step(spec, job, world, strategy, transport)  # type: ignore[arg-type]


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)

    def work() -> None:
        step = _program(arguments["program"], world)
        batch = torch.randint(SIZES["vocab"], (BATCH // world.size, SEQ + 1))  # type: ignore[call-overload]
        for _ in range(WARM):
            step(batch)
        with Fullest() as tracker:
            step(batch)
            tracker.fullest = 0
            step(batch)
        most = torch.tensor(tracker.fullest)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        if world.rank == 0:
            write_json(Path(arguments["out"]), int(most))

    run_rank(world, 120, work)


if __name__ == "__main__":
    main()
