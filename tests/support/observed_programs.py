"""Programs of torch's own parallelisms, and how each is recorded: really, on Gloo ranks, and without content.

A program builds its model for the world it is in and takes three steps; it is the same function in both cases.
"""

from __future__ import annotations

import gc
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from phalanx.observation.program.processes import Processes
from phalanx.observation.recorder.step import StepRecord, StepRecorder
from phalanx.observation.recorder.summary import GroupNames, summarise
from phalanx.observation.request import ObservationRequest
from phalanx.schedule.observation import RankObservation
from support.rank_pool import importing_as_here

VOCAB, WIDTH, SEQ, STEPS = 64, 32, 16, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
            MLP(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Model(nn.Module):
    """A small decoder; `unused` adds a module whose parameters never get a gradient."""

    def __init__(self, layers: int = 3, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if unused:
            self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _tokens(batch: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (batch, SEQ))


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batches: int = 1,
    before: Callable[[int], Any] = lambda m: None,
    clip: bool = False,
    inside: Callable[[int], Any] | None = None,
) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        for m in range(micro_batches):
            before(m)
            tokens = _tokens()
            if inside is not None:
                with inside(m):
                    _loss(model(tokens), tokens).backward()
            else:
                _loss(model(tokens), tokens).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def ddp(
    micro_batches: int = 1,
    no_sync: bool = False,
    hook: str = "",
    unused: bool = False,
    zero: bool = False,
    device: str = "cpu",
    **options: Any,
) -> None:
    """DistributedDataParallel."""
    model = DistributedDataParallel(Model(unused=unused).to(device), **options)
    if hook:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW) if zero else None
    inside = None
    if no_sync:
        from contextlib import nullcontext

        inside = lambda m: model.no_sync() if m < micro_batches - 1 else nullcontext()  # noqa: E731
    _train(model, optimizer, micro_batches, inside=inside)


def fsdp(
    mesh: tuple[int, ...] = (),
    micro_batches: int = 1,
    sync_last: bool = False,
    mixed: bool = False,
    offload: bool = False,
    clip: bool = False,
    **options: Any,
) -> None:
    """fully_shard of every block and the root."""
    shape = mesh or (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(shape) :]
    options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    assert isinstance(model, FSDPModule)
    before = lambda m: None  # noqa: E731
    if sync_last:
        before = lambda m: model.set_requires_gradient_sync(m == micro_batches - 1)  # noqa: E731
    _train(model, None, micro_batches, before, clip)


def replicated() -> None:
    """The composable replicate()."""
    model = Model()
    replicate(model)
    _train(model)


