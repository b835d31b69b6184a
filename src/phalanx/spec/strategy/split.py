"""Each rank's part of the layers: tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"), and experts over ep and
etp.

By the role of a parameter, whose matrix is (out, in):

    column          rows of the matrix, with their biases: entire heads, or a part of the MLP's width
    row             columns of the matrix; its bias is replicated, since it is added once, to the sum
    embedding, head rows: a part of the vocabulary, padded with rows of zeros on the last ranks
    norms, position replicated; under sequence parallelism each rank's gradient covers its own tokens
    router          replicated; each rank's gradient covers the tokens that it routes
    latent          replicated; each rank's gradient covers its own heads
    experts         entire experts over ep, parts of their width over etp; not split over tp

With fewer key heads than ranks, neighbouring ranks hold copies of one. A rank's part is itself a ModelSpec, with
fewer heads and a part of the MLP, of the vocabulary and of the experts: `local_model`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec, Parameter, parameters
from phalanx.spec.strategy.spec import Strategy


class Degrees(Protocol):
    """The degrees that split layers: anything with tp, ep and etp, such as a Strategy or a Split."""

    @property
    def tp(self) -> int: ...

    @property
    def ep(self) -> int: ...

    @property
    def etp(self) -> int: ...


@dataclass(frozen=True)
class ParameterBox:
    """One rank's box of a logical parameter."""

    parameter: Parameter
    """The parameter, with its global shape."""
    shape: tuple[int, ...]
    """Shape of the rank's tensor. Rows beyond `sizes` are padding: unused zeros."""
    offsets: tuple[int, ...]
    """Offset of the box in the global shape, per dimension."""
    sizes: tuple[int, ...]
    """The extent of the box, per dimension."""
    copies: int = 1
    """Number of neighbouring tp ranks that hold this same box."""
    partial: bool = False
    """Whether each copy computes a part of the gradient, which is their sum; else all compute the same gradient."""

    @property
    def numel(self) -> int:
        """Elements in the box, without padding."""
        return math.prod(self.sizes)


