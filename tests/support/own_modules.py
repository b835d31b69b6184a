"""Modules as researchers write them, each with a batch: what tensor parallelism of own modules is examined with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.any_module.proposal import propose_tp_plan
from phalanx.runtime.process.environment import World
from phalanx.spec.errors import InputError


class _Attention(nn.Module):
    """Packed q, k and v of grouped heads, a norm over each head, heads as a number."""

    def __init__(self, d: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, d // heads
        self.qkv = nn.Linear(d, (heads + 2 * kv_heads) * self.head_dim)
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (part.view(b, t, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x).split(sizes, -1))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Gated(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(d, 6 * d), nn.Linear(3 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Patches by a convolution, torch's own encoder layer, a block with packed matrices, a head."""

    def __init__(self) -> None:
        super().__init__()
        d = 16
        self.patches = nn.Conv2d(3, d, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 4, d) * 0.1)
        self.encoder = nn.TransformerEncoderLayer(d, 4, 32, dropout=0.0, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.attention, self.mlp = _Attention(d, 4, 2), _Gated(d)
        self.head = nn.Linear(d, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.position
        x = self.encoder(x)
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class _ResBlock(nn.Module):
    def __init__(self, c: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, c), nn.Conv2d(c, c, 3, padding=1)
        self.time = nn.Linear(time, c)
        self.norm2, self.depthwise = nn.GroupNorm(4, c), nn.Conv2d(c, c, 3, padding=1, groups=c)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = F.silu(self.norm2(h + self.time(t)[..., None, None]))
        return x + self.conv2(self.depthwise(h))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Down, a middle, up by a transposed convolution, joined with what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.time = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 8)),
        )
        self.left, self.down = _ResBlock(8, 8), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle, self.up = _ResBlock(16, 8), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join, self.right, self.last = nn.Conv2d(16, 8, 1), _ResBlock(8, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = self.time(t)
        left = self.left(self.first(x), t)
        up = self.up(self.middle(self.down(left), t))
        return self.last(self.right(self.join(torch.cat([up, left], 1)), t))  # type: ignore[no-any-return]


class StateSpace(nn.Module):
    """A diagonal gated recurrence behind a depthwise convolution, as Mamba's, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        d = 8
        self.embedding, self.head = nn.Embedding(32, d), nn.Linear(d, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(_StateSpaceBlock(d) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class _StateSpaceBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(d), nn.Linear(d, 4 * d)
        self.conv = nn.Conv1d(2 * d, 2 * d, 3, padding=2, groups=2 * d)
        self.decay, self.out = nn.Parameter(torch.randn(2 * d) * 0.1), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.inner(self.norm(x)).chunk(2, -1)
        u = self.conv(u.transpose(1, 2))[..., : x.size(1)].transpose(1, 2)
        a, h, states = torch.sigmoid(self.decay), torch.zeros_like(u[:, 0]), []
        for step in range(u.size(1)):
            h = a * h + (1 - a) * u[:, step]
            states.append(h)
        return x + self.out(torch.stack(states, 1) * F.silu(gate))  # type: ignore[no-any-return]


class Mamba(nn.Module):
    """Mamba's own block: Δ, B and C come from all channels (Gu and Dao 2023, algorithm 2)."""

    def __init__(self) -> None:
        super().__init__()
        d, self.states, self.rank = 8, 4, 2
        self.in_proj, self.conv = nn.Linear(d, 4 * d, bias=False), nn.Conv1d(2 * d, 2 * d, 3, padding=2, groups=2 * d)
        self.x_proj = nn.Linear(2 * d, self.rank + 2 * self.states, bias=False)
        self.dt_proj = nn.Linear(self.rank, 2 * d)
        self.A_log, self.D = nn.Parameter(torch.rand(2 * d, self.states)), nn.Parameter(torch.ones(2 * d))
        self.out_proj = nn.Linear(2 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.size(1)].transpose(1, 2))
        delta, b, c = self.x_proj(u).split([self.rank, self.states, self.states], -1)
        delta = F.softplus(self.dt_proj(delta))
        a, h, ys = -torch.exp(self.A_log), u.new_zeros(u.size(0), u.size(2), self.states), []
        for t in range(u.size(1)):
            h = torch.exp(delta[:, t, :, None] * a) * h + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1) + self.D * u[:, t])
        return x + self.out_proj(torch.stack(ys, 1) * F.silu(z))  # type: ignore[no-any-return]


MAMBA_PLAN = {
    "in_proj": "colwise:2",
    "conv": "per_channel",
    "x_proj": "rowwise_inside",
    "dt_proj": "colwise_inside",
    "A_log": "per_channel",
    "D": "per_channel",
    "out_proj": "rowwise",
}


class TwoTowers(nn.Module):
    """Words and images towards one space, with statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 8)
        self.text = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
        self.image = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, ids: Tensor, image: Tensor) -> dict[str, Tensor]:
        text, seen = self.text(self.words(ids).mean(1)), self.image(image)
        return {"scores": self.scale.exp() * F.normalize(text, dim=-1) @ F.normalize(seen, dim=-1).T}


class DiT(nn.Module):
    """A diffusion transformer whose blocks are modulated by a condition (Peebles and Xie 2022). `closed`: by gates
    that are zero at first, adaLN-Zero, and with a last layer of zeros."""

    def __init__(self, closed: bool = False) -> None:
        super().__init__()
        d = 16
        self.first, self.condition = nn.Linear(4, d), nn.Sequential(nn.Linear(1, d), nn.SiLU(), nn.Linear(d, d))
        self.blocks = nn.ModuleList(_DiTBlock(d) for _ in range(2))
        self.last = nn.Linear(d, 4)
        for layer in (self.last, *(block.modulation[1] for block in self.blocks)) if closed else ():
            for p in layer.parameters():
                nn.init.zeros_(p)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        c, x = self.condition(t), self.first(x)
        for block in self.blocks:
            x = block(x, c)
        return self.last(x)  # type: ignore[no-any-return]


class _DiTBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(d, elementwise_affine=False) for _ in range(2))
        self.attention, self.mlp = (
            _Attention(d, 4, 4),
            nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)),
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).unsqueeze(1).chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)  # type: ignore[no-any-return]


class _PackedByWidth(nn.Module):
    """Attention as in nanoGPT: packed matrices parted by the width, sizes of heads from the input's."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, d
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))  # type: ignore[no-any-return]


