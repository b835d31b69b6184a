"""Programs of torch's own parallelisms as their users write them, to be observed: a decoder under DDP, `fully_shard`,
DTensor's tensor parallelism and torch.distributed.pipelining.

Units are sharded as torchtitan does it (torchtitan/distributed/fsdp.py): the embedding, every block, and the last
norm with the head, which stays gathered from its forward to its backward pass.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-v": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Attention(nn.Module):
    """Causal attention with grouped key heads."""

    def __init__(self, of: ModelSpec) -> None:
        super().__init__()
        self.width = of.head_dim
        self.q = nn.Linear(of.hidden, of.heads * of.head_dim, bias=False)
        self.k = nn.Linear(of.hidden, of.kv_heads * of.head_dim, bias=False)
        self.v = nn.Linear(of.hidden, of.kv_heads * of.head_dim, bias=False)
        self.o = nn.Linear(of.heads * of.head_dim, of.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) -> the same; over tp ranks each has a part of the heads."""
        q, k, v = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, of: ModelSpec) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(of.hidden, of.ffn, bias=False), nn.Linear(of.hidden, of.ffn, bias=False)
        self.down = nn.Linear(of.ffn, of.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) -> the same."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """A block, computed again in the backward pass if `again`."""

    def __init__(self, of: ModelSpec, again: bool) -> None:
        super().__init__()
        self.again = again
        self.norm1, self.norm2 = nn.LayerNorm(of.hidden, bias=False), nn.LayerNorm(of.hidden, bias=False)
        self.attention, self.mlp = Attention(of), MLP(of)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) -> the same; with sequence parallelism a rank's part of seq."""
        out: Tensor = checkpoint(self.once, x, use_reentrant=False) if self.again else self.once(x)
        return out

    def once(self, x: Tensor) -> Tensor:
        """The block itself."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Part(nn.Module):
    """Consecutive blocks, with the embedding before the first and the head after the last."""

    def __init__(self, of: ModelSpec, blocks: range, again: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(of.vocab, of.hidden) if blocks.start == 0 else None
        self.blocks = nn.ModuleList(Block(of, again) for _ in blocks)
        last = blocks.stop == of.layers
        self.norm = nn.LayerNorm(of.hidden, bias=False) if last else None
        self.head = nn.Linear(of.hidden, of.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, seq) or activations (batch, seq, hidden) -> activations or logits."""
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


@dataclass(frozen=True)
class Program:
    """A program to observe: `model` under a strategy. zero=0 is DDP, 2 and 3 are fully_shard. `once`: gradients are
    reduced in the last micro-batch only; `bucket_mb`: MiB of DDP's buckets."""

    model: ModelSpec
    job: Job
    strategy: Strategy
    once: bool = False
    bucket_mb: float = 25.0

    def __call__(self) -> None:
        """Take three steps of AdamW."""
        s, axes = self.strategy, {}
        replicas = s.dp // s.dp_shard if s.zero else 1
        sizes = {"pp": s.pp, "replicate": replicas, "dp": s.dp // replicas, "tp": s.tp}
        axes = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
        mesh = init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes))
        place = mesh.get_local_rank("pp") if s.pp > 1 else 0
        chunks = [i for i, rank in enumerate(rank_of(s)) if rank == place]
        parts = [self._part(self.blocks()[i], mesh) for i in chunks]
        optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], foreach=False)
        for _ in range(3):
            if s.pp > 1:
                self._piped(parts, chunks, mesh)
            else:
                self._plain(parts[0])
            optimizer.step()
            optimizer.zero_grad()

    def blocks(self) -> list[range]:
        """The blocks of each chunk of the pipeline."""
        count = len(rank_of(self.strategy))
        ends = [round(i * self.model.layers / count) for i in range(count + 1)]
        return [range(*pair) for pair in pairwise(ends)]

    def _part(self, blocks: range, mesh: DeviceMesh) -> nn.Module:
        s, p = self.strategy, self.job.precision
        with torch.device("cuda"):
            part: nn.Module = Part(self.model, blocks, s.recompute == "full")
        if s.tp > 1:
            _split(part, mesh["tp"], s.sp)
        if s.zero == 0:
            options: dict[str, Any] = {"bucket_cap_mb": self.bucket_mb, "process_group": mesh.get_group("dp")}
            return DistributedDataParallel(part, **options) if s.dp > 1 else part
        over = mesh["replicate", "dp"] if s.dp > s.dp_shard else mesh["dp"]
        policy = MixedPrecisionPolicy(TYPES[p.compute], TYPES[p.reduce_dtype])
        stays: dict[str, Any] = {"mesh": over, "mp_policy": policy}
        freed = s.zero == 3 and s.pp == 1
        if part.embed is not None:
            fully_shard(part.embed, reshard_after_forward=freed, **stays)
        for block in part.blocks:
            fully_shard(block, reshard_after_forward=freed, **stays)
        if part.head is not None:
            fully_shard([part.norm, part.head], reshard_after_forward=False, **stays)
        return fully_shard(part, reshard_after_forward=freed, **stays)

    def _plain(self, model: nn.Module) -> None:
        m, s = self.strategy.accumulation(self.job), self.strategy
        for i in range(m):
            last = i == m - 1 or not self.once
            inside: Any = nullcontext()
            if s.zero:
                model.set_requires_gradient_sync(last)
            elif s.dp > 1 and not last:
                inside = model.no_sync()
            tokens = torch.randint(self.model.vocab, (s.micro_batch, self.job.seq), device="cuda")
            with inside, loss_parallel() if s.tp > 1 else nullcontext():
                _loss(model(tokens), tokens).backward()

    def _piped(self, parts: list[nn.Module], chunks: list[int], mesh: DeviceMesh) -> None:
        s, m = self.strategy, self.strategy.accumulation(self.job)
        group, device, count = mesh.get_group("pp"), torch.device("cuda"), len(rank_of(s))
        if not hasattr(self, "_schedule"):
            stages = [PipelineStage(x, i, count, device, group=group) for x, i in zip(parts, chunks, strict=True)]
            make: Any = SCHEDULES[s.schedule]
            one = stages[0] if s.schedule in ("gpipe", "1f1b") else stages
            object.__setattr__(self, "_schedule", make(one, m, loss_fn=_loss))
        tokens = torch.randint(self.model.vocab, (m * s.micro_batch, self.job.seq), device="cuda")
        given = (tokens,) if 0 in chunks else ()
        wanted = {"target": tokens} if count - 1 in chunks else {}
        with loss_parallel() if s.tp > 1 else nullcontext():
            self._schedule.step(*given, **wanted)  # type: ignore[attr-defined]


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _split(part: nn.Module, tp: DeviceMesh, sequence: bool) -> None:
    """Split a part over tp ranks, as torchtitan's llama3 does (torchtitan/models/llama3/parallelize.py)."""
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {}
    for name in ("attention", "mlp"):
        plan[name] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    products = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    plan |= {name: ColwiseParallel() for name in products}
    plan |= {name: RowwiseParallel(output_layouts=stream) for name in ("attention.o", "mlp.down")}
    if sequence:
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    for block in part.blocks:
        parallelize_module(block, tp, plan)
    ends: dict[str, Any] = {}
    if part.embed is not None:
        ends["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if part.head is not None:
        ends["head"] = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
        if sequence:
            ends["norm"] = SequenceParallel()
    parallelize_module(part, tp, ends)
