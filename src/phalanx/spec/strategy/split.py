"""What each rank holds of the layers: over tensor-parallel ranks (Shoeybi et al. 2019, "Megatron-LM"), and of experts
over ep and etp.

    column          rows of the matrix (out, in), with their biases: whole heads, or a part of the MLP's width
    row             columns of the matrix; its bias whole, for it is added once, to the sum
    embedding, head rows: a part of the vocabulary; the last ranks' is filled up with rows of zeros
    norms, position whole; with sequence parallelism each rank's gradient is of its own tokens
    router          whole; each rank's gradient is of the tokens that it routes
    latent          whole; each rank's gradient is of its own heads
    experts         whole experts over ep, parts of their width over etp; nothing of them over tp

Where there are fewer key heads than ranks, neighbouring ranks hold the same one. What a rank holds is a model like
the whole one, with fewer heads and less of the MLP, of the vocabulary and of the experts: `local`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec, Parameter, parameters
from phalanx.spec.strategy.spec import Strategy


class Degrees(Protocol):
    """Over how many ranks layers are split: a Strategy, or a Split."""

    @property
    def tp(self) -> int: ...

    @property
    def ep(self) -> int: ...

    @property
    def etp(self) -> int: ...


@dataclass(frozen=True)
class Held:
    """The box of a logical parameter that a rank holds, in a tensor of `shape`: rows beyond the box are zeros that
    nothing uses. So many `copies` of it are held, by neighbouring ranks. `partial`: each of them computes its own
    part of the gradient, which is their sum; else all compute the same one."""

    parameter: Parameter
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: int = 1
    partial: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def local(spec: ModelSpec, s: Degrees) -> ModelSpec:
    """The model that each rank holds: all of the same shapes."""
    return _local(spec, s.tp, s.ep, s.etp)


@cache
def _local(spec: ModelSpec, tp: int, ep: int, etp: int) -> ModelSpec:
    if tp == ep == etp == 1:
        return spec
    kv_heads, x = max(1, spec.kv_heads // tp), spec.experts
    if x is not None:
        x = replace(x, held=x.count // ep, ffn=x.ffn // etp, shared_ffn=x.shared_ffn // tp)
    return replace(
        spec,
        heads=spec.heads // tp,
        kv_heads=kv_heads,
        ffn=max(1, spec.ffn // tp),  # where all layers have experts it is of none
        vocab=-(-spec.vocab // tp),
        experts=x,
    )


@dataclass(frozen=True)
class Split:
    """A model over `tp` ranks, as the one of them with this `index` sees it; its experts over `ep` x `etp`, of which
    this one has the places `expert` and `part`."""

    spec: ModelSpec
    tp: int = 1
    index: int = 0
    sp: bool = False
    ep: int = 1
    etp: int = 1
    expert: int = 0
    part: int = 0

    @classmethod
    def of(cls, spec: ModelSpec, s: Strategy, tp: int = 0, ep: int = 0, etp: int = 0) -> Split:
        """As a strategy splits it, seen from a place along each axis."""
        return cls(spec, s.tp, tp, s.sp, s.ep, s.etp, ep, etp)

    @property
    def local(self) -> ModelSpec:
        return local(self.spec, self)

    @property
    def whole(self) -> bool:
        """Whether a rank holds all of everything."""
        return self.tp == self.ep == self.etp == 1

    @property
    def first_token(self) -> int:
        """The first row of the vocabulary that is this rank's."""
        return min(self.index * self.local.vocab, self.spec.vocab)

    @property
    def tokens(self) -> int:
        """How many rows of the vocabulary are this rank's: the rest of its rows are none."""
        return min(self.local.vocab, self.spec.vocab - self.first_token)

    def held(self, fqn: str) -> Held:
        """What this rank holds of a parameter."""
        return _held(self)[fqn]

    def at(self, index: int) -> Split:
        """As another rank of tp sees it."""
        return replace(self, index=index)

    def at_experts(self, index: int) -> Split:
        """As another rank of those sees it that hold all experts together, ep x etp of them."""
        return replace(self, expert=index // self.etp, part=index % self.etp)


@cache
def _held(split: Split) -> dict[str, Held]:
    local_ones = parameters(split.local)
    return {p.fqn: _box(split, p, own) for p, own in zip(parameters(split.spec), local_ones, strict=True)}


def _box(split: Split, p: Parameter, own: Parameter) -> Held:
    tp, index = split.tp, split.index
    if p.of_experts:
        inside = {"expert_column": 1, "expert_column_bias": 1, "expert_row": 2}.get(p.role)
        at = {0: split.expert, inside: split.part}
        return Held(p, own.shape, tuple(at.get(i, 0) * n for i, n in enumerate(own.shape)), own.shape)
    if p.role in ("embedding", "head"):
        return Held(p, own.shape, (split.first_token, 0), (split.tokens, *p.shape[1:]))
    dim = {"column": 0, "column_bias": 0, "row": 1, "sink": 0}.get(p.role)
    if dim is None:
        # The norms inside attention see this rank's heads, and so does what all heads come from; a router sees the
        # tokens that this rank routes; all others see what all ranks see.
        own_heads = p.role in ("latent", "latent_bias") or (p.role == "norm" and ".attention." in p.fqn)
        some = split.sp or own_heads or p.role in ("router", "router_bias")
        return Held(p, p.shape, (0,) * len(p.shape), p.shape, tp, some)
    copies = own.shape[dim] * tp // p.shape[dim]
    offsets = tuple(index // copies * n if i == dim else 0 for i, n in enumerate(own.shape))
    return Held(p, own.shape, offsets, own.shape, copies, copies > 1)


def partial(split: Split) -> dict[str, int]:
    """By the name of every parameter whose gradient is a sum over ranks that hold copies of it: how many different
    boxes the ranks hold of it."""
    if split.tp == 1:
        return {}
    return {fqn: split.tp // held.copies for fqn, held in _held(split).items() if held.partial}


def require_split(spec: ModelSpec, s: Degrees) -> None:
    """Refuse so many ranks where the layers do not fall into equal parts."""
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
            "key heads are held whole, by one rank or by several",
        )
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
        raise InputError("strategy.etp", s.etp, "experts with biases are not split inside", "use ep")
