"""Kernel rates of this machine: real units of small decoders, timed forward and backward, then fitted.

Each point is (work, seconds) of one unit. The work is counted by cost/compute/unit_work.py, so prediction and fit
agree on the meaning of a rate. Rounds are interleaved over the points, and as many ranks compute at once as in a run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import RankPass, Work
from phalanx.measure.fit import nonnegative_fit
from phalanx.nn.decoder import Decoder, TokenFacts
from phalanx.nn.init import create
from phalanx.nn.optimizers import AdamW
from phalanx.runtime.autograd import narrow_product
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.data_parallel.bucket_buffers import write_gradient
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.schedule.gradients.buckets import gradient_buckets
from phalanx.schedule.layers.head import sliced
from phalanx.spec.cluster.spec import MEASURED_PRODUCT, CollectiveFit, Rates
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import MULTIPLIED
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.spec import Strategy

Shape = tuple[int, int, int, int, int]  # hidden, heads, kv_heads, ffn, vocab
Batch = tuple[int, int]  # sequences, seq


@dataclass(frozen=True)
class _Sizes:
    """Sizes to time: the units of a ladder of shapes, full passes of one shape, a product of square matrices."""

    ladder: tuple[tuple[Shape, tuple[Batch, ...]], ...]
    full: tuple[Shape, Batch]
    square: int


# Shapes around what a small machine trains.
_FULL = _Sizes(
    (
        ((128, 4, 4, 512, 2048), ((2, 128), (8, 128), (24, 128))),
        ((192, 6, 3, 512, 2048), ((3, 128), (12, 128))),
        ((256, 8, 8, 1024, 4096), ((1, 256), (4, 256), (2, 512))),
        ((512, 8, 4, 1408, 8192), ((2, 128), (4, 128))),
    ),
    full=((192, 6, 3, 512, 2048), (6, 128)),
    square=1024,
)
# For fp16 on CPUs without instructions for it, which have a hundredth of the speed: far less work.
_SMALL = _Sizes(
    (
        ((32, 2, 2, 64, 256), ((1, 32), (4, 32))),
        ((48, 2, 1, 96, 384), ((2, 32), (2, 64))),
        ((64, 4, 4, 160, 256), ((1, 64), (4, 32))),
        ((64, 4, 2, 128, 512), ((1, 32), (2, 64))),
    ),
    full=((64, 4, 2, 128, 512), (2, 32)),
    square=128,
)


# For GPUs: blocks of models of 0.2 to 8 B parameters, in which launches take a realistic share of the time.
_LARGE = _Sizes(
    (
        ((1024, 16, 16, 2816, 32000), ((2, 2048), (8, 2048))),
        ((2048, 32, 8, 8192, 32000), ((1, 2048), (2, 4096), (1, 8192))),
        ((3072, 24, 8, 8192, 32000), ((1, 4096),)),
        ((4096, 32, 8, 14336, 128256), ((1, 2048), (1, 4096))),
    ),
    full=((2048, 32, 8, 8192, 32000), (2, 4096)),
    square=MEASURED_PRODUCT,
)
# A quarter of _FULL's work, of the same four shapes: what `--quick` times.
_QUICK_LADDER = (
    ((128, 4, 4, 512, 2048), ((8, 128),)),
    ((192, 6, 3, 512, 2048), ((3, 128), (12, 128))),
    ((256, 8, 8, 1024, 4096), ((1, 256),)),
    ((512, 8, 4, 1408, 8192), ((1, 128),)),
)


def _sizes(dtype: DType, device: torch.device) -> _Sizes:
    if device.type == "cuda":
        return _LARGE
    return _SMALL if dtype == "float16" and device.type == "cpu" else _FULL


@dataclass(frozen=True)
class UnitTime:
    """The time of one unit's phase: "F" (forward) or "B" (backward)."""

    phase: str
    unit: str
    work: Work
    seconds: float


def _spec(hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, max_seq: int = 512) -> ModelSpec:
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab}
    return ModelSpec(**complete({"family": "llama", "layers": 1, "max_seq": max_seq, **sizes}))