def tensor_parallel(sequence: bool = False, dp: int = 1) -> None:
    """DTensor's parallel styles, with sequence parallelism, and fully_shard over the rest."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
    model = Model()
    for layer in model.layers:
        plan: dict[str, Any] = {
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        if sequence:
            split = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            plan |= {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "attention": PrepareModuleInput(**split),
                "mlp": PrepareModuleInput(**split),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(layer, mesh["tp"], plan)
    if sequence:
        outer: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], outer)
    if dp > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    _train(model, torch.optim.AdamW(model.parameters(), foreach=False))


class _Piece(nn.Module):
    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(VOCAB, WIDTH) if first else None
        self.block = Block()
        self.last = nn.Linear(WIDTH, VOCAB, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if self.first is not None else x
        x = self.block(x)
        return self.last(x) if self.last is not None else x


_LOOPED = {"ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"}
_V = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}


def pipeline(name: str, micro_batches: int = 4, dp: int = 1, **options: Any) -> None:
    """A schedule of torch.distributed.pipelining: one block a stage, two stages a rank where it wants them; with `dp`
    each stage under fully_shard."""
    world = dist.get_world_size() // dp
    mesh = init_device_mesh("cpu", (world, dp), mesh_dim_names=("pp", "dp"))
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    kind = getattr(schedules, name)
    count = world * (2 if name in _LOOPED | _V else 1)
    mine = [rank] if count == world else [rank, count - 1 - rank if name in _V else rank + world]
    pieces = [_Piece(i == 0, i == count - 1) for i in mine]
    for piece in pieces if dp > 1 else ():
        fully_shard(piece.block, mesh=mesh["dp"], **options)
        fully_shard(piece, mesh=mesh["dp"], **options)
    stages = [PipelineStage(p, i, count, torch.device("cpu"), group=group) for p, i in zip(pieces, mine, strict=True)]
    schedule = kind(stages if count > world else stages[0], micro_batches, loss_fn=_loss)
    optimizer = torch.optim.AdamW([p for piece in pieces for p in piece.parameters()])
    for _ in range(STEPS):
        tokens = _tokens(2 * micro_batches)
        args = (tokens,) if 0 in mine else ()
        schedule.step(*args, **({"target": tokens, "losses": []} if count - 1 in mine else {}))
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS: dict[str, tuple[Callable[..., None], dict[str, Any], tuple[int, ...]]] = {
    "ddp": (ddp, {}, (2, 4)),
    "ddp, small buckets": (ddp, {"bucket_cap_mb": 0.02}, (2, 4)),
    "ddp, on cpu:0": (ddp, {"device": "cpu:0"}, (2,)),
    "ddp, two micro-batches": (ddp, {"micro_batches": 2}, (2, 4)),
    "ddp, no_sync": (ddp, {"micro_batches": 3, "no_sync": True}, (2, 4)),
    "ddp, gradients as views": (ddp, {"gradient_as_bucket_view": True}, (2, 4)),
    "ddp, static graph": (ddp, {"static_graph": True}, (2, 4)),
    "ddp, unused parameters": (ddp, {"find_unused_parameters": True, "unused": True}, (2, 4)),
    "ddp, fp16 hook": (ddp, {"hook": "fp16_compress_hook"}, (2, 4)),
    "ddp, ZeroRedundancyOptimizer": (ddp, {"zero": True}, (2, 4)),
    "replicate": (replicated, {}, (2, 4)),
    "fsdp": (fsdp, {}, (2, 4)),
    "fsdp, kept after forward": (fsdp, {"reshard_after_forward": False}, (2, 4)),
    "fsdp, resharded to 2": (fsdp, {"reshard_after_forward": 2}, (4,)),
    "fsdp, mixed": (fsdp, {"mixed": True, "clip": True}, (2, 4)),
    "fsdp, two micro-batches": (fsdp, {"micro_batches": 2}, (2, 4)),
    "fsdp, synchronised once": (fsdp, {"micro_batches": 2, "sync_last": True}, (2, 4)),
    "fsdp, offloaded": (fsdp, {"offload": True}, (2, 4)),
    "hsdp": (fsdp, {"mesh": (2, 2), "micro_batches": 2}, (4,)),
    "tp": (tensor_parallel, {}, (2, 4)),
    "tp and sp": (tensor_parallel, {"sequence": True}, (2, 4)),
    "tp and fsdp": (tensor_parallel, {"dp": 2}, (4,)),
    "tp, sp and fsdp": (tensor_parallel, {"dp": 2, "sequence": True}, (4,)),
    **{
        name: (pipeline, {"name": name}, (2, 4))
        for name in (
            "ScheduleGPipe",
            "Schedule1F1B",
            "ScheduleInterleaved1F1B",
            "ScheduleLoopedBFS",
            "ScheduleInterleavedZeroBubble",
            "ScheduleZBVZeroBubble",
        )
    },
    "ScheduleDualPipeV": (pipeline, {"name": "ScheduleDualPipeV", "micro_batches": 8}, (2, 4)),
    **{
        f"{name} and fsdp": (pipeline, {"name": name, "dp": 2}, (4,))
        for name in ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
    },
    "ScheduleZBVZeroBubble and fsdp, kept": (
        pipeline,
        {"name": "ScheduleZBVZeroBubble", "dp": 2, "reshard_after_forward": False},
        (4,),
    ),
}


_KEPT_BY_WORK = ("allreduce_", "broadcast_", "scatter_")
"""Collectives in place, whose work holds its tensors twice beside what is returned, for as long as it lives."""


class _Recorder(StepRecorder):
    """Leaves out Gloo's own memory: copies, and tensors that its thread releases after a collective has ended."""

    _inside = False

    def waiting(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        """Return Work.wait without what it does: Gloo reduces a copy of all that is scattered, which its work holds,
        and every wait copies this rank's part out of it."""

        def waits(*args: Any) -> bool:
            inside, self._inside = self._inside, True
            try:
                return wait(*args)
            finally:
                self._inside = inside

        return waits

    def follow(self, tensor: Tensor, kind: str = "") -> None:
        if not self._inside:
            super().follow(tensor, kind)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "_c10d_functional" and func.__name__.split(".")[0] != "wait_tensor":
            return self._functional(func, args, kwargs)
        if func.namespace != "c10d" or "send" in func.__name__ or "recv" in func.__name__:
            return func(*args, **kwargs)
        tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
        before = [t._use_count() for t in tensors]  # type: ignore[attr-defined]
        self._inside = True
        out = func(*args, **kwargs)
        work = out[-1] if isinstance(out, tuple | list) else out
        if work is not None:
            dist.Work.unbox(work).wait()
        until = time.monotonic() + 1
        each = 3 if func.__name__.split(".")[0] in _KEPT_BY_WORK else 1
        held = each * len(tensors) if isinstance(out, tuple | list) else 0
        while sum(t._use_count() for t in tensors) > sum(before) + held and time.monotonic() < until:  # type: ignore
            time.sleep(0)
        self._inside = False
        return out

    def _functional(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait for a functional collective at once; after the wait too, Gloo's thread may hold its input and what it
        returned for long."""
        tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
        before = sum(t._use_count() for t in tensors)  # type: ignore[attr-defined]
        self._inside = True
        out = func(*args, **kwargs)
        results = out if isinstance(out, list) else [out]
        for result in results:
            torch.ops._c10d_functional.wait_tensor(result)
        new = [r for r in results if all(r is not t for t in tensors)]
        held, until = before + len(new), time.monotonic() + 1
        while sum(t._use_count() for t in (*tensors, *new)) > held and time.monotonic() < until:
            time.sleep(0)
        self._inside = False
        return out


def recorded(name: str) -> RankObservation:
    """Run a program for real on this rank and record its second step."""
    function, options, _ = PROGRAMS[name]
    results: list[RankObservation] = []
    names = GroupNames(dist.get_world_size())

    def ended(step: StepRecord) -> None:
        results.append(summarise(recorder, step, names))

    recorder = _Recorder(ended)
    with patch.object(dist.Work, "wait", recorder.waiting(dist.Work.wait)), recorder.recording():
        function(**options)  # to its end: a rank that stopped early would leave the others waiting
        recorder.finish()
    dist.barrier()
    for mesh in [x for x in gc.get_objects() if issubclass(type(x), DeviceMesh)]:
        mesh._dim_group_names = []  # the next program names the same groups by its own mesh
    return results[1]


def observed(name: str, rank: int, world: int) -> RankObservation:
    """Observe a program without content."""
    function, options, _ = PROGRAMS[name]
    with Processes(lambda: function(**options), ObservationRequest(world)) as processes:
        return processes.observe(rank)


def _serve_real(names: list[str], rank: int, world: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    store = dist.TCPStore("localhost", port, world, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in names:
        _answer(pipe, recorded, name)


def _serve_observed(names: list[str], rank: int, world: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    for name in names:
        _answer(pipe, observed, name, rank, world)


def _answer(pipe: Connection, function: Callable[..., RankObservation], *args: Any) -> None:
    try:
        pipe.send(function(*args))
    except BaseException:
        pipe.send(traceback.format_exc())


def both(names: list[str], world: int, ranks: list[int]) -> dict[str, list[tuple[Any, Any]]]:
    """Return, by program and for each of `ranks`, its record on real ranks and its observation (or a traceback)."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["support.preload"])
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    pipes: dict[tuple[bool, int], Connection] = {}
    processes = []
    for real in (True, False):
        for rank in range(world) if real else ranks:
            ours, theirs = context.Pipe()
            target = _serve_real if real else _serve_observed
            process = context.Process(target=target, args=(names, rank, world, port, theirs), daemon=True)
            with importing_as_here():
                process.start()
            theirs.close()
            pipes[real, rank] = ours
            processes.append(process)
    try:
        answers = {key: [_receive(pipe) for _ in names] for key, pipe in pipes.items()}
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {name: [(answers[True, r][i], answers[False, r][i]) for r in ranks] for i, name in enumerate(names)}


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(240):
        return "no answer in a minute"
    try:
        return pipe.recv()
    except EOFError:
        return "the process ended"
