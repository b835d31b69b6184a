"""Updates of whole matrices that are sharded over ranks, by the exchanges of schedule/gradients/whole_matrices.py.

    optimizer   all-to-all of every piece's direction to the owner of its matrix
                the owner orthogonalises its matrices, one after another
                all-to-all of the results back, in the same pieces

Dense layers exchange over dp_shard, cp and tp, as far as these split state; experts over edp and etp.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.schedule.gradients.whole_matrices import Exchange, Matrix
from phalanx.schedule.layout import RankView
from phalanx.spec.strategy.split import Split

P = TypeVar("P", bound=tuple[int, ...])
Read = Callable[[str, int, int], Tensor]
"""Returns the direction of elements [start, stop) of this rank's piece of a parameter."""
Compute = Callable[[list[Tensor]], Tensor]
"""Takes a whole matrix out of its list and returns the result."""
Write = Callable[[str, int, tuple[int, int], Tensor], None]
"""Receives the result for elements from `start` on of this rank's piece of a parameter, of a matrix of this shape."""


class WholeMatrices:
    """Gathers the matrices of a rank's parameters for an update, and scatters the results.

    `starts`: the first element that this rank updates of each parameter, where its masters are pieces."""

    def __init__(self, view: RankView, comm: Comm, starts: dict[str, int]) -> None:
        self._comm, self._view, self._starts = comm, view, starts
        self._dtype = DTYPES[view.job.precision.compute]

    def update(self, read: Read, compute: Compute, write: Write) -> None:
        """Pass the directions from `read` to `compute`, a whole matrix at a time, and its results to `write`; all
        ranks together."""
        for x in self._view.exchanges:
            if x.axis:
                self._exchanged(x, read, compute, write)
                continue
            for m in x.matrices:
                whole = [self._direction(read, m, 0, m.elements).to(self._dtype).view(m.shape)]
                write(m.fqn, m.expert * m.elements, m.shape, compute(whole).reshape(-1))

    def _exchanged(self, x: Exchange, read: Read, compute: Compute, write: Write) -> None:
        """Update the matrices of one exchange. Messages are allocated only for this time, when activations have no
        memory."""
        directions, owned = self._empty(x.held_elements), self._empty(x.owned_elements)
        # To the owners: pieces lie by owner here, and by sender there.
        pieces, received = list(x.pieces(x.rank)), list(x.received(x.rank))
        for place, (number, start, stop) in _placed(directions, pieces):
            place.copy_(self._direction(read, x.matrices[number], start, stop))
        sends = _counts(x, ((x.owners[number], stop - start) for number, start, stop in pieces))
        gets = _counts(x, ((sender, stop - start) for sender, _, start, stop in received))
        self._send(x, owned, directions, sends, gets)
        # Owned matrices, one after another.
        parts: dict[int, list[tuple[int, int, int, Tensor]]] = {}
        for place, (sender, number, start, stop) in _placed(owned, received):
            parts.setdefault(number, []).append((x.places[sender][1], start, stop, place))
        for number, its in parts.items():
            result = compute([self._joined(x.matrices[number], its)])
            self._cut(x.matrices[number], its, result)
            del result
        # And back.
        self._send(x, directions, owned, gets, sends)
        for place, (number, start, _) in _placed(directions, pieces):
            m = x.matrices[number]
            write(m.fqn, m.expert * m.elements + start - self._starts.get(m.fqn, 0), m.shape, place)

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._comm.world.device)

    def _direction(self, read: Read, m: Matrix, start: int, stop: int) -> Tensor:
        """Return the direction of elements [start, stop) of this rank's part of a matrix, flat."""
        begins = m.expert * m.elements - self._starts.get(m.fqn, 0)
        return read(m.fqn, begins + start, begins + stop)

    def _send(self, x: Exchange, target: Tensor, source: Tensor, sends: list[int], gets: list[int]) -> None:
        self._comm.all_to_all(target, source, x.axis, unit=x.unit, phase="opt", sends=sends, receives=gets).wait()

    def _box(self, m: Matrix, part: int) -> tuple[slice, slice]:
        """Return the place in a matrix of the part of tp rank `part` (for an expert: etp rank)."""
        rows, columns = _seen_from(self._view.split, part).box(m.fqn).offsets[-2:]
        return slice(rows, rows + m.held[0]), slice(columns, columns + m.held[1])

    def _joined(self, m: Matrix, its: list[tuple[int, int, int, Tensor]]) -> Tensor:
        """Assemble a whole matrix from its pieces."""
        if m.shape == m.held:
            whole = its[0][3].new_empty(m.elements)
            for _, start, stop, piece in its:
                whole[start:stop].copy_(piece)
            return whole.view(m.shape)
        whole = its[0][3].new_empty(m.shape)
        for part in dict.fromkeys(part for part, *_ in its):
            local = whole.new_empty(m.elements)
            for of_part, start, stop, piece in its:
                if of_part == part:
                    local[start:stop].copy_(piece)
            whole[self._box(m, part)] = local.view(m.held)
        return whole

    def _cut(self, m: Matrix, its: list[tuple[int, int, int, Tensor]], result: Tensor) -> None:
        """Write a result into the pieces in which its matrix arrived."""
        for part in dict.fromkeys(part for part, *_ in its):
            local = (result if m.shape == m.held else result[self._box(m, part)]).reshape(-1)
            for of_part, start, stop, piece in its:
                if of_part == part:
                    piece.copy_(local[start:stop])


@cache
def _seen_from(split: Split, part: int) -> Split:
    """Return a split as seen from another rank of tp, and of etp."""
    return replace(split, index=part % split.tp, part=part % split.etp)


def _placed(flat: Tensor, pieces: Iterable[P]) -> Iterator[tuple[Tensor, P]]:
    """Yield each piece with its place in a flat buffer, where they lie one after another. The last two numbers of a
    piece are its start and stop."""
    begins = 0
    for piece in pieces:
        size = piece[-1] - piece[-2]
        yield flat[begins : begins + size], piece
        begins += size


def _counts(x: Exchange, sizes: Iterable[tuple[int, int]]) -> list[int]:
    """Sum (rank, elements) pairs into the number of elements for each rank of the group."""
    counts = [0] * len(x.places)
    for rank, size in sizes:
        counts[rank] += size
    return counts
