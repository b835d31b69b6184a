"""Units of FSDP, the parameters that are gathered at once, by the policy that wraps modules.

    block      a unit each; the root has embedding, head and the last norm
    model      the root has everything
    remainder  modules with at least `least` parameters outside of the units inside them, children first
               (torch 2.13, torch/distributed/fsdp/wrap.py, size_based_auto_wrap_policy)
    module     modules with more than `least` parameters in all (accelerate 1.15, utils/fsdp_utils.py:948, FSDP2)

The root is gathered for the forward pass and stays gathered for the backward pass. So does a unit around the list of
blocks, which counts as part of the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.cost.ledger.kind import BlockKind
from phalanx.cost.ledger.model_shape import Shape

Wrapping = Literal["remainder", "module"]


@dataclass(frozen=True)
class UnitParams:
    """Parameters of the root and of the largest other unit; number of other units."""

    root: float
    largest: float
    count: float


@dataclass(frozen=True)
class _Module:
    """A module: its own parameters, and its children. `listed`: whether it is a list of modules, which is no unit."""

    own: float = 0.0
    children: tuple[_Module, ...] = ()
    listed: bool = False

    @property
    def all(self) -> float:
        """Parameters of the module and its children."""
        return self.own + sum(child.all for child in self.children)


def units(shape: Shape, how: Wrapping | Literal["model"], least: float = 0.0) -> UnitParams:
    """Return the units of a model with the modules of a transformers decoder."""
    if how == "model":
        return UnitParams(float(shape.params), 0.0, 0.0)
    sizes: list[float] = []
    for child in _model(shape).children:
        _wrap(child, how, least, sizes)
    return UnitParams(float(shape.params) - sum(sizes), max(sizes, default=0.0), float(len(sizes)))


def _wrap(module: _Module, how: Wrapping, least: float, sizes: list[float]) -> float:
    """Append the sizes of a module's units to `sizes`, and return the number of its parameters in these units."""
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
    blocks = [block for kind in shape.kinds for block in [_block(kind)] * int(kind.count)]
    norm = _Module(float(shape.head_params) - head)
    decoder = _Module(children=(embedding, _Module(children=tuple(blocks), listed=True), norm))
    return _Module(children=(decoder, _Module(head)))


def _mlp(matrix: float, matrices: int) -> _Module:
    return _Module(children=(_Module(matrix),) * matrices)


def _inner(kind: BlockKind) -> tuple[_Module, ...]:
    """Return the modules of a block's MLP, or of its experts."""
    matrices, h = int(kind.mlp_matrices), float(kind.hidden)
    if not kind.experts:
        return (_mlp(h * kind.ffn, matrices),) if kind.ffn else ()
    experts = [_mlp(float(kind.expert_dim * kind.expert_ffn), matrices)] * int(kind.experts)
    routed = _Module(children=tuple(experts), listed=True)
    return (_Module(children=(routed, _mlp(h * kind.shared_ffn, matrices), _Module(h * kind.experts))),)


def _block(kind: BlockKind) -> _Module:
    """Return a block: norms, attention or another mixer with its products, and what comes after it."""
    inner, count = _inner(kind), int(kind.norms + kind.after_norms)
    out = float(kind.hidden * (kind.heads * kind.value_dim + kind.mixed_out))
    norms = float(count * kind.hidden)
    mixers: tuple[_Module, ...] = ()
    if out:
        inputs = float(kind.all_params) - sum(m.all for m in inner) - norms - out  # from latents too
        query = min(float(kind.hidden * kind.heads * kind.head_dim), inputs)
        query = inputs if kind.kv_rank or kind.mixed else query
        rest = (inputs - query) / 2
        mixers = (_Module(children=(_Module(query), _Module(rest), _Module(rest), _Module(out))),)
    return _Module(children=(*mixers, *inner, *(_Module(norms / count),) * count))