class _HeadsByWidth(nn.Module):
    """Attention as in timm: one view of q, k and v, and the width of the input at the end."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, d // heads
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))  # type: ignore[no-any-return]


class ByWidth(nn.Module):
    """Blocks that take sizes from the width of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.heads, self.last = _PackedByWidth(8, 4), _HeadsByWidth(8, 2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.packed(x)
        return self.last(x + self.heads(x))  # type: ignore[no-any-return]


class ByHeads(nn.Module):
    """Attention as it is often written: its number of heads is `h`, and the width of one follows from what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.qkv, self.proj = 4, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, self.h, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(24, shape, generator=torch.Generator().manual_seed(seed))


OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "vit": (ViT, lambda seed: (_drawn(seed, 3, 3, 8, 8),)),
    "unet": (UNet, lambda seed: (_drawn(seed, 2, 3, 8, 8), _drawn(seed, 2, 1))),
    "state_space": (StateSpace, lambda seed: (_ids(seed, 2, 5),)),
    "mamba": (Mamba, lambda seed: (_drawn(seed, 2, 5, 8),)),
    "two_towers": (TwoTowers, lambda seed: (_ids(seed, 4, 3), _drawn(seed, 4, 3, 7, 7))),
    "by_width": (ByWidth, lambda seed: (_drawn(seed, 2, 5, 8),)),
    "by_heads": (ByHeads, lambda seed: (_drawn(seed, 2, 5, 8),)),
    "dit": (DiT, lambda seed: (_drawn(seed, 2, 5, 4), _drawn(seed, 2, 1))),
    "closed_dit": (lambda: DiT(closed=True), lambda seed: (_drawn(seed, 2, 5, 4), _drawn(seed, 2, 1))),
}
"""By name: what makes the module, and its arguments from a seed."""


def make_own(kind: str) -> nn.Module:
    """Return a module in fp64 with drawn weights."""
    torch.manual_seed(0)
    return OWN[kind][0]().double()


def plan_of(kind: str, tp: int) -> dict[str, str]:
    """Return the plan that is proposed, or Mamba's, whose x_proj is summed in between: none is proposed there."""
    return MAMBA_PLAN if kind == "mamba" else propose_tp_plan(make_own(kind), OWN[kind][1](0), tp=tp)


def _loss(out: Any) -> Tensor:
    out = out["scores"] if isinstance(out, dict) else out
    return (out - 0.1).square().mean()  # type: ignore[no-any-return]


def train_split(world: World, kind: str, line: str, tp: int, start: int, folder: Path) -> dict[str, Any]:
    """Train two steps over the ranks, from the checkpoint of step `start` if there is one; return gradient norms and
    the unsharded state."""
    model = spread(world, make_own(kind), line, tp_plan=plan_of(kind, tp) if tp > 1 else None)
    update = model.attach(torch.optim.AdamW(model.parameters(), lr=0.01))
    assert model.load(folder) == start
    norms = []
    for step in range(start, start + 2):
        model.backward(_loss(model(*OWN[kind][1](10 * step + model.replica))))
        norms.append(model.clip(0.5))
        update.step()
    model.save(folder, start + 2)
    return {"norms": norms, "state": {name: t.numpy() for name, t in model.state_dict().items()}}


def train_whole(kind: str, replicas: tuple[int, int]) -> dict[str, Any]:
    """Do the same for four steps by torch alone, the first and the last two over so many replicas."""
    module = make_own(kind)
    update = torch.optim.AdamW(module.parameters(), lr=0.01)
    norms = []
    for step in range(4):
        update.zero_grad()
        dp = replicas[step // 2]
        for replica in range(dp):
            (_loss(module(*OWN[kind][1](10 * step + replica))) / dp).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        update.step()
    return {"norms": norms, "state": {name: t.numpy() for name, t in module.state_dict().items()}}


def refusal(world: World, kind: str, plan: dict[str, str]) -> str:
    """Return what is said of a plan when it is made or at the first step; "" if nothing is."""
    try:
        model = spread(world, make_own(kind), f"tp={world.size}", tp_plan=plan)
        model(*OWN[kind][1](0))
    except InputError as error:
        return str(error)
    return ""


def first_step(world: World, kind: str, line: str, tp: int, wrong: str) -> str:
    """Take a step that is compared with one process, dropout and all; `wrong`: a parameter whose gradient is doubled
    on one rank. Returns what is refused."""
    module = make_own(kind)
    if wrong and world.rank == 0:
        module.get_parameter(wrong).register_hook(lambda g: 2 * g)
    plan = plan_of(kind, tp) if tp > 1 else None
    model = spread(world, module, line, tp_plan=plan, compare_first="step")
    update = model.attach(torch.optim.AdamW(model.parameters(), lr=0.01))
    try:
        for step in range(2):
            for i in range(2):
                value = _loss(model(*OWN[kind][1](10 * step + 2 * model.replica + i)))
                model.backward(value, last=i == 1)
            update.step()
    except InputError as error:
        return str(error)
    assert all(m.training for m in model.module.modules())
    return ""
