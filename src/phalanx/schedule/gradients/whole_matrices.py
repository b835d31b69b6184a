"""Exchange of sharded matrices for an optimizer that updates whole matrices.

A rank updates its shard of its part of a layer. An optimizer that orthogonalises a matrix (Muon) reads all of it. So
every matrix of a hidden layer has an owner among the ranks that hold parts of it, and twice in an update each of them
sends in one all-to-all

    to the owners       its piece of each matrix's direction
    from the owners     the owner's result, cut in the same pieces

Owners are dealt so that all have about the same products to compute. Ranks that hold the same piece (copies of a key
head over tp) all send it. Replicas of a shard (HSDP; data parallelism without shards) do all of this side by side.

Each rank sends a shard of the parameters, in the compute type; an all-gather as in ZeRO would move as many times more
as there are shards. Reference: Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.3, where every rank
gathers and updates every matrix.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.schedule.gradients.buckets import Bucket
from phalanx.spec.optimizers import UpdateRule
from phalanx.spec.strategy.mesh import Mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import Split

MATRICES = "matrices"
"""The unit of the all-to-alls in events."""


@dataclass(frozen=True)
class Matrix:
    """One matrix of a hidden layer: a parameter, or one expert's part of it.

    `begins`: its first element in the flat buffer of bucket `bucket`, whose shards have `part` elements."""

    fqn: str
    expert: int
    shape: tuple[int, int]
    """(out, in), not split over ranks."""
    held: tuple[int, int]
    """(out, in) of this rank's part, before it is cut in shards."""
    bucket: int
    begins: int
    part: int

    @property
    def elements(self) -> int:
        """Number of elements of one rank's part, before it is cut in shards."""
        return self.held[0] * self.held[1]

    def piece(self, shard: int) -> tuple[int, int]:
        """Return the elements [start, stop) of a rank's part that are in a shard of its bucket."""
        low = shard * self.part - self.begins
        return max(0, low), max(0, min(self.elements, low + self.part))

    def shards(self) -> range:
        """Return the shards that contain elements of the matrix."""
        return range(self.begins // self.part, -(-(self.begins + self.elements) // self.part))


@dataclass(frozen=True)
class Exchange:
    """Exchange of matrices over one group of ranks: the owner of each matrix, and the pieces that each rank sends.

    `axis`: the mesh axis of the group; "" if each rank has whole matrices and updates its own. `places`: (shard, part
    of the layer) of each rank of the group, in order; `rank`: the index of this one."""

    axis: str
    experts: bool
    matrices: tuple[Matrix, ...]
    places: tuple[tuple[int, int], ...]
    rank: int
    rule: UpdateRule

    @property
    def unit(self) -> str:
        """The unit of its events."""
        return f"{MATRICES}, experts" if self.experts else MATRICES

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Index of the rank that computes each matrix: matrices are assigned largest first, each to the least loaded
        rank."""
        flops = [self.rule.product_flops(*m.shape) for m in self.matrices]
        loads = [(0, i) for i in range(len(self.places))]
        owner = [0] * len(flops)
        for number in sorted(range(len(flops)), key=lambda i: -flops[i]):
            load, first = heapq.heappop(loads)
            owner[number] = first
            heapq.heappush(loads, (load + flops[number], first))
        return tuple(owner)

    def owned(self, rank: int) -> tuple[int, ...]:
        """Return the matrices that a rank of the group computes."""
        return tuple(i for i, owner in enumerate(self.owners) if owner == rank)

    def pieces(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield (matrix, start, stop) of the pieces held by a rank of the group, sorted by owner."""
        shard = self.places[rank][0]
        for number in sorted(range(len(self.matrices)), key=lambda i: self.owners[i]):
            start, stop = self.matrices[number].piece(shard)
            if start < stop:
                yield number, start, stop

    def received(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (sender, matrix, start, stop) of the pieces that an owner receives, sorted by sender."""
        by_shard: dict[int, list[int]] = {}
        for number in self.owned(rank):
            for shard in self.matrices[number].shards():
                by_shard.setdefault(shard, []).append(number)
        for sender, (shard, _) in enumerate(self.places):
            for number in by_shard.get(shard, ()):
                yield sender, number, *self.matrices[number].piece(shard)

    @cached_property
    def _sent(self) -> list[tuple[int, int]]:
        """Elements that each rank sends to owners, and returns as an owner."""
        held, owned = Counter[int](), Counter[int]()
        copies = len({part for _, part in self.places})
        for m, owner in zip(self.matrices, self.owners, strict=True):
            owned[owner] += m.elements * copies
            for shard in m.shards():
                start, stop = m.piece(shard)
                held[shard] += stop - start
        return [(held[shard], owned[rank]) for rank, (shard, _) in enumerate(self.places)]

    @property
    def held_elements(self) -> int:
        """Elements that this rank sends to owners and receives back."""
        return self._sent[self.rank][0] if self.axis else 0

    @property
    def owned_elements(self) -> int:
        """Elements that this rank receives as an owner and returns."""
        return self._sent[self.rank][1] if self.axis else 0

    def fullest(self) -> Exchange:
        """Return this exchange from the viewpoint of the rank that sends most."""
        most = max(range(len(self.places)), key=lambda rank: sum(self._sent[rank]))
        return replace(self, rank=most)

    @cached_property
    def most_flops(self) -> int:
        """FLOPs of the most loaded rank, for which all others wait."""
        loads = [0] * len(self.places)
        for m, owner in zip(self.matrices, self.owners, strict=True):
            loads[owner] += self.rule.product_flops(*m.shape)
        return max(loads)

    def temporary_bytes(self, compute: int, master: int) -> int:
        """Return the peak of temporary bytes in this rank's update, for elements of `compute` and `master` bytes:
        messages; and while a matrix is orthogonalised, its old and new value and one square, or a direction before
        its cast."""
        result = 0
        for i in self.owned(self.rank):
            rows, columns = self.matrices[i].shape
            n, square = rows * columns, min(rows, columns) ** 2
            result = max(result, (2 * n + square) * compute)
            if not self.axis and compute != master:
                result = max(result, n * (compute + master))
        longest = max((stop - start for _, start, stop in self.pieces(self.rank)), default=0)
        return max(result, longest * master) + (self.held_elements + self.owned_elements) * compute


def exchanges(
    cut: Sequence[Bucket], split: Split, s: Strategy, grid: Mesh, rank: int, rule: UpdateRule
) -> list[Exchange]:
    """Return the exchanges of a rank with buckets `cut`: of dense layers, and of experts if they reduce over other
    ranks; none if nothing needs whole matrices."""
    if not rule.whole:
        return []
    result = []
    for experts in (False, True):
        matrices = tuple(m for b in cut if b.experts == experts for m in _matrices_of(b, split, s))
        if not matrices:
            continue
        if experts:
            sharded, part_axis = "edp" if s.shards > 1 and s.edp > 1 else "", "etp" if s.etp > 1 else ""
            axis = "+".join(filter(None, (sharded, part_axis)))
        else:
            sharded, part_axis = (grid.shard_axis if s.shards > 1 else ""), grid.name("tp")
            axis = grid.name("dp_shard", "cp", "tp") if sharded else part_axis
        ranks = grid.group_of(rank, axis) if axis else (rank,)
        shard, part = grid.along(sharded), grid.along(part_axis)
        places = tuple((int(shard[r]), int(part[r])) for r in ranks)
        result.append(Exchange(axis, experts, matrices, places, ranks.index(rank), rule))
    return result


def _matrices_of(b: Bucket, split: Split, s: Strategy) -> Iterator[Matrix]:
    """Yield the matrices of hidden layers in a bucket, in its order."""
    part = b.padded(s) // b.parts(s) if s.shards > 1 else b.padded(s)
    begins = 0
    for p in b.parameters:
        shape = split.box(p.fqn).parameter.shape[-2:]
        for expert in range(p.matrices):
            size = p.numel // p.matrices
            yield Matrix(p.fqn, expert, shape, p.shape[-2:], b.index, begins + expert * size, part)  # type: ignore[arg-type]
        begins += p.numel
