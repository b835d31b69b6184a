"""Sizes of a model that determine the price of a step, as plain numbers: ends and kinds of blocks (Shape)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from phalanx.cost.hardware.columns import Column, gather
from phalanx.cost.ledger.block_kinds import counted_kinds
from phalanx.cost.ledger.kind import BlockKind
from phalanx.cost.ledger.magnitudes import NO_ADAPTERS, NO_MAGNITUDES, AdaptedWeights, Magnitudes
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.spec import ModelSpec, parameters


@dataclass(frozen=True)
class Shape:
    """A model in elements. `tied`: 1 if the head shares the embedding. Parameters of the embedding, and of the head
    (0 if tied)."""

    hidden: Column
    vocab: Column
    tied: Column
    rms: Column
    """1: the last norm keeps one sum per token; 0: mean and variance."""
    embedding_params: Column
    head_params: Column
    kinds: tuple[BlockKind, ...]
    """Kinds of blocks, those with experts last."""
    embed_whole: Column = 0.0
    """Parameters of the embedding replicated over tp: learned positions."""
    head_whole: Column = 0.0
    """Parameters of the head replicated over tp: the last norm."""
    depths: Column = 0.0
    """Depths of multi-token prediction, each of which computes the head again; their blocks are among `kinds`."""
    adapters: Column = 0.0
    """Parameters of a block's adapters on average, if only these are trained; else 0."""
    expert_adapters: Column = 0.0
    """Parameters of the adapters of all routed experts of a block on average, which expert parallelism divides."""
    adapted: AdaptedWeights = NO_ADAPTERS
    """Sizes of the weights that have adapters."""
    magnitudes: Magnitudes = NO_MAGNITUDES
    """Sizes of adapted weights whose magnitudes are trained."""
    root_params: Column = -1.0
    """Parameters of the unit around all others, if FSDP wraps other modules than blocks (units.py); -1: blocks."""
    unit_params: Column = 0.0
    """Parameters of the largest other unit."""
    unit_count: Column = 0.0
    """Number of the other units."""

    @property
    def layers(self) -> Column:
        """Number of blocks."""
        return sum(kind.count for kind in self.kinds)

    @property
    def wraps_blocks(self) -> Column:
        """Whether each block is a unit."""
        return np.asarray(self.root_params) < 0

    @property
    def params(self) -> Column:
        """All parameters."""
        return sum(kind.count * kind.all_params for kind in self.kinds) + self.ends

    @property
    def ends(self) -> Column:
        """Parameters of embedding and head."""
        return self.embedding_params + self.head_params

    @property
    def of_block(self) -> Column:
        """Parameters of a block, on average."""
        return (self.params - self.ends) / self.layers

    @property
    def routes(self) -> Column:
        """1 where any block has experts."""
        return self.most(lambda kind: kind.routes)

    def mean(self, of: Callable[[BlockKind], Column]) -> Column:
        """Return the mean of a number over all blocks."""
        return sum(kind.count / self.layers * of(kind) for kind in self.kinds)

    def most(self, of: Callable[[BlockKind], Column]) -> Column:
        """Return the largest of a number over all kinds."""
        largest = of(self.kinds[0])
        for kind in self.kinds[1:]:
            largest = np.maximum(largest, of(kind))
        return largest


@lru_cache(maxsize=64)  # called for every set of options in a search
def shape(spec: ModelSpec) -> Shape:
    """Return the Shape of a model. Raises InputError for blocks whose operators have no price."""
    model = architecture(spec)
    kinds, _ = counted_kinds(model.blocks, model.hidden)
    ends = {"embed": 0.0, "head": 0.0}
    whole = {"embed": 0.0, "head": 0.0}
    for p in parameters(spec):
        unit = "embed" if p.unit == "model" else p.unit
        if unit in ends:
            ends[unit] += p.numel
            whole[unit] += p.numel * (p.role not in ("embedding", "head"))
    return Shape(
        hidden=model.hidden,
        vocab=model.vocab.size,
        tied=float(model.tied),
        rms=float(model.last_norm.kind == "rms"),
        embedding_params=ends["embed"],
        head_params=ends["head"],
        kinds=kinds,
        embed_whole=whole["embed"],
        head_whole=whole["head"],
    )


@lru_cache(maxsize=64)  # as above
def kinds_of_blocks(spec: ModelSpec, depths: int = 0) -> tuple[int, ...]:
    """Return for each block the index of its kind in `Shape.kinds`; `depths` further blocks are of the last kind."""
    model = architecture(spec)
    kinds, places = counted_kinds(model.blocks, model.hidden)
    return (*places, *[len(kinds) - 1] * depths)


def padded_shape(shape: Shape, tp: Column, multiple: Column) -> Shape:
    """Return a Shape whose rows of embedding and head on each of tp ranks are rounded up to a multiple; 0: they are
    not rounded."""
    if not np.any(multiple):
        return shape
    rounded = np.maximum(multiple, 1) * tp
    vocab = np.where(np.asarray(multiple) > 0, np.ceil(shape.vocab / rounded) * rounded, shape.vocab)
    more = (vocab - shape.vocab) * shape.hidden
    return replace(
        shape,
        vocab=vocab,
        embedding_params=shape.embedding_params + more,
        head_params=shape.head_params + more * (1 - np.asarray(shape.tied)),
    )


def gather_shapes(shapes: Sequence[Shape]) -> Shape:
    """Return one Shape of columns over models. It has as many kinds as the model with most; a model with fewer kinds
    has its last one again, with a count of 0."""
    most = max(len(s.kinds) for s in shapes)
    equal: dict[int, Shape] = {}
    for s in shapes:
        if id(s) not in equal:
            none = replace(s.kinds[-1], count=0.0)
            equal[id(s)] = replace(s, kinds=(*s.kinds, *[none] * (most - len(s.kinds))))
    return gather([equal[id(s)] for s in shapes])
