"""What each tensor-parallel rank holds of the model (Shoeybi et al. 2019, "Megatron-LM").

    column          rows of the matrix (out, in), with their biases: whole heads, or a part of the MLP's width
    row             columns of the matrix; its bias whole, for it is added once, to the sum
    embedding, head rows: a part of the vocabulary; the last ranks' is filled up with rows of zeros
    norms, position whole; with sequence parallelism each rank's gradient is of its own tokens

Where there are fewer key heads than ranks, neighbouring ranks hold the same one. What a rank holds is a model like
the whole one, with fewer heads and less of the MLP and of the vocabulary: `local`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from phalanx.spec.errors import InputError
from phalanx.spec.model import ModelSpec, Parameter, parameters


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


@cache
def local(spec: ModelSpec, tp: int) -> ModelSpec:
    """The model that each of `tp` ranks holds: all of the same shapes."""
    if tp == 1:
        return spec
    kv_heads = max(1, spec.kv_heads // tp)
    return replace(spec, heads=spec.heads // tp, kv_heads=kv_heads, ffn=spec.ffn // tp, vocab=-(-spec.vocab // tp))


@dataclass(frozen=True)
class Split:
    """A model over `tp` ranks, as the one of them with this `index` sees it."""

    spec: ModelSpec
    tp: int = 1
    index: int = 0
    sp: bool = False

    @property
    def local(self) -> ModelSpec:
        return local(self.spec, self.tp)

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
        """As another rank sees it."""
        return replace(self, index=index)


@cache
def _held(split: Split) -> dict[str, Held]:
    local_ones = parameters(split.local)
    return {p.fqn: _box(split, p, own) for p, own in zip(parameters(split.spec), local_ones, strict=True)}


def _box(split: Split, p: Parameter, own: Parameter) -> Held:
    tp, index = split.tp, split.index
    if p.role in ("embedding", "head"):
        return Held(p, own.shape, (split.first_token, 0), (split.tokens, *p.shape[1:]))
    dim = {"column": 0, "column_bias": 0, "row": 1}.get(p.role)
    if dim is None:
        # The norms inside attention see this rank's heads; all others see what all ranks see.
        some = split.sp or (p.role == "norm" and ".attention." in p.fqn)
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


def require_split(spec: ModelSpec, tp: int) -> None:
    """Refuse so many tensor-parallel ranks where the model does not fall into equal parts."""
    for name in ("heads", "ffn"):
        if getattr(spec, name) % tp:
            fits = math.gcd(spec.heads, spec.ffn)
            raise InputError(
                "strategy.tp", tp, f"does not divide model.{name} = {getattr(spec, name)}", f"use a divisor of {fits}"
            )
    if spec.kv_heads % tp and tp % spec.kv_heads:
        raise InputError(
            "strategy.tp",
            tp,
            f"neither divides model.kv_heads = {spec.kv_heads} nor is a multiple of it",
            "key heads are held whole, by one rank or by several",
        )