class _Seed(torch.autograd.Function):
    """A scalar whose backward pass returns a prescribed gradient of its input. `backward(g)` of a tensor would first
    import symbolic shapes, which takes a second."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Keep g (shaped like out); return 0."""
        ctx.g = g
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the prescribed gradient."""
        return ctx.g, None


class _Bench:
    """The units of one shape with their inputs; `run` times each unit's forward and backward once."""

    def __init__(self, model: Decoder, sequences: int, seq: int, device: torch.device) -> None:
        spec, dtype = model.spec, next(model.parameters()).dtype
        self.model, self.seq, self.sequences, self.device = model, seq, sequences, device
        self.tokens = torch.randint(spec.vocab, (sequences, seq + 1), device=device)
        self.x = torch.randn(sequences, seq, spec.hidden, device=device).to(dtype).requires_grad_()
        self.g = torch.randn(sequences, seq, spec.hidden, device=device).to(dtype)
        self.angles = (model.cos[:seq, None], model.sin[:seq, None])
        self.times: dict[tuple[str, str], list[float]] = {}

    def _time(self, unit: str, forward: Callable[[], torch.Tensor], g: torch.Tensor | None) -> None:
        out: list[torch.Tensor] = []

        def backward() -> None:
            (out[0] if g is None else _Seed.apply(out[0], g)).backward()

        for phase, action in (("F", lambda: out.append(forward())), ("B", backward)):
            self.times.setdefault((phase, unit), []).append(time_action(action, self.device))

    def run(self) -> None:
        """Time each unit's forward and backward pass once."""
        self.x.grad = None
        m = self.model
        self._time("embed", lambda: m.embed(self.tokens[:, :-1]), self.g)
        self._time("blocks.0", lambda: m.blocks["0"](self.x, TokenFacts(self.angles)), self.g)
        self.x.grad = None
        self._time("head", lambda: m.head(self.x, self.tokens[:, 1:]), None)

    def points(self) -> list[UnitTime]:
        """Return the median seconds of each unit and phase, with the unit's work."""
        spec, t = self.model.spec, self.sequences * self.seq
        e = next(self.model.parameters()).element_size()
        whole = RankPass(t, self.seq, e)
        work = {
            (phase, unit): count(spec, unit, whole)
            for phase, count in (("F", unit_work.forward), ("B", unit_work.backward))
            for unit in ("embed", "blocks.0", "head")
        }
        if sliced(t, spec.vocab, spec.hidden, e):
            work["F", "head"] += unit_work.head_products(spec, whole)
            work["B", "head"] = unit_work.head_norm_input_grad(spec, whole)
        return [
            UnitTime(phase, unit, work[phase, unit], median(times)) for (phase, unit), times in self.times.items()
        ]


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work; on CPU that is always so."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_action(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that an action takes, with its work on the device."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def _as_the_engine(place: torch.Tensor, p: torch.Tensor) -> None:
    """Handle a gradient as the data-parallel engine does: copy it to `place`, shaped like p, and drop it."""
    assert p.grad is not None
    write_gradient(place, p.grad, [], add=False)
    p.grad = None


_BYTES_OF_POINT = 32
"""Bytes of GPU memory that a timed shape needs per parameter, for its gradients and inputs too."""


def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


