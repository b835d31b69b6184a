"""Time training programs in interleaved rounds, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.measure.steal_time import stolen_s, stolen_share
from phalanx.runtime.comm.communicator import Comm

Step = Callable[[Tensor], object]
Figures = dict[str, dict[str, list[float]]]


def rounds(runs: dict[str, tuple[Step, int]], batch: Tensor, comm: Comm, count: int, steps: int) -> Figures:
    """Run `count` rounds of `steps` steps of each program, after one warm-up round.

    A program is (step, ranks): a function of this rank's sequences, `batch` (sequences, seq + 1), and the number of
    ranks it runs on, the first ones. Returns figures by program and round, on rank 0 alone: tokens_per_s over all its
    ranks, cpu_s_per_step summed over them, and stolen, the share of the machine's processors that others had
    meanwhile (`phalanx.measure.steal_time`).
    """
    figures: Figures = {name: {"tokens_per_s": [], "cpu_s_per_step": [], "stolen": []} for name in runs}
    names = list(runs)
    for i in range(count + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            step, ranks = runs[name]
            comm.barrier()
            start, cpu, stolen = time.perf_counter(), time.process_time(), stolen_s()
            if comm.world.rank < ranks:
                for _ in range(steps):
                    step(batch)
                seconds = time.perf_counter() - start
            used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
            comm.all_reduce(used, "world", unit="bench", phase="opt").wait()
            if comm.world.rank == 0 and i:
                tokens = steps * ranks * batch.shape[0] * (batch.shape[1] - 1)
                figures[name]["tokens_per_s"].append(tokens / seconds)
                figures[name]["cpu_s_per_step"].append(float(used) / steps)
                figures[name]["stolen"].append(stolen_share(stolen_s() - stolen, seconds))
    return figures
