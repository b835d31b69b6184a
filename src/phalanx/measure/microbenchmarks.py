"""Microbenchmarks of one rank while its neighbours run the same: products, attention, memory, kernel launches.

These figures are for people: they show a machine's strengths. Plans are priced with rates fitted to entire units of
models (kernels.py).

Gradient compression is timed with the compressors of training but without communication, which is measured with the
collectives; this is the remaining computation, by all ranks of a host at once. A price is in seconds per byte as
counted by cost/compute/compression.py, so prediction and measurement agree on its meaning.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F

from phalanx.cost.compute import compression
from phalanx.measure.kernels import synchronize, time_action
from phalanx.measure.steal_time import TimedRounds, stolen_s, stolen_share
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression import compressor
from phalanx.runtime.data_parallel.compression.over import reduction_axes
from phalanx.schedule.gradients.buckets import buckets
from phalanx.spec.cluster.spec import Figure
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.compressors import COMPRESSORS, example
from phalanx.spec.strategy.spec import Strategy

_ROUNDS = 9
_CPU_PRODUCTS = ((64, 64, 64), (256, 256, 256), (1024, 256, 256), (1024, 1024, 256), (1024, 1024, 1024))
_GPU_PRODUCTS = ((256, 256, 256), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 1024, 4096), (16384, 4096, 1024))
_CPU_ATTENTION = ((4, 4, 128, 32), (1, 8, 512, 64))  # batch, heads, seq, head_dim
_GPU_ATTENTION = ((8, 16, 1024, 64), (2, 32, 4096, 128), (1, 32, 8192, 128))
_COPIED = {"cpu": 2**26, "gpu": 2**30}  # bytes, beyond any cache


def measure_figures(dtype: DType, device: torch.device, barrier: Callable[[], None]) -> list[Figure]:
    """Time every shape `_ROUNDS` times after one to warm up; the best round is the figure's value.

    `barrier` starts each round together with the other ranks.
    """
    figures: list[Figure] = []
    for name, unit, amount, action in _actions(dtype, device):
        times: list[float] = []
        for _ in range(_ROUNDS + 1):
            barrier()
            times.append(time_action(action, device))
        seconds = np.array(times[1:])
        values = sorted((amount / s for s in seconds) if amount else seconds.tolist())
        best = values[-1] if amount else values[0]
        low, high = np.percentile(values, [5, 95])
        figures.append(Figure(name, float(best), unit, float(low), float(high)))
    return figures


def _actions(dtype: DType, device: torch.device) -> Iterator[tuple[str, str, float, Callable[[], object]]]:
    """Yield (name, unit, amount, action) of each figure.

    `amount` is the work of one action in unit times seconds; if it is 0, the seconds themselves are the figure.
    """
    on_gpu, kind = device.type == "cuda", DTYPES[dtype]
    few = dtype == "float16" and not on_gpu  # CPUs without fp16 instructions have a hundredth of the speed
    # Matrix products.
    for m, n, k in (_GPU_PRODUCTS if on_gpu else _CPU_PRODUCTS)[: 2 if few else None]:
        a, b = (torch.randn(shape, device=device).to(kind) for shape in ((m, k), (k, n)))
        out = torch.empty(m, n, device=device, dtype=kind)
        yield f"matrix product {m} x {n} x {k}", "FLOP/s", 2.0 * m * n * k, partial(torch.mm, a, b, out=out)
    # Attention.
    for shape in (_GPU_ATTENTION if on_gpu else _CPU_ATTENTION)[: 1 if few else None]:
        batch, heads, seq, head_dim = shape
        q, k_, v = (torch.randn(shape, device=device).to(kind) for _ in range(3))
        flops = 4.0 * batch * heads * seq * seq * head_dim
        attend = partial(F.scaled_dot_product_attention, q, k_, v, is_causal=True)
        yield f"attention {batch} x {heads} heads x {seq} x {head_dim}", "FLOP/s", flops, attend
    # Memory bandwidth.
    copied = _COPIED["gpu" if on_gpu else "cpu"]
    source = torch.ones(copied // 4, device=device)
    target = torch.zeros_like(source)
    yield "memory, read and written", "B/s", 2.0 * copied, lambda: target.copy_(source)
    # Kernel launches.
    one = torch.ones(1, device=device)

    def launches() -> None:
        for _ in range(100):
            one.add_(1)

    yield "100 launches", "s", 0.0, launches


_SIZES = {"family": "llama", "hidden": 256, "heads": 8, "layers": 4, "ffn": 512, "vocab": 4096, "max_seq": 64}
_QUICK_SIZES = _SIZES | {"layers": 2, "vocab": 1024}  # 1.8 M of 4.7 M gradients
_SPREAD = 0.01  # standard deviation of the gradients
_COMPRESSIONS = 5


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
        by = compressor(s.compressor, reduction_axes(s, alone.mesh), flats, alone, DTYPES[kind])
        gradients = [torch.empty(b.padded, dtype=DTYPES[kind], device=comm.world.device) for b in flats]
        timed = TimedRounds()
        for i in range(2 if quick else _COMPRESSIONS):
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
