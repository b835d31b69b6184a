"""What compressing gradients costs on this machine: the compressors that train uses, timed on gradients that nobody
else reduces.

A message's way is measured with the collectives; this is the work beside it. All ranks of a host do it at once. A
price is seconds of each byte that cost/compression.py counts, so it means there just what it was measured to mean.
"""

from __future__ import annotations

import time
from statistics import mean

import torch

from phalanx.cost.compute import compression
from phalanx.measure.kernels import synchronize
from phalanx.measure.steal_time import Rounds, stolen_s, stolen_share
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.data_parallel.bucket_buffers import Flat
from phalanx.runtime.data_parallel.compression import compressor
from phalanx.schedule.gradients.buckets import buckets
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

KINDS = ("fp16", "bf16", "int8", "int4", "topk:0.01", "randk:0.01", "threshold:1e-9", "powersgd:4")
"""What is timed; of threshold one that all gradients are above, for its bytes too are priced at their most."""
_SIZES = {"family": "llama", "hidden": 256, "heads": 8, "layers": 4, "ffn": 512, "vocab": 4096, "max_seq": 64}
_SPREAD = 0.01  # of the gradients
_ROUNDS = 5


def measure_coding(dtype: DType, comm: Comm) -> dict[str, float]:
    """Seconds per byte counted, by the name of the compressor; of ranks that reduce all their gradients together."""
    spec, ranks = ModelSpec(**complete(_SIZES)), comm.world.size
    job = Job(global_batch=ranks, seq=32, precision=Precision(compute=dtype))
    kind = job.precision.accumulate_dtype
    alone = Comm(comm.world, comm.mesh, null=True)
    found = {}
    for text in KINDS:
        s = Strategy(dp=ranks, compression=text)
        assert s.compressor is not None
        cut = buckets(spec, job, s)
        flats = [Flat(b, s, 0) for b in cut]
        by = compressor(s.compressor, s, flats, alone, DTYPES[kind])
        gradients = [torch.empty(b.padded, dtype=DTYPES[kind], device=comm.world.device) for b in flats]
        timed = Rounds()
        for i in range(_ROUNDS):
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
                timed += Rounds((spent,), (stolen_share(stolen_s() - stolen, spent),))
        # The mean: a step that waits for its slowest rank has it all.
        seconds = mean(timed.quiet)
        work = compression.work(s.compressor, cut, s, DTYPE_BYTES[kind])
        found[s.compressor.name] = seconds / float(work.traffic_bytes)
    return found
