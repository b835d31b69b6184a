"""α and β of collectives between the ranks of this machine, as the run will use them."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch

from phalanx.measure.fit import nonnegative_fit
from phalanx.runtime.comm import Comm
from phalanx.spec.cluster import CollectiveFit

_SIZES = tuple(2**k for k in range(10, 25, 2))  # 1 KiB .. 16 MiB
_ROUNDS = 6


def measure_all_reduce(comm: Comm, axis: str) -> CollectiveFit:
    """Time all-reduces along an axis and fit α + β n. Inputs are rewritten each round, as a step does."""
    buffers = [comm.buffer(size // 4, torch.float32) for size in _SIZES]
    times: list[list[float]] = [[] for _ in _SIZES]
    for _ in range(_ROUNDS):
        for buffer, seen in zip(buffers, times, strict=True):
            buffer.fill_(1.0)
            comm.barrier()
            start = time.perf_counter()
            comm.all_reduce(buffer, axis, unit="measure", phase="B").wait()
            if buffer.device.type == "cuda":
                torch.cuda.synchronize(buffer.device)
            seen.append(time.perf_counter() - start)
    seconds = np.array([median(seen[1:]) for seen in times])
    sizes = np.array(_SIZES, dtype=np.float64)
    features = np.stack([np.ones_like(sizes), sizes], axis=1)
    alpha, beta = nonnegative_fit(features, seconds)
    residual = float(np.median(np.abs(features @ [alpha, beta] / seconds - 1)))
    return CollectiveFit("all_reduce", comm.size(axis), float(alpha), float(beta), residual, "native")
