"""Collectives composed of others in sequence, or run backwards.

    all-reduce      = reduce-scatter, then all-gather = reduce, then broadcast
    reduce-scatter  = reduce, then scatter
    all-gather      = gather, then broadcast
    broadcast       = scatter, then all-gather
    backwards: broadcast <-> reduce, scatter <-> gather, all-gather <-> reduce-scatter; only
    for algorithms that bring each piece to a rank once

Chan, Heimlich, Purkayastha, van de Geijn 2007 (Collective communication: theory, practice, and experience).
"""

from phalanx.schedule.collectives.ir import Schedule, chain, dual
from phalanx.schedule.collectives.proof import prove
from phalanx.schedule.collectives.registry import ALGORITHMS, build
from phalanx.spec.errors import InputError, Unproved, nearest

COMPOSITIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "all_reduce": (("reduce_scatter", "all_gather"), ("reduce", "broadcast")),
    "reduce_scatter": (("reduce", "scatter"),),
    "all_gather": (("gather", "broadcast"),),
    "broadcast": (("scatter", "all_gather"),),
}
"""Pairs of operations that in sequence do the same, by operation."""
DUALS = {
    "broadcast": "reduce",
    "reduce": "broadcast",
    "scatter": "gather",
    "gather": "scatter",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
}
"""The operation that each operation becomes when run backwards."""


def compose_operations(op: str, text: str, ranks: int, size: int, root: int = 0) -> Schedule:
    """Build `op` from `text`: operations joined by `+`, each optionally with an algorithm after a colon (default: the
    first of its table), as in `reduce_scatter:halving+all_gather`; or `dual:ALGORITHM`, that algorithm of the dual
    operation run backwards. Raises InputError for parts that do not make up `op`."""
    first, *others = [part.strip() for part in text.split("+")]
    name, _, algorithm = first.partition(":")
    # The dual of one algorithm.
    if name == "dual" and not others:
        if op not in DUALS:
            raise InputError("as", text, f"{op} has no dual", f"use an op of {', '.join(DUALS)}")
        source = DUALS[op]
        algorithm = algorithm or ALGORITHMS[source][0]
        reduces = op in ("reduce", "reduce_scatter")
        backwards = dual(build(source, algorithm, ranks, size, root), op, f"{algorithm} {source}, backwards", reduces)
        try:
            prove(backwards)
        except Unproved as error:
            raise InputError(
                "as", text, f"{algorithm} {source} brings a piece to a rank twice, so that backwards {error}"
            ) from None
        return backwards
    # One operation after another.
    known = COMPOSITIONS.get(op, ())
    names = tuple(part.partition(":")[0] for part in (first, *others))
    if names not in known:
        ways = [*map("+".join, known), *(["dual"] if op in DUALS else [])]
        remedy = nearest("+".join(names), ways) if ways else "leave it out"
        raise InputError("as", text, f"does not make up {op}", remedy)
    parts = []
    for part in (first, *others):
        name, _, algorithm = part.partition(":")
        parts.append(build(name, algorithm or ALGORITHMS[name][0], ranks, size, root))
    return chain(parts[0], parts[1], op, " + ".join(f"{s.algorithm} {s.op}" for s in parts))
