"""How many rows go where when tokens are routed to experts, and all is balanced: what is priced, what `verify`
assumes, and what a step does that was asked to.

A row is one choice of one token. Every rank routes its own tokens (runtime/sequence_tokens.py), each expert gets an
equal share of their choices, the first ones the remainder, and no more than its capacity. What an expert computes has
come from all ranks of its group.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

Column = Any
"""A number, or a NumPy column of numbers: one per strategy."""


def most(x: Experts, seq: Column) -> Column | None:
    """How many tokens of a sequence an expert takes; None: all that come."""
    capacity = 1.0 if x.capacity is None and x.chooser == "experts" else x.capacity
    if capacity is None:
        return None
    if isinstance(seq, int):
        return min(seq, math.ceil(capacity * x.top_k * seq / x.count))
    return np.minimum(seq, np.ceil(capacity * x.top_k * seq / x.count))


def balanced(tokens: Column, x: Experts) -> list[Column]:
    """How many of `tokens` tokens' choices each expert gets where all are even."""
    limit = most(x, tokens)
    if x.chooser == "experts":
        return [limit] * x.count
    each, over = tokens * x.top_k // x.count, tokens * x.top_k % x.count
    even = [each + (e < over) for e in range(x.count)]
    if limit is None:
        return even
    return [min(n, limit) if isinstance(n, int) else np.minimum(n, limit) for n in even]


def looks_around(x: Experts, s: Strategy) -> bool:
    """Whether a choice, or how it is weighed, depends on the sequence's other tokens."""
    return bool(x.balance_loss) or (s.cp * s.tp > 1 and (x.chooser == "experts" or x.capacity is not None))


def uncertain(x: Experts, s: Strategy) -> bool:
    """Whether how much is sent, computed and held depends on where the router sends tokens: where they go to other
    ranks, or are dropped, or taken."""
    return s.ep * s.etp > 1 or x.chooser == "experts" or x.capacity is not None


def own_tokens(tokens: Column, tp: int, index: int) -> Column:
    """Of `tokens` that `tp` ranks share, those that the one with this `index` routes."""
    return tokens // tp + (index < tokens % tp)


@dataclass(frozen=True)
class Routed:
    """Of one layer and micro-batch of a rank. `tokens`: that it routes; `rows`: of those, which leave once for each
    of `copies` ranks that share an expert; `came`: rows of its own experts."""

    tokens: Column
    rows: Column
    came: Column
    copies: int = 1


def routed(x: Experts, s: Strategy, tokens: Column, rank: int = 0) -> Routed:
    """What a rank sends and gets of `tokens` that the ranks of its tp share. No rank gets more than rank 0."""
    grid, count = mesh(s), x.count
    at_tp = grid.along("tp")
    own = own_tokens(tokens, s.tp, int(at_tp[rank]))
    rows = sum(balanced(own, x))
    if s.ep * s.etp == 1:
        return Routed(own, rows, rows)
    here = count // s.ep
    begins = int(grid.along("ep")[rank]) * here
    sources = Counter(int(at_tp[other]) for other in grid.group_of(rank, "ep+etp"))
    came: Column = 0
    for index, n in sources.items():
        came = came + n * sum(balanced(own_tokens(tokens, s.tp, index), x)[begins : begins + here])
    return Routed(own, rows, came, s.etp)
