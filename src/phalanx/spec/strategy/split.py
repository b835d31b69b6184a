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
from phalanx.spec.model.blocks.lowering import architecture
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
        mixers=tuple(mixer.of_rank(s.tp) for mixer in spec.mixers),
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

    def boxes_of(self, fqn: str) -> tuple[ParameterBox, ...]:
        """Return the boxes that the rank's tensor has one after the other: one here."""
        return (self.box(fqn),)

    @cached_property
    def boxes(self) -> dict[str, ParameterBox]:
        """This rank's box of every parameter, by name."""
        return {p.fqn: _box_of(self, p) for p in parameters(self.spec)}

    def at(self, index: int) -> Split:
        """Return the same split from the viewpoint of coordinate `index` along tp."""
        return replace(self, index=index)

    def at_experts(self, index: int) -> Split:
        """Return the same split from the viewpoint of rank `index` of the ep x etp group."""
        return replace(self, expert=index // self.etp, part=index % self.etp)


def _box_of(split: Split, p: Parameter) -> ParameterBox:
    copies, partial_gradient = _copies(split, p)
    at = {"": 0, "tp": split.index, "ep": split.expert, "etp": split.part}
    shape = tuple(dim.here(split) for dim in p.dims)
    index = [at[dim.axis] // (copies if dim.axis == "tp" else 1) for dim in p.dims]
    # Padding, of the vocabulary, is at the end.
    offsets = tuple(min(i * n, dim.size) for i, n, dim in zip(index, shape, p.dims, strict=True))
    sizes = tuple(min(n, dim.size - offset) for n, offset, dim in zip(shape, offsets, p.dims, strict=True))
    return ParameterBox(p, shape, offsets, sizes, copies, partial_gradient)


def _copies(split: Split, p: Parameter) -> tuple[int, bool]:
    """Return the number of tp ranks that hold the same box of a parameter, and whether each has only a part of its
    gradient."""
    if p.of_experts or p.role in ("embedding", "head"):
        return 1, False
    divided = next((dim for dim in p.dims if dim.axis == "tp"), None)
    if divided is None:
        # Norms inside a sublayer, and the latent projections shared by all heads, see only this rank's heads; a
        # router sees the tokens that this rank routes; all others see what every rank sees.
        inside = p.role == "norm" and p.fqn.startswith("blocks.") and p.fqn.count(".") > 3
        own_heads = p.role in ("latent", "latent_bias") or inside
        return split.tp, split.sp or own_heads or p.role in ("router", "router_bias")
    copies = divided.groups(split) * split.tp // divided.count
    return copies, copies > 1


def partial(split: Split) -> dict[str, int]:
    """Return the parameters whose gradient is a sum over tp ranks with copies: the number of distinct boxes, by
    name."""
    if split.tp == 1:
        return {}
    each = {p.fqn: _copies(split, p) for p in parameters(split.spec)}
    return {fqn: split.tp // copies for fqn, (copies, is_partial) in each.items() if is_partial}


def require_split(spec: ModelSpec, s: Degrees) -> None:
    """Raise InputError where tp, ep or etp does not cut the layers into equal parts."""
    dims = {
        dim.of: dim for block in architecture(spec).kinds for _, w in block.weights() for dim in w.shape if dim.axis
    }
    # tp divides heads and widths; fewer key heads than ranks are copied.
    split = {name: dim.count for name, dim in dims.items() if dim.axis == "tp" and not dim.copies}
    for name, count in split.items():
        if count % s.tp:
            fits = f"use a divisor of {math.gcd(*split.values())}"
            raise InputError("strategy.tp", s.tp, f"does not divide model.{name} = {count}", fits)
    for name, dim in dims.items():
        if dim.copies and dim.count % s.tp and s.tp % dim.count:
            reason = f"neither divides model.{name} = {dim.count} nor is a multiple of it"
            remedy = "a key head is not split: one rank holds it, or several hold copies"
            raise InputError("strategy.tp", s.tp, reason, remedy)
    # ep and etp divide experts and their width.
    for field, ranks in (("ep", s.ep), ("etp", s.etp)):
        if ranks == 1:
            continue
        divided = next(((name, dim.count) for name, dim in dims.items() if dim.axis == field), None)
        if divided is None:
            raise InputError(f"strategy.{field}", ranks, "the model has no experts", "leave it out")
        name, count = divided
        if count % ranks:
            reason = f"does not divide model.{name} = {count}"
            raise InputError(f"strategy.{field}", ranks, reason, f"use a divisor of {count}")
    if s.etp > 1 and spec.experts is not None and spec.experts.bias:
        raise InputError("strategy.etp", s.etp, "the width of experts with biases is not split", "use ep")