def local_model(spec: ModelSpec, s: Degrees) -> ModelSpec:
    """Return one rank's part as a model; its shapes are the same on every rank."""
    if s.tp == s.ep == s.etp == 1:
        return spec
    kv_heads, x = max(1, spec.kv_heads // s.tp), spec.experts
    if x is not None:
        x = replace(x, local_count=x.count // s.ep, ffn=x.ffn // s.etp, shared_ffn=x.shared_ffn // s.tp)
    return replace(
        spec,
        heads=spec.heads // s.tp,
        kv_heads=kv_heads,
        ffn=max(1, spec.ffn // s.tp),  # has no effect where every layer has experts
        vocab=-(-spec.vocab // s.tp),
        experts=x,
    )


@dataclass(frozen=True)
class Split:
    """A model split over tp ranks and its experts over ep x etp, from the viewpoint of one rank."""

    spec: ModelSpec
    """The unsplit model."""
    tp: int = 1
    """Ranks that split the layers."""
    index: int = 0
    """This rank's coordinate along tp."""
    sp: bool = False
    """Whether norms and the residual stream are split by tokens over these ranks."""
    ep: int = 1
    """Ranks among which experts are divided."""
    etp: int = 1
    """Ranks that split each expert's width."""
    expert: int = 0
    """This rank's coordinate along ep, which determines its experts."""
    part: int = 0
    """This rank's coordinate along etp, which determines its part of their width."""

    @classmethod
    def of(cls, spec: ModelSpec, s: Strategy, tp: int = 0, ep: int = 0, etp: int = 0) -> Split:
        """Return the split of a strategy, from the viewpoint of the coordinates `tp`, `ep` and `etp`."""
        return cls(spec, s.tp, tp, s.sp, s.ep, s.etp, ep, etp)

    @cached_property
    def local(self) -> ModelSpec:
        """This rank's part as a model."""
        return local_model(self.spec, self)

    @property
    def unsplit(self) -> bool:
        """Whether nothing is split: tp = ep = etp = 1."""
        return self.tp == self.ep == self.etp == 1

    @property
    def first_token(self) -> int:
        """First vocabulary entry on this rank."""
        return min(self.index * self.local.vocab, self.spec.vocab)

    @property
    def tokens(self) -> int:
        """Number of vocabulary entries on this rank; its further rows are padding."""
        return min(self.local.vocab, self.spec.vocab - self.first_token)

    def box(self, fqn: str) -> ParameterBox:
        """Return this rank's box of the parameter `fqn`."""
        return self.boxes[fqn]

    @cached_property
    def boxes(self) -> dict[str, ParameterBox]:
        """This rank's box of every parameter, by name."""
        pairs = zip(parameters(self.spec), parameters(self.local), strict=True)
        return {p.fqn: _box_of(self, p, local_shape=of_rank.shape) for p, of_rank in pairs}

    def at(self, index: int) -> Split:
        """Return the same split from the viewpoint of coordinate `index` along tp."""
        return replace(self, index=index)

    def at_experts(self, index: int) -> Split:
        """Return the same split from the viewpoint of rank `index` of the ep x etp group."""
        return replace(self, expert=index // self.etp, part=index % self.etp)


def _box_of(split: Split, p: Parameter, local_shape: tuple[int, ...]) -> ParameterBox:
    index = split.index
    if p.of_experts:
        inside = {"expert_column": 1, "expert_column_bias": 1, "expert_row": 2}.get(p.role)
        at = {0: split.expert, inside: split.part}
        return ParameterBox(p, local_shape, tuple(at.get(i, 0) * n for i, n in enumerate(local_shape)), local_shape)
    if p.role in ("embedding", "head"):
        return ParameterBox(p, local_shape, (split.first_token, 0), (split.tokens, *p.shape[1:]))
    copies, partial_gradient = _copies(split, p, local_shape)
    dim = _SPLIT_DIM.get(p.role)
    if dim is None:
        return ParameterBox(p, p.shape, (0,) * len(p.shape), p.shape, copies, partial_gradient)
    offsets = tuple(index // copies * n if i == dim else 0 for i, n in enumerate(local_shape))
    return ParameterBox(p, local_shape, offsets, local_shape, copies, partial_gradient)


_SPLIT_DIM = {"column": 0, "column_bias": 0, "row": 1, "sink": 0}
"""The dimension that tp splits, by role; other roles of a dense layer are not split."""


def _copies(split: Split, p: Parameter, local_shape: tuple[int, ...]) -> tuple[int, bool]:
    """Return the number of tp ranks that hold the same box of a parameter, and whether each has only a part of its
    gradient."""
    if p.of_experts or p.role in ("embedding", "head"):
        return 1, False
    dim = _SPLIT_DIM.get(p.role)
    if dim is None:
        # Norms inside attention, and the latent projections shared by all heads, see only this rank's heads; a router
        # sees the tokens that this rank routes; all others see what every rank sees.
        own_heads = p.role in ("latent", "latent_bias") or (p.role == "norm" and ".attention." in p.fqn)
        return split.tp, split.sp or own_heads or p.role in ("router", "router_bias")
    copies = local_shape[dim] * split.tp // p.shape[dim]
    return copies, copies > 1


def partial(split: Split) -> dict[str, int]:
    """Return the parameters whose gradient is a sum over tp ranks with copies: the number of distinct boxes, by
    name."""
    if split.tp == 1:
        return {}
    boxes = {}
    for p, of_rank in zip(parameters(split.spec), parameters(split.local), strict=True):
        copies, partial_gradient = _copies(split, p, of_rank.shape)
        if partial_gradient:
            boxes[p.fqn] = split.tp // copies
    return boxes


def require_split(spec: ModelSpec, s: Degrees) -> None:
    """Raise InputError where tp, ep or etp does not cut the layers into equal parts."""
    # tp divides heads and widths.
    tp, x = s.tp, spec.experts
    sizes = {"model.heads": spec.heads, "model.ffn": spec.ffn}
    if x is not None:
        if len(x.dense_layers) == 0:
            del sizes["model.ffn"]
        if x.shared_ffn:
            sizes["model.experts.shared_ffn"] = x.shared_ffn
    for name, size in sizes.items():
        if size % tp:
            fits = math.gcd(*sizes.values())
            raise InputError("strategy.tp", tp, f"does not divide {name} = {size}", f"use a divisor of {fits}")
    if spec.kv_heads % tp and tp % spec.kv_heads:
        raise InputError(
            "strategy.tp",
            tp,
            f"neither divides model.kv_heads = {spec.kv_heads} nor is a multiple of it",
            "a key head is not split: one rank holds it, or several hold copies",
        )
    # ep and etp divide experts and their width.
    for field, ranks in (("ep", s.ep), ("etp", s.etp)):
        if ranks == 1:
            continue
        if x is None:
            raise InputError(f"strategy.{field}", ranks, "the model has no experts", "leave it out")
        name, size = ("count", x.count) if field == "ep" else ("ffn", x.ffn)
        if size % ranks:
            reason = f"does not divide model.experts.{name} = {size}"
            raise InputError(f"strategy.{field}", ranks, reason, f"use a divisor of {size}")
    if s.etp > 1 and x is not None and x.bias:
        raise InputError("strategy.etp", s.etp, "the width of experts with biases is not split", "use ep")
