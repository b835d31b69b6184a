"""Microbenchmarks of one rank while its neighbours run the same: products, attention, memory, kernel launches.

These figures are for people: they show a machine's strengths. Plans are priced with rates fitted to entire units of
models (kernels.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from phalanx.measure.kernels import synchronize
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.spec.cluster.spec import Figure
from phalanx.spec.job import DType

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
            synchronize(device)
            start = time.perf_counter()
            action()
            synchronize(device)
            times.append(time.perf_counter() - start)
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
        yield (
            f"matrix product {m} x {n} x {k}",
            "FLOP/s",
            2.0 * m * n * k,
            partial(torch.mm, a, b, out=out),
        )
    # Attention.
    for shape in (_GPU_ATTENTION if on_gpu else _CPU_ATTENTION)[: 1 if few else None]:
        batch, heads, seq, head_dim = shape
        q, k_, v = (torch.randn(shape, device=device).to(kind) for _ in range(3))
        flops = 4.0 * batch * heads * seq * seq * head_dim
        yield (
            f"attention {batch} x {heads} heads x {seq} x {head_dim}",
            "FLOP/s",
            flops,
            partial(F.scaled_dot_product_attention, q, k_, v, is_causal=True),
        )
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
