"""A kind of operation issued by a rank, and its counts: the elements of the ledger's rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.kind import BlockKind

Unit = int | Literal["embed", "head", "rank"]
"""Issuer of an operation: a block of a kind, by its place in Shape.kinds; embedding, head; or a rank as a whole."""


@dataclass(frozen=True)
class Flow:
    """Equal operations of one rank. `bytes`: of one, as Event.bytes counts. `counts` by phase: F, B, R (recomputation
    repeats a forward pass) in one micro-batch of one `unit`; of a unit `rank`, in a step."""

    axis: str
    op: str
    what: str
    unit: Unit
    ranks: Column
    """Group size; 2 for a message."""
    stride: Column
    """Distance in ranks from one member of the group to the next."""
    bytes: Column
    counts: Mapping[str, Column]
    weight_gathers: Column = 0.0
    """Number of B's operations whose result only a weight gradient reads, overlapped with the preceding product."""
    chain: Column = 1.0
    """Ranks of the chain along which messages pass, `stride` apart; the slowest hop sets the pace of all. 1: `stride`
    is already the slowest hop's."""

    def count(self, phases: str = "FBR") -> Column:
        """Return the number of operations in some phases."""
        return sum((self.counts.get(phase, 0.0) for phase in phases), 0.0)


@dataclass(frozen=True)
class UnitCount:
    """Number of units on a rank, or on several ranks together: blocks of each kind, embedding, head."""

    blocks: tuple[Column, ...]
    embed: Column = 0.0
    head: Column = 0.0

    @property
    def all_blocks(self) -> Column:
        """Blocks of all kinds."""
        return sum(self.blocks)

    def of(self, unit: Unit) -> Column:
        """Return the number of units of a kind."""
        if isinstance(unit, int):
            return self.blocks[unit]
        return 1.0 if unit == "rank" else getattr(self, unit)


def whole_model(kinds: Sequence[BlockKind]) -> UnitCount:
    """Return every unit of a model once."""
    return UnitCount(tuple(kind.count for kind in kinds), 1.0, 1.0)


def some_blocks(kinds: Sequence[BlockKind], blocks: Column, embed: Column = 0.0, head: Column = 0.0) -> UnitCount:
    """Return `blocks` blocks of a model, as many of each kind as the model has on average, and these ends."""
    layers = sum(kind.count for kind in kinds)
    return UnitCount(tuple(blocks * (kind.count / layers) for kind in kinds), embed, head)


@dataclass(frozen=True)
class Total:
    """Operations and bytes of a step."""

    count: Column
    bytes: Column


def totals(flows: list[Flow], held: UnitCount, micro_batches: Column) -> dict[tuple[str, str], Total]:
    """Return the totals of a step by (axis, operation)."""
    result: dict[tuple[str, str], Total] = {}
    for flow in flows:
        times = held.of(flow.unit) * np.where(flow.unit == "rank", 1.0, micro_batches)
        count = np.where(np.asarray(flow.ranks) > 1, flow.count() * times, 0.0)
        before = result.get((flow.axis, flow.op), Total(0.0, 0.0))
        result[flow.axis, flow.op] = Total(before.count + count, before.bytes + count * flow.bytes)
    return result
