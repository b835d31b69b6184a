"""Sublayer, Block and Architecture: how operators make a model.

Architecture   embedding, blocks, further depths (multi-token prediction), head
Block          what one pass, one gather of ZeRO-3 and one recomputation take at once
Sublayer       residual stream -> norm -> operators -> (norm) -> added to the stream
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile, takewhile
from typing import Literal, TypeVar

from phalanx.spec.model.blocks.operators import (
    Activate,
    Attend,
    Conv,
    Dim,
    Linear,
    Norm,
    Operator,
    Output,
    Router,
    Scan,
    Weight,
    whole,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Sublayer:
    """A straight line of operators between the residual stream and what is added to it."""

    name: str
    """Prefix of its parameters: attention, mlp, mamba."""
    norm: Norm | None
    """Norm of the stream before it; None: it reads the previous sublayer's normed input, or the stream itself."""
    operators: tuple[Operator, ...]
    after: Norm | None = None
    """Norm of what it adds."""
    leaves: Literal["sum", "complete"] = "sum"
    """Whether what it adds is a sum over tp ranks, or complete on each (experts)."""
    shared: bool = False
    """Whether a shared expert adds a sum over tp ranks to a complete result."""

    def first(self, kind: type[T]) -> T | None:
        """Return its first operator of a kind; None if it has none."""
        return next((op for op in self.operators if isinstance(op, kind)), None)

    def core(self) -> tuple[Operator, ...]:
        """Return the operators that selective recomputation repeats: attention's core and what follows it, before the
        last product. A recurrence always computes its inside again (nn/recurrences/recurrence.py)."""
        begins = dropwhile(lambda op: not isinstance(op, Attend), self.operators)
        return tuple(takewhile(lambda op: not isinstance(op, Linear), begins))

    @property
    def scaled(self) -> bool:
        """Whether a gate scales what its shared expert adds, before that is added."""
        return any(isinstance(op, Activate) and "y" in op.x for op in self.operators)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Yield its parameters with their names inside the block, in the order of gradient buckets: norm, operators,
        what is late, norm after."""
        for w in self.norm.weights if self.norm else ():
            yield w.name, w
        inside = [w for op in self.operators for w in getattr(op, "weights", ())]
        for w in sorted(inside, key=lambda w: w.late):
            yield f"{self.name}.{w.name}", w
        for w in self.after.weights if self.after else ():
            yield w.name, w


@dataclass(frozen=True)
class Block:
    """Sublayers in order."""

    sublayers: tuple[Sublayer, ...]
    residual: Literal["serial", "parallel", "parallel_one_norm"] = "serial"
    """serial: each sublayer reads what the one before it left. parallel: all read the block's input, through a norm
    each or one."""
    streams: int = 1
    """Copies of the residual stream (hyper-connections: Zhu et al. 2024)."""
    mixing: tuple[Weight, ...] = ()
    """Parameters of hyper-connections."""

    def first(self, kind: type[T]) -> T | None:
        """Return its first operator of a kind; None if it has none."""
        return next((op for s in self.sublayers if (op := s.first(kind)) is not None), None)

    def all(self, kind: type[T]) -> list[T]:
        """Return its operators of a kind, in order."""
        return [op for s in self.sublayers for op in s.operators if isinstance(op, kind)]

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Yield its parameters with their names inside it, in the order of gradient buckets."""
        for s in self.sublayers:
            yield from s.weights()
        for w in self.mixing:
            yield w.name, w

    @cached_property
    def label(self) -> str:
        """Its sublayers in words, such as `attention (window 1,024) + experts`."""
        return " + ".join(_label(s) for s in self.sublayers)


_SCANS = {
    "delta": "gated delta net",
    "ssd": "Mamba-2",
    "lightning": "lightning attention",
    "selective": "Mamba",
    "channel_delta": "Kimi delta attention",
}
"""Mechanisms by the kind of their recurrence, in words."""


def _label(s: Sublayer) -> str:
    """Return a sublayer in words."""
    if (attend := s.first(Attend)) is not None:
        kind = "latent attention" if not attend.cache_splits else "attention"
        limits = [f"window {attend.window:,}"] if attend.window else []
        limits += [f"a key of {attend.compressed:,} tokens"] if attend.compressed else []
        limits += [f"top {attend.top:,} keys"] if attend.top else []
        return f"{kind} ({', '.join(limits)})" if limits else kind
    if (scan := s.first(Scan)) is not None:
        return _SCANS[scan.kind]
    if (conv := s.first(Conv)) is not None:
        return f"short convolution ({conv.taps} taps)"
    return "experts" if s.first(Router) is not None else s.name


@dataclass(frozen=True)
class Architecture:
    """A model. Equal blocks are one object, so that readers can count kinds."""

    vocab: Dim
    hidden: int
    max_seq: int
    blocks: tuple[Block, ...]
    last_norm: Norm
    """The norm before the head."""
    learned_positions: bool = False
    tied: bool = False
    depths: tuple[Block, ...] = ()
    """Blocks of multi-token prediction, which run after the others."""
    end_weights: tuple[Weight, ...] = ()
    """Further parameters of the head."""

    @cached_property
    def kinds(self) -> dict[Block, int]:
        """The distinct blocks, in the order of their first occurrence, with how many there are of each."""
        counts: dict[Block, int] = {}
        for block in self.blocks:
            counts[block] = counts.get(block, 0) + 1
        return counts


def latent_norm(x: str, y: str, name: str, width: int) -> Norm:
    """Return the RMS norm, with weights `name.weight`, of a vector x of `width` inside a sublayer, written to y."""
    return Norm(x, Output(y, Dim(1, width)), "rms", (Weight(f"{name}.weight", (whole(width),), "norm"),), inside=True)


def stream_norm(hidden: int, kind: Literal["rms", "layer"], bias: bool, name: str, weights: bool = True) -> Norm:
    """Return a norm of the residual stream: without `weights`, with a weight, or with a bias too for LayerNorm."""
    names = ([f"{name}.weight"] + [f"{name}.bias"] * (kind == "layer" and bias)) if weights else []
    of_norm = tuple(Weight(n, (whole(hidden),), "norm") for n in names)
    return Norm("x", Output("n", Dim(1, hidden), "own"), kind, of_norm)


def products_of(s: Sublayer) -> list[Linear]:
    """Return a sublayer's products, in order."""
    return [op for op in s.operators if isinstance(op, Linear)]
