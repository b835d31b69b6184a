"""The same model in plain PyTorch, as a user of one GPU would write it: autocast to bf16 over fp32 parameters,
scaled_dot_product_attention, cross-entropy of whole logits, fused AdamW; each block compiled if wanted. Or as a
user of FSDP2 would: each block a unit of `fully_shard` that computes in bf16."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu.sizes import Size
from phalanx.spec.model.spec import ModelSpec


class Block(nn.Module):
    """A Llama block."""

    def __init__(self, m: ModelSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = m.heads, m.kv_heads, m.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(m.hidden), nn.RMSNorm(m.hidden)
        self.q = nn.Linear(m.hidden, m.heads * m.head_dim, bias=False)
        self.k = nn.Linear(m.hidden, m.kv_heads * m.head_dim, bias=False)
        self.v = nn.Linear(m.hidden, m.kv_heads * m.head_dim, bias=False)
        self.o = nn.Linear(m.heads * m.head_dim, m.hidden, bias=False)
        self.gate, self.up = nn.Linear(m.hidden, m.ffn, bias=False), nn.Linear(m.hidden, m.ffn, bias=False)
        self.down = nn.Linear(m.ffn, m.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (batch, seq, hidden); cos, sin: (seq, head_dim / 2)."""
        n = self.norm1(x)
        b, s, _ = n.shape
        q, k, v = (
            p(n).view(b, s, heads, self.width).transpose(1, 2)
            for p, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        n = self.norm2(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))  # type: ignore[no-any-return]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Llama(nn.Module):
    """A Llama of a ModelSpec's sizes."""

    def __init__(self, m: ModelSpec) -> None:
        super().__init__()
        self.embed = nn.Embedding(m.vocab, m.hidden)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.layers))
        self.norm, self.head = nn.RMSNorm(m.hidden), nn.Linear(m.hidden, m.vocab, bias=False)
        theta = 10000.0 ** -(torch.arange(0, m.head_dim, 2) / m.head_dim)
        angles = torch.outer(torch.arange(m.max_seq).float(), theta)
        self.cos, self.sin = nn.Buffer(angles.cos(), persistent=False), nn.Buffer(angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, seq) -> logits (batch, seq, vocab)."""
        x = self.embed(tokens)
        here = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:here], self.sin[:here])
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def step(
    size: Size, batch: Tensor, compiled: bool, sharded: bool = False
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step of plain PyTorch on a batch (micro_batch, seq + 1), and a function that waits for it. `sharded`:
    under FSDP2, over a group of this one process."""
    with torch.device(batch.device):
        model = Llama(size.model)
    if compiled:
        for block in model.blocks:
            block.compile()
    if sharded:
        _shard(model, batch.device)
    cast = nullcontext() if sharded else torch.autocast(batch.device.type, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss = torch.zeros((), device=batch.device)

    def take() -> None:
        nonlocal loss
        with cast:
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return take, lambda: loss.item()


def _shard(model: Llama, device: torch.device) -> None:
    if not dist.is_initialized():
        with TemporaryDirectory() as folder:
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