class Ladder:
    """The units of small decoders of several shapes on one rank, or with `quick` a quarter of their work. They are
    created and warmed up once, before any timing, and timed at every concurrency."""

    def __init__(self, dtype: DType, device: torch.device, quick: bool = False) -> None:
        self.dtype, self.device, self.quick = dtype, device, quick
        self._benches: list[_Bench] = []
        sizes = _sizes(dtype, device)
        for shape, batches in _QUICK_LADDER if quick and sizes is _FULL else sizes.ladder:
            spec = _spec(*shape, max_seq=max(seq for _, seq in batches))
            if device.type == "cuda" and spec.parameter_count * _BYTES_OF_POINT > _memory(device):
                continue
            model = create(spec, DTYPES[dtype], device)
            for p in model.parameters():
                torch.nn.init.normal_(p, std=0.02)
                p.register_post_accumulate_grad_hook(partial(_as_the_engine, torch.zeros_like(p)))
            self._benches += [_Bench(model, sequences, seq, device) for sequences, seq in batches]
        for bench in self._benches:
            bench.run()

    def points(
        self, barrier: Callable[[], None], full_passes: Callable[[], None], rounds: int, enough: Callable[[], bool]
    ) -> list[UnitTime]:
        """Return the time of every unit over `rounds` rounds, or two if `enough()` is then true, alike on all ranks:
        more would say nothing new. `barrier` starts each shape together with the other ranks. `full_passes` is called
        first, to warm up, and now and then between shapes, so that what it times meets the same disturbances."""
        for bench in self._benches:
            bench.times = {}
        full_passes()
        for done in range(rounds):
            if done == 2 and enough():
                break
            for i, bench in enumerate(self._benches):
                barrier()
                bench.run()
                if i % 4 == 3:
                    full_passes()
        return [point for bench in self._benches for point in bench.points()]


def peak_flops(dtype: DType, device: torch.device, barrier: Callable[[], None]) -> float:
    """Return the FLOP/s of the best of four square matrix products."""
    n = _sizes(dtype, device).square
    a = torch.randn(n, n, device=device).to(DTYPES[dtype])
    best = float("inf")
    for _ in range(4):
        barrier()
        best = min(best, time_action(lambda: a @ a, device))
    return 2 * n**3 / best


def narrow_per_flop(dtype: DType, device: torch.device, barrier: Callable[[], None]) -> dict[str, float]:
    """Return seconds per FLOP of the best of four square products of each narrow format that the device has, by name;
    empty unless `dtype` is bfloat16, the type of their results."""
    if dtype != "bfloat16":
        return {}
    n = _sizes(dtype, device).square
    x, rates = torch.randn(n, n, device=device, dtype=torch.bfloat16), {}
    for operands in MULTIPLIED:
        if not narrow_product.runs_on(operands, device):
            continue
        a, best = narrow_product.operand(x, operands), float("inf")
        for _ in range(4):
            barrier()
            best = min(best, time_action(partial(narrow_product.product, a, a, operands), device))
        rates[operands.name] = best / (2 * n**3)
    return rates


def optimizer_per_byte(dtype: DType, device: torch.device, barrier: Callable[[], None]) -> float:
    """Return seconds per byte of optimizer traffic: norm, scale and fused AdamW, as in a training step.

    Measured on four layers, of 2 M parameters in all on CPUs, whose state exceeds a core's cache; of 374 M on GPUs.
    """
    shape, _ = (_LARGE if device.type == "cuda" else _FULL).full
    spec = replace(_spec(*shape), layers=4)
    job = Job(global_batch=1, seq=1, precision=Precision(compute=dtype), optimizer=Optimizer())
    shapes = [p.shape for p in create(spec, torch.float32, torch.device("cpu")).parameters()]
    wide = DTYPES[job.precision.master_dtype]
    masters = [torch.zeros(shape, dtype=wide, device=device, requires_grad=True) for shape in shapes]
    flat = torch.zeros(sum(m.numel() for m in masters), dtype=wide, device=device)
    for master, part in zip(masters, torch.split(flat, [m.numel() for m in masters]), strict=True):
        master.grad = part.view(master.shape)
    optimizer = AdamW(masters, fused=True)
    times: list[float] = []

    def step() -> None:
        torch.linalg.vector_norm(flat)
        flat.mul_(0.5)
        optimizer.step()

    for _ in range(6):
        barrier()
        times.append(time_action(step, device))
    per_parameter = unit_work.optimizer(spec.parameter_count, job).traffic_bytes / spec.parameter_count
    if job.precision.compute != job.precision.master_dtype:
        per_parameter -= DTYPE_BYTES[dtype] + DTYPE_BYTES[job.precision.master_dtype]  # no cast was timed
    return float(median(times[1:]) / (per_parameter * flat.numel()))


