"""Reductions other than sums: the algebraic properties that a schedule requires of the combining function.

The proof counts contributions, so it holds for any associative and commutative function. A rank that adds computes
f(what it has, what arrives). `operands` follows the order of the contributions through a schedule: where every result
reads 0, 1, ..., p-1, associativity is enough (a binomial tree, say), else the function must be commutative too (a
ring starts each chunk at another rank).

A function is examined on drawn integers: this cannot prove associativity, but it refuses a function with a
counterexample.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.schedule.collectives.ir import Schedule
from phalanx.schedule.collectives.proof import prove, run
from phalanx.spec.errors import Unproved

Combine = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""Combines two arrays of equal shape elementwise."""
_DRAWN = 512


@dataclass(frozen=True)
class Needs:
    """Algebraic properties that a schedule requires of a reduction."""

    commutative: bool
    """Whether some result combines the contributions in an order other than that of the ranks."""
    example: tuple[int, ...]
    """The order of contributions in one result: the first that is not 0, 1, ..., p-1, if any."""


def operands(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the distinct orders of contributions over all results, after proving the schedule. Raises Unproved."""
    prove(schedule)
    symbolic = run(schedule)
    atoms = len(symbolic.edges) - 1
    orders: list[list[tuple[int, ...]]] = [[() for _ in range(atoms)] for _ in range(schedule.ranks)]
    for rank, atom in np.argwhere(symbolic.positions(schedule.start)).tolist():
        orders[rank][atom] = (rank,)
    for number in range(schedule.rounds):
        before = [list(row) for row in orders]
        for i in np.nonzero(schedule.round == number)[0]:
            source, destination = int(schedule.source[i]), int(schedule.destination[i])
            for atom in range(*symbolic.span(int(schedule.offset[i]), int(schedule.length[i])).indices(atoms)[:2]):
                sent = before[source][atom]
                orders[destination][atom] = orders[destination][atom] + sent if schedule.reduces[i] else sent
    ends = np.argwhere(symbolic.positions(schedule.end)).tolist()
    return list(dict.fromkeys(orders[rank][atom] for rank, atom in ends))


def needs(schedule: Schedule) -> Needs:
    """Return the properties that a reducing schedule requires of its function. Raises Unproved."""
    orders = operands(schedule)
    moved = [order for order in orders if order != tuple(range(schedule.ranks))]
    return Needs(bool(moved), (moved or orders)[0])


def examine(combine: Combine, algebra: Needs, seed: int = 0) -> None:
    """Require of a function, on drawn integers, the algebra that a schedule needs. Raises Unproved with a
    counterexample."""
    draw = np.random.default_rng(seed)
    a, b, c = draw.integers(-9, 10, (3, _DRAWN))
    left, right = combine(combine(a, b), c), combine(a, combine(b, c))
    if (left != right).any():
        i = int(np.argmax(left != right))
        x, y, z = a[i], b[i], c[i]
        raise Unproved(f"not associative: f(f({x}, {y}), {z}) = {left[i]}, but f({x}, f({y}, {z})) = {right[i]}")
    if algebra.commutative and (combine(a, b) != combine(b, a)).any():
        i = int(np.argmax(combine(a, b) != combine(b, a)))
        order = ", ".join(map(str, algebra.example[:8]))
        raise Unproved(
            f"not commutative: f({a[i]}, {b[i]}) = {combine(a, b)[i]}, but f({b[i]}, {a[i]}) = {combine(b, a)[i]}; "
            f"this algorithm combines ranks in the order {order}"
        )
