"""Timing of gradient compression on this machine, with the compressors of training but without communication.
Communication is measured with the collectives; this is the remaining computation, by all ranks of a host at once. A
price is in seconds per byte as counted by cost/compute/compression.py, so prediction and measurement agree on its
meaning.
"""

from __future__ import annotations

import time
from statistics import mean

import torch

from phalanx.cost.compute import compression
from phalanx.measure.kernels import synchronize
from phalanx.measure.steal_time import TimedRounds, stolen_s, stolen_share
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression import compressor
from phalanx.schedule.gradients.buckets import buckets
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.compressors import COMPRESSORS, example
from phalanx.spec.strategy.spec import Strategy

_SIZES = {"family": "llama", "hidden": 256, "heads": 8, "layers": 4, "ffn": 512, "vocab": 4096, "max_seq": 64}
_QUICK_SIZES = _SIZES | {"layers": 2, "vocab": 1024}  # 1.8 M of 4.7 M gradients
_SPREAD = 0.01  # standard deviation of the gradients
_ROUNDS = 5


def measure_coding(dtype: DType, comm: Comm, quick: bool = False) -> dict[str, float]:
    """Return seconds per counted byte by compressor, when all ranks reduce all their gradients together. `quick`:
    with fewer gradients, in fewer rounds."""
    spec, ranks = ModelSpec(**complete(_QUICK_SIZES if quick else _SIZES)), comm.world.size
    job = Job(global_batch=ranks, seq=32, precision=Precision(compute=dtype))
    kind = job.precision.accumulate_dtype
    alone = Comm(comm.world, comm.mesh, null=True)
    prices: dict[str, float] = {}
    for name in COMPRESSORS:
        s = Strategy(dp=ranks, compression=example(name, measured=True))
        assert s.compressor is not None
        cut = buckets(spec, job, s)
        flats = [FlatBucket(b, s, 0) for b in cut]
        by = compressor(s.compressor, s, flats, alone, DTYPES[kind])
        gradients = [torch.empty(b.padded, dtype=DTYPES[kind], device=comm.world.device) for b in flats]
        timed = TimedRounds()
        for i in range(2 if quick else _ROUNDS):
            for x in gradients:
                x.normal_(std=_SPREAD)
            comm.barrier()
            synchronize(comm.world.device)
            start, stolen = time.perf_counter(), stolen_s()
            for b, x in zip(flats, gradients, strict=True):
                b.sent = x
                for under_way in by.reduce(b, None):
                    under_way.wait()
            synchronize(comm.world.device)
            spent = time.perf_counter() - start
            if i:  # the first round warms up
                timed += TimedRounds((spent,), (stolen_share(stolen_s() - stolen, spent),))
        # The mean, not the median: a step waits for its slowest rank, outliers included.
        seconds = mean(timed.quiet)
        work = compression.work(s.compressor, cut, s, DTYPE_BYTES[kind])
        prices[s.compressor.name] = seconds / float(work.traffic_bytes)
    return prices