def fit(points: list[UnitTime], phase: str, fused_norms: bool = False) -> tuple[Rates, float]:
    """Fit the rates of a phase by least squares of relative errors; return them and the median relative error.
    `fused_norms`: whether a norm is one kernel, as on GPUs."""
    # Embeddings cost little and follow other rules: they would bias the fit.
    chosen = [p for p in points if p.phase == phase and p.unit != "embed"]
    features: npt.NDArray[np.float64] = np.array([_features(p.work, fused_norms) for p in chosen], dtype=np.float64)
    seconds = np.array([p.seconds for p in chosen])
    rates = nonnegative_fit(features, seconds)
    error = float(np.median(np.abs(features @ rates / seconds - 1)))
    gemm, attention, byte, kernel = map(float, rates)
    return Rates(gemm, attention, byte, kernel, fused_norms=fused_norms), error


def _features(work: Work, fused_norms: bool) -> tuple[Any, ...]:
    return (work.gemm_flops, work.attention_flops, *work.moved(fused_norms))


class FullPasses:
    """Full passes of a four-layer decoder with its gradient all-reduce, timed along with the ladder. They measure the
    cost of a pass beyond the price of its parts: cold caches, ranks that wait for the slowest. With several hosts
    nothing is sent, as the time on slow links would hide that. `at_once`: passes timed by each call of `run`.
    """

    def __init__(self, dtype: DType, comm: Comm, at_once: int = 2) -> None:
        self.at_once = at_once
        shape, (self.sequences, seq) = _sizes(dtype, comm.world.device).full
        self.comm, self.spec = comm, replace(_spec(*shape, max_seq=seq), layers=4)
        self.job = Job(global_batch=self.sequences * comm.world.size, seq=seq, precision=Precision(compute=dtype))
        self.model = create(self.spec, DTYPES[dtype], comm.world.device)
        for p in self.model.parameters():
            torch.nn.init.normal_(p, std=0.02)
        cut = gradient_buckets(self.spec, self.job, 25 * 2**20)
        self.sends = comm.world.size == comm.world.local_size
        over = comm if self.sends else Comm(comm.world, comm.mesh, null=True)
        self.engine = DataParallel(self.model, cut, self.job.precision, over, Strategy(dp=comm.world.size), {})
        self.engine.start(None)
        self.tokens = torch.randint(self.spec.vocab, (self.sequences, self.job.seq + 1), device=comm.world.device)
        self.times: list[float] = []

    def run(self) -> None:
        """Time `at_once` passes."""
        device = self.comm.world.device
        for _ in range(self.at_once):
            self.comm.barrier()
            synchronize(device)
            start = time.perf_counter()
            self.engine.begin()
            self.engine.backward(0, last=True)
            (self.model(self.tokens[:, :-1], self.tokens[:, 1:]) / self.tokens.numel()).backward()
            self.engine.finish()
            self.comm.barrier()
            synchronize(device)
            self.times.append(time.perf_counter() - start)

    def over_parts(self, forward: Rates, backward: Rates, links: list[CollectiveFit]) -> float:
        """Return the median pass without its communication, divided by the price of its units; at least 1.

        `links`: the fits of the all-reduce.
        """
        spec, seq = self.spec, self.job.seq
        whole = RankPass(self.sequences * seq, seq, DTYPE_BYTES[self.job.precision.compute])
        parts = sum(
            n * (unit_work.forward(spec, unit, whole).seconds(forward))
            + n * (unit_work.backward(spec, unit, whole).seconds(backward))
            for unit, n in (("embed", 1), ("blocks.0", spec.layers), ("head", 1))
        )
        sent = 0.0
        if links and self.sends and self.comm.world.device.type == "cpu":
            e = DTYPE_BYTES[self.job.precision.reduce_dtype]
            sent = sum(min(fit.seconds(b.bucket.numel * e) for fit in links) for b in self.engine.buckets)
        return max(1.0, float((median(self.times[self.at_once :]) - sent) / parts))
