"""Every collective by operation and algorithm (algorithms.py), for any number of ranks and any size: `build`. `sweep`
proves them for many world sizes, chunkings and roots.

Some schedules are derived: a reduce is a broadcast reversed, an all-gather a reduce-scatter reversed, and some
all-reduces chain two other collectives.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.schedule.collectives.algorithm_file import algorithm_file
from phalanx.schedule.collectives.algorithms import (
    binomial_broadcast,
    binomial_scatter,
    bruck_all_gather,
    bruck_all_to_all,
    chain_broadcast,
    double_tree_all_reduce,
    doubling_all_reduce,
    flat_broadcast,
    flat_scatter,
    halving_reduce_scatter,
    hierarchical_all_reduce,
    pairwise_all_to_all,
    pairwise_reduce_scatter,
    rabenseifner_all_reduce,
    ring_all_reduce,
    ring_reduce_scatter,
)
from phalanx.schedule.collectives.ir import Holdings, Ints, Schedule, chain, compose, cut, dual, intervals
from phalanx.schedule.collectives.proof import prove
from phalanx.spec.errors import InputError, Unproved, nearest
from phalanx.spec.job import is_algorithm_file

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "broadcast": ("flat", "binomial", "chain", "scatter_all_gather"),
    "reduce": ("flat", "binomial"),
    "scatter": ("flat", "binomial"),
    "gather": ("flat", "binomial"),
    "all_gather": ("ring", "doubling", "bruck"),
    "reduce_scatter": ("ring", "halving", "pairwise"),
    "all_to_all": ("pairwise", "bruck"),
    "all_reduce": ("naive", "binomial", "double_tree", "doubling", "ring", "rabenseifner", "hierarchical"),
    "barrier": ("dissemination",),
}
SEGMENTED = frozenset({("broadcast", "chain"), ("all_reduce", "double_tree")})
"""The algorithms that take `segments`."""

DUALS = {
    ("reduce", "flat"): ("broadcast", "flat"),
    ("reduce", "binomial"): ("broadcast", "binomial"),
    ("gather", "flat"): ("scatter", "flat"),
    ("gather", "binomial"): ("scatter", "binomial"),
    ("all_gather", "ring"): ("reduce_scatter", "ring"),
    ("all_gather", "doubling"): ("reduce_scatter", "halving"),
}
COMPOSED = {
    ("broadcast", "scatter_all_gather"): (("scatter", "binomial"), ("all_gather", "ring")),
    ("all_reduce", "naive"): (("reduce", "flat"), ("broadcast", "flat")),
    ("all_reduce", "binomial"): (("reduce", "binomial"), ("broadcast", "binomial")),
}
_BROADCASTS = {"flat": flat_broadcast, "binomial": binomial_broadcast}
_SCATTERS = {"flat": flat_scatter, "binomial": binomial_scatter}
_REDUCE_SCATTERS = {
    "ring": ring_reduce_scatter,
    "halving": halving_reduce_scatter,
    "pairwise": pairwise_reduce_scatter,
}
_ALL_REDUCES = {"doubling": doubling_all_reduce, "ring": ring_all_reduce, "rabenseifner": rabenseifner_all_reduce}
_ALL_TO_ALLS = {"pairwise": pairwise_all_to_all, "bruck": bruck_all_to_all}


def build(
    op: str,
    algorithm: str,
    ranks: int,
    size: int,
    root: int = 0,
    tiers: tuple[int, ...] | None = None,
    splits: npt.ArrayLike | None = None,
    segments: int = 8,
) -> Schedule:
    """Build the schedule of a collective over `ranks` ranks.

    `size`: elements of the buffer (for gather, all-gather and their like the gathered one; for all-to-all each rank's
    send buffer, in equal blocks; ignored for a barrier, which has one token per rank). `root`: for broadcast, reduce,
    scatter and gather. `tiers`: for hierarchical, sizes, innermost first. `splits`: for an uneven all-to-all,
    (ranks, ranks) elements from rank i to rank j, instead of `size`. `segments`: how many pieces travel one behind
    the other in a chain, or in each half of a double tree; best_segments in cost/collectives/closed_form.py chooses
    the number.

    Raises InputError for an unknown op or algorithm, and for sizes that do not fit.
    """
    _check(op, algorithm, ranks, size, root, tiers, splits, segments)
    if is_algorithm_file(algorithm):
        return _from_file(op, algorithm, ranks, size, root, splits)
    if (op, algorithm) in DUALS:
        return dual(build(*DUALS[op, algorithm], ranks, size, root), op, algorithm, reduces=op == "reduce")
    if (op, algorithm) in COMPOSED:
        first, second = (build(*part, ranks, size, root) for part in COMPOSED[op, algorithm])
        return chain(first, second, op, algorithm)
    if op == "all_to_all":
        return _all_to_all(algorithm, ranks, np.full((ranks, ranks), size // ranks) if splits is None else splits)
    if op == "barrier":
        size = ranks
    groups, low, high = np.arange(ranks)[None], np.zeros(1, dtype=np.int64), np.full(1, size, dtype=np.int64)
    start, end = contract(op, ranks, size, root)
    if op == "broadcast":
        if algorithm == "chain":
            rounds = chain_broadcast(groups, low, high, root, segments)
        else:
            rounds = _BROADCASTS[algorithm](groups, low, high, root)
    elif op == "scatter":
        rounds = _SCATTERS[algorithm](groups, low, high, root)
    elif op == "reduce_scatter":
        rounds = _REDUCE_SCATTERS[algorithm](groups, low, high)
    elif op == "all_reduce":
        if algorithm == "hierarchical":
            rounds = hierarchical_all_reduce(groups, low, high, tiers or (ranks,))
        elif algorithm == "double_tree":
            rounds = double_tree_all_reduce(groups, low, high, segments)
        else:
            rounds = _ALL_REDUCES[algorithm](groups, low, high)
    else:
        # Bruck's all-gather; with a token for each chunk it is the dissemination barrier (Hensgen et al. 1988).
        rounds = bruck_all_gather(groups, low, high)
    return compose(op, algorithm, ranks, size, rounds, start, end)


def contract(op: str, ranks: int, size: int, root: int = 0) -> tuple[Holdings, Holdings]:
    """Return (what each rank starts with, what it ends with) in an operation other than all-to-all."""
    everyone, low, high = np.arange(ranks), np.zeros(1, dtype=np.int64), np.full(1, size, dtype=np.int64)
    bounds = cut(low, high, ranks)[0]
    own_chunks = intervals(everyone, bounds[:-1], np.diff(bounds))
    full, at_root = intervals(everyone, 0, size), intervals(root, 0, size)
    return {
        "broadcast": (at_root, full),
        "reduce": (full, at_root),
        "scatter": (at_root, own_chunks),
        "gather": (own_chunks, at_root),
        "reduce_scatter": (full, own_chunks),
        "all_reduce": (full, full),
    }.get(op, (own_chunks, full))  # an all-gather, and of a token per rank a barrier


def _from_file(op: str, name: str, ranks: int, size: int, root: int, splits: npt.ArrayLike | None) -> Schedule:
    """Build an algorithm from a file, proved. Raises InputError for one of another operation or number of ranks."""
    a = algorithm_file(name)
    if (a.op, a.ranks, a.root) != (op, ranks, root):
        case = f"{a.op} of {a.ranks} ranks" + (f" and root {a.root}" if a.root != root else "")
        remedy = "give the operation and the ranks of the file"
        raise InputError("algorithm", name, f"is for {case}, not for {op} of {ranks}", remedy)
    _require_proved(name)
    if op == "all_to_all":
        lengths = np.asarray(np.full((ranks, ranks), size // ranks) if splits is None else splits, dtype=np.int64)
        start, end = _blocks(lengths)
        return a.schedule(np.concatenate([[0], np.cumsum(lengths)]), int(lengths.sum()), start, end)
    size = ranks if op == "barrier" else size
    bounds = cut(np.zeros(1, dtype=np.int64), np.full(1, size, dtype=np.int64), a.chunks)[0]
    return a.schedule(bounds, size, *contract(op, ranks, size, root))


def least_size(algorithm: str, ranks: int) -> int:
    """Return the size of the smallest buffer without empty chunks, in elements: one per rank, or per chunk of a
    file."""
    return algorithm_file(algorithm).chunks if is_algorithm_file(algorithm) else ranks


def schedule_of_file(name: str) -> Schedule:
    """Build an algorithm from a file, with one element a chunk; it is not proved. Raises InputError."""
    a = algorithm_file(name)
    if a.op not in ALGORITHMS:
        raise InputError("op", a.op, f"of {name} is not a collective", nearest(a.op, ALGORITHMS))
    if a.op == "all_to_all":
        ends = _blocks(np.ones((a.ranks, a.ranks), dtype=np.int64))
    else:
        ends = contract(a.op, a.ranks, a.chunks, a.root)
    return a.schedule(np.arange(a.chunks + 1), a.chunks, *ends)


@lru_cache(maxsize=32)
def _require_proved(name: str) -> None:
    """Require that an algorithm of a file does what its operation must. Raises InputError."""
    try:
        prove(schedule_of_file(name))
    except Unproved as error:
        raise InputError("algorithm", name, f"is not proved: {error}") from None


def two_tiers(ranks: int, node: int | None = None) -> tuple[int, int]:
    """Split ranks into (ranks of a node, nodes) for the hierarchical algorithm: `node` ranks, by default the smallest
    nodes with several. Raises InputError."""
    if node is None:
        node = next(d for d in range(2, ranks + 1) if ranks % d == 0) if ranks > 1 else 1
    if node < 1 or ranks % node:
        raise InputError("node", node, f"does not divide {ranks} ranks into nodes", "name a divisor")
    return node, ranks // node


def _all_to_all(algorithm: str, ranks: int, splits: npt.ArrayLike) -> Schedule:
    """Build an all-to-all. Blocks lie in the order of (from, to), so that each rank's send buffer is one interval.
    Rank i ends with blocks (0, i), (1, i), ... in this order; some of them may be empty."""
    lengths = np.asarray(splits, dtype=np.int64)
    stops = np.cumsum(lengths).reshape(lengths.shape)
    starts = stops - lengths
    start, end = _blocks(lengths)
    rounds = _ALL_TO_ALLS[algorithm](starts, lengths)
    return compose("all_to_all", algorithm, ranks, int(stops[-1, -1]), rounds, start, end)


def _blocks(lengths: Ints) -> tuple[Holdings, Holdings]:
    """Return (what each rank of an all-to-all starts with, what it ends with); `lengths`: (ranks, ranks)."""
    starts = np.cumsum(lengths).reshape(lengths.shape) - lengths
    everyone = np.arange(len(lengths))
    start = intervals(everyone, starts[:, 0], lengths.sum(axis=1))
    return start, intervals(everyone[:, None], starts.T, lengths.T)


def _check(
    op: str,
    algorithm: str,
    ranks: int,
    size: int,
    root: int,
    tiers: tuple[int, ...] | None,
    splits: npt.ArrayLike | None,
    segments: int,
) -> None:
    if op not in ALGORITHMS:
        raise InputError("op", op, "is not a collective", nearest(op, ALGORITHMS))
    if algorithm not in ALGORITHMS[op] and not is_algorithm_file(algorithm):
        known = nearest(algorithm, (*ALGORITHMS[op], "FILE.json"))
        raise InputError("algorithm", algorithm, f"{op} has no such algorithm", known)
    if ranks < 1 or size < 0 or not 0 <= root < ranks:
        raise InputError("ranks", ranks, "needs ranks >= 1, size >= 0 and a root among the ranks")
    if segments < 1:
        raise InputError("segments", segments, "must be at least 1")
    if tiers is not None and (min(tiers, default=0) < 1 or int(np.prod(tiers)) != ranks):
        raise InputError("tiers", "x".join(map(str, tiers)), f"must have product {ranks}")
    if splits is None:
        if op == "all_to_all" and size % ranks:
            raise InputError(
                "size", size, "does not split into equal blocks", f"use a multiple of {ranks}, or give splits"
            )
        return
    if op != "all_to_all":
        raise InputError("splits", None, f"{op} takes none", "leave it out, or use all_to_all")
    table = np.asarray(splits)
    if table.shape != (ranks, ranks) or not np.issubdtype(table.dtype, np.integer) or (table < 0).any():
        raise InputError(
            "splits", None, f"must be a ({ranks}, {ranks}) table of elements from rank to rank, 0 or more"
        )


def sweep(most: int) -> Iterator[str | None]:
    """Yield, for every schedule over 1 to `most` ranks, None if it is proved, else its defect."""
    for op, names in ALGORITHMS.items():
        for algorithm in names:
            for p in range(1, most + 1):
                for options in variants(op, algorithm, p):
                    try:
                        prove(build(op, algorithm, p, **options))
                        yield None
                    except Unproved as error:
                        yield f"{algorithm} {op}, {p} ranks, {options}: {error}"


def sweep_size(most: int) -> int:
    """Return how many schedules `sweep` proves."""
    worlds = range(1, most + 1)
    return sum(len(variants(op, name, p)) for op, names in ALGORITHMS.items() for name in names for p in worlds)


def variants(op: str, algorithm: str, p: int) -> list[dict[str, Any]]:
    """Return the arguments of `build` to try over p ranks: even chunks, uneven ones, fewer elements than ranks;
    first, middle and last root; one segment, several, more than elements; two tiers; even, uneven and empty
    blocks."""
    if op == "barrier":
        return [{"size": p}]
    if op == "all_to_all":
        i = np.arange(p)
        uneven = ((7 * i[:, None] + 3 * i) % 5, np.outer(i, i[::-1]) % 3)
        return [{"size": p}, {"size": 2 * p}, *({"size": 0, "splits": table} for table in uneven)]
    sizes = sorted({p, 3 * p + 1, max(1, p // 2)})
    rooted = op in ("broadcast", "reduce", "scatter", "gather")
    return [
        {"size": size, "root": root, "tiers": _two_tiers(p), "segments": segments}
        for size in sizes
        for root in (sorted({0, p // 2, p - 1}) if rooted else [0])
        for segments in ((1, 3, 2 * p) if (op, algorithm) in SEGMENTED else (1,))
    ]


def _two_tiers(p: int) -> tuple[int, ...]:
    """Factor p into (inner, outer), as equal as possible, with inner >= outer."""
    outer = max(d for d in range(1, math.isqrt(p) + 1) if p % d == 0)
    return (p // outer, outer)
