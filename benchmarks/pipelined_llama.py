"""A Llama under torch's own pipeline, tensor and sequence parallelism, and `fully_shard`: a program to observe.

phalanx observe --world 512 -- python -m benchmarks.pipelined_llama        # Llama 3 405B, pp=8, dp=8, tp=8
phalanx observe --world 64 -- python -m benchmarks.pipelined_llama --layers 32 --hidden 4096 --heads 32 --ffn 14336 \
    --pp 1 --tp 1 --micro-batches 1                                        # Llama 3 8B under fully_shard alone
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A block: attention with grouped heads and a gated MLP, without rotary positions."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.v = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, heads of this rank x width)."""
        q, k, v = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        out: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq / tp, hidden) -> the same, computed again in the backward pass."""
        out: Tensor = checkpoint(self.once, x, use_reentrant=False)
        return out

    def once(self, x: Tensor) -> Tensor:
        """(batch, seq / tp, hidden) -> the same."""
        x = x + self.o(self.attention(self.norm1(x)))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Part(nn.Module):
    """The blocks of one pipeline rank, with the embedding on the first and the head on the last."""

    def __init__(
        self, blocks: list[nn.Module], embed: nn.Module | None, norm: nn.Module | None, head: nn.Module | None
    ) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm, self.head = embed, nn.ModuleList(blocks), norm, head

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, seq), or activations (batch, seq / tp, hidden), -> activations or logits."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def split(part: Part, tp: DeviceMesh) -> None:
    """Split a part over tp ranks, with sequence parallelism between its products."""
    one = {"norm1": SequenceParallel(use_local_output=False), "norm2": SequenceParallel(use_local_output=False)}
    names = ("q", "k", "v", "gate", "up")
    products = {name: ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)) for name in names}
    results = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}
    for block in part.blocks:
        parallelize_module(block, tp, {**one, **products, **results})
    if part.embed is not None:
        plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        part.embed = parallelize_module(part.embed, tp, plan)
    if part.head is not None and part.norm is not None:
        part.norm = parallelize_module(part.norm, tp, SequenceParallel(use_local_output=True))
        by_column = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1))
        part.head = parallelize_module(part.head, tp, by_column)


def main() -> None:
    """Take three steps."""
    p = argparse.ArgumentParser()
    for name, value in (
        *(("layers", 126), ("hidden", 16384), ("heads", 128), ("kv-heads", 8), ("ffn", 53248), ("vocab", 128256)),
        *(("seq", 8192), ("pp", 8), ("tp", 8), ("micro-batches", 16)),
    ):
        p.add_argument(f"--{name}", type=int, default=value)
    a = p.parse_args()
    dist.init_process_group("nccl")
    dp = dist.get_world_size() // (a.pp * a.tp)
    mesh = init_device_mesh("cuda", (a.pp, dp, a.tp), mesh_dim_names=("pp", "dp", "tp"))
    place, tp = mesh.get_local_rank("pp"), mesh["tp"]
    first, last = place == 0, place == a.pp - 1
    with torch.device("meta"):
        count = a.layers // a.pp + (place < a.layers % a.pp)
        blocks: list[nn.Module] = [Block(a.hidden, a.heads, a.kv_heads, a.ffn) for _ in range(count)]
        part = Part(
            blocks,
            nn.Embedding(a.vocab, a.hidden) if first else None,
            nn.RMSNorm(a.hidden) if last else None,
            nn.Linear(a.hidden, a.vocab, bias=False) if last else None,
        )
    if a.tp > 1:
        split(part, tp)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in part.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    fully_shard(part, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    part.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4, fused=True)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        mine = targets % logits.shape[-1]  # the shapes of a loss that is split over the vocabulary
        return F.cross_entropy(logits.flatten(0, 1).float(), mine.flatten())

    tokens = torch.randint(a.vocab, (a.micro_batches, a.seq), device="cuda")
    if a.pp > 1:
        stage = PipelineStage(part, place, a.pp, torch.device("cuda"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, a.micro_batches, loss_fn=loss)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        if a.pp == 1:
            for one in tokens.split(1):
                loss(part(one), one).backward()
        elif first:
            schedule.step(tokens)
        elif last:
            schedule.step(target=tokens)
        else:
            schedule.step()
        optimizer.step()


if __name__ == "__main__":
    main()
