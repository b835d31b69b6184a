"""Units of FSDP: parameters that are gathered at once, by the policy that wraps modules.

    block      a unit each; the root has embedding, head and the last norm
    model      the root has everything
    remainder  modules with at least `least` parameters outside of the units inside them, children first
               (torch 2.13, torch/distributed/fsdp/wrap.py, size_based_auto_wrap_policy)
    module     modules with more than `least` parameters in all (accelerate 1.15, utils/fsdp_utils.py:948, FSDP2)

The root is gathered for the forward pass, and stays for the backward pass. So is a unit around the list of blocks,
which counts as part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.cost.ledger.model_shape import Shape

Wrapping = Literal["remainder", "module"]


@dataclass(frozen=True)
class UnitParams:
    """Parameters of the root; of the largest other unit; and how many others there are."""

    root: float
    largest: float
    count: float


@dataclass(frozen=True)
class _Module:
    """A module: its own parameters, and its children. `listed`: a list of modules, which is no unit itself."""

    own: float = 0.0
    children: tuple[_Module, ...] = ()
    listed: bool = False

    @property
    def all(self) -> float:
        return self.own + sum(child.all for child in self.children)


def units(shape: Shape, how: Wrapping | Literal["model"], least: float = 0.0) -> UnitParams:
    """Return the units of a model, with the modules of a decoder of transformers."""
    if how == "model":
        return UnitParams(float(shape.params), 0.0, 0.0)
    sizes: list[float] = []
    for child in _model(shape).children:
        _wrap(child, how, least, sizes)
    return UnitParams(float(shape.params) - sum(sizes), max(sizes, default=0.0), float(len(sizes)))


def _wrap(module: _Module, how: Wrapping, least: float, sizes: list[float]) -> float:
    """Append the sizes of a module's units, and return how many of its parameters are in them."""
    enough = module.all >= least if how == "remainder" else module.all > least
    if not enough:
        return 0.0
    inside = sum(_wrap(child, how, least, sizes) for child in module.children)
    rest = module.all - inside
    around = module.listed or any(child.listed and child.all > 0 for child in module.children)
    if around or not rest or (how == "remainder" and rest < least):
        return inside
    sizes.append(rest)
    return module.all


def _model(shape: Shape) -> _Module:
    """Return the tree of modules: the decoder (embedding, list of blocks, norm), and the head."""
    head = 0.0 if shape.tied else float(shape.vocab * shape.hidden)
    embedding = _Module(float(shape.embedding_params))
    dense = int(shape.layers - shape.moe_layers)
    mlp = _mlp(float(shape.hidden * shape.ffn), int(shape.mlp_matrices))
    blocks = [_block(shape, float(shape.block_params), mlp)] * dense
    if shape.moe_layers:
        experts = [_mlp(float(shape.hidden * shape.expert_ffn), int(shape.mlp_matrices))] * int(shape.experts)
        shared = _mlp(float(shape.hidden * shape.shared_ffn), int(shape.mlp_matrices))
        router = _Module(float(shape.hidden * shape.experts))
        layer = _Module(children=(_Module(children=tuple(experts), listed=True), shared, router))
        blocks += [_block(shape, float(shape.moe_block_params + shape.expert_params), layer)] * int(shape.moe_layers)
    norm = _Module(float(shape.head_params) - head)
    decoder = _Module(children=(embedding, _Module(children=tuple(blocks), listed=True), norm))
    return _Module(children=(decoder, _Module(head)))


def _mlp(matrix: float, matrices: int) -> _Module:
    return _Module(children=(_Module(matrix),) * matrices)


def _block(shape: Shape, params: float, mlp: _Module) -> _Module:
    """Return a block: norms, attention with its products, and what comes after it."""
    out = float(shape.hidden * shape.heads * shape.value_dim)
    norms = float(shape.norms * shape.hidden)
    inputs = params - mlp.all - norms - out  # queries, keys and values, from latents too
    query = min(float(shape.hidden * shape.heads * shape.head_dim), inputs) if not shape.kv_rank else inputs
    rest = (inputs - query) / 2
    attention = _Module(children=(_Module(query), _Module(rest), _Module(rest), _Module(out)))
    return _Module(children=(attention, mlp, *(_Module(norms / shape.norms),) * int(shape.norms)))
