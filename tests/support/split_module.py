"""Modules split over tp ranks by a plan of names, a module with statistics, and the same on one process."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.process.environment import World
from phalanx.spec.errors import InputError

BATCH_NORM = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples" / "batch_norm.py")))
"""The example: a net with BatchNorm, its training here and on one process."""
OWN_PLAN = {
    "kinds": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.kinds = nn.Embedding(8, 8, padding_idx=4)  # the first row of a rank, and the one after another's last
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.blocks[1].down.requires_grad_(False)  # split, and not trained
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.kinds((8 * torch.sigmoid(x)).long()).sum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _hugging_face(family: str) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 16, "attn_implementation": "eager"}
    if family == "qwen3":
        config: Any = transformers.Qwen3Config(**sizes, **more, head_dim=4, tie_word_embeddings=True)
        return transformers.Qwen3ForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more, tie_word_embeddings=False))


def make(kind: str, seed: int) -> nn.Module:
    """Return a module in fp64."""
    torch.manual_seed(seed)
    return (Own() if kind == "own" else _hugging_face(kind)).double()


def _loss(module: nn.Module, kind: str, step: int, replica: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * step + replica)
    if kind == "own":
        x = torch.randn(3, 6, generator=draw, dtype=torch.float64)
        return module(x).square().mean()  # type: ignore[no-any-return]
    ids = torch.randint(32, (2, 8), generator=draw)
    return module(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]


def split(world: World, kind: str, line: str, steps: int, folder: Path | None = None) -> dict[str, Any]:
    """Train over the tp ranks, with a folder from the checkpoint there; return gradient norms and the final unsharded
    state."""
    plan: Any = None if "tp" not in line else OWN_PLAN if kind == "own" else "published"
    model = spread(world, make(kind, world.rank), line, tp_plan=plan)
    update = model.attach(torch.optim.AdamW(model.parameters(), lr=0.01))
    norms = []
    for step in range(model.load(folder) if folder else 0, steps):
        model.backward(_loss(model, kind, step, model.replica))
        norms.append(model.clip(0.5))
        update.step()
    if folder:
        model.save(folder, steps)
    state = model.state_dict()
    model.load_state_dict(state)
    again = model.state_dict()
    assert all(torch.equal(t, again[name]) for name, t in state.items())
    return {"norms": norms, "state": {name: t.numpy() for name, t in state.items()}}


def whole(kind: str, replicas: int | tuple[int, ...], steps: int) -> dict[str, Any]:
    """Do the same on one process with plain torch; with several numbers of replicas, the steps with each in turn."""
    module = make(kind, 0)
    update = torch.optim.AdamW(module.parameters(), lr=0.01)
    norms = []
    turns = (replicas,) if isinstance(replicas, int) else replicas
    for step, dp in enumerate(dp for dp in turns for _ in range(steps)):
        update.zero_grad()
        for replica in range(dp):
            (_loss(module, kind, step, replica) / dp).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        update.step()
    return {"norms": norms, "state": {name: t.numpy() for name, t in module.state_dict().items()}}


class Statistics(nn.Module):
    """A module whose buffers depend on the batches that a rank saw."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))  # type: ignore[no-any-return]


def statistics(world: World, buffers: Any, folder: str) -> dict[str, Any]:
    """Train two steps; return this rank's running mean after them, what a checkpoint gives back, and the mean that it
    would have had alone."""
    torch.manual_seed(0)
    module, alone = Statistics(), nn.BatchNorm1d(3)
    model = spread(world, module, "zero=1", buffers=buffers)
    update = model.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(2):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + world.rank))
        model.backward(model(x).sum())
        update.step()
        alone(x)
    model.eval()
    assert not module.norm.training
    model.train()
    assert module.norm.training
    mean = module.norm.running_mean.clone()  # type: ignore[union-attr]
    model.save(folder, 2)
    module.norm.reset_running_stats()
    assert model.load(folder) == 2
    back = module.norm.running_mean
    return {"mean": mean.numpy(), "back": back.numpy(), "alone": alone.running_mean.numpy()}  # type: ignore[union-attr]


def refused(world: World, plan: dict[str, str] | None) -> str:
    """Return the message of a plan that does not fit the module."""
    try:
        spread(world, make("own", 0), "tp=2", tp_plan=plan)
    except InputError as error:
        return str(error)
    raise AssertionError("nothing was refused")


class Packed(nn.Module):
    """Gate and up in one matrix, as fused kernels want it."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.gate_and_up = nn.Linear(8, 48)
        self.gate, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8)
        self.drop, self.packed = nn.Dropout(0.5), packed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gate, up = self.gate_and_up(x).chunk(2, -1) if self.packed else (self.gate(x), self.up(x))
        return x + self.drop(self.down(nn.functional.silu(gate) * up))  # type: ignore[no-any-return]


def packed(world: World, packed: bool, line: str, compare: bool) -> str:
    """Take two steps of a module with such a matrix in a block; return what is refused."""
    plan = {"1.gate_and_up" if packed else "1.gate": "colwise", "1.up": "colwise", "1.down": "rowwise"}
    module = nn.Sequential(nn.Linear(6, 6), Packed(packed), nn.Linear(8, 2)).double()
    unused = ("gate", "up") if packed else ("gate_and_up",)
    for name in unused:
        module[1].get_submodule(name).requires_grad_(False)
    model = spread(world, module, line, tp_plan=plan, compare_first=compare)
    update = model.attach(torch.optim.AdamW(model.parameters()))
    try:
        for _ in range(2):
            torch.manual_seed(0)  # tp ranks get the same batch, and drop the same
            model.backward(model(torch.randn(3, 6, dtype=torch.float64)).square().mean())
            update.step()
    except InputError as error:
        return str(error)
    assert model.module.get_submodule("1.drop").training
    return ""


def batch_norms(world: World, line: str, meaning: Any) -> dict[str, Any]:
    """Train the example's net; return its state."""
    cuts = [3] if "pp" in line else None
    model = spread(world, BATCH_NORM.net(), line, buffers=meaning, cuts=cuts)
    return {name: value.numpy() for name, value in BATCH_NORM.train(model).items()}
