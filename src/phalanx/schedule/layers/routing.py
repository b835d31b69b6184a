"""Row counts of tokens that are routed to experts in perfect balance, as prices and `verify` assume, and as a step
with forced balance does.

A row is one choice of one token. Every rank routes its own tokens (runtime/model_parallel/token_sharding.py); each
expert gets an equal share of their choices (the first ones the remainder), and no more than its capacity. An expert
computes rows from all ranks of its group.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

Column = Any
"""A number, or a NumPy column of numbers: one per strategy."""


class RouterChoice(Protocol):
    """How tokens or experts choose each other, which determines the rows: a Router of blocks, or Experts."""

    @property
    def count(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def chooser(self) -> str: ...

    @property
    def capacity(self) -> float | None: ...

    @property
    def balance_loss(self) -> float: ...


def expert_capacity(x: RouterChoice, seq: Column) -> Column | None:
    """Return the capacity of an expert in tokens of a sequence of `seq`; None: unlimited."""
    capacity = 1.0 if x.capacity is None and x.chooser == "experts" else x.capacity
    if capacity is None:
        return None
    if isinstance(seq, int):
        return min(seq, math.ceil(capacity * x.top_k * seq / x.count))
    return np.minimum(seq, np.ceil(capacity * x.top_k * seq / x.count))


def balanced_choices(tokens: Column, x: RouterChoice) -> list[Column]:
    """Return how many of the choices of `tokens` tokens each expert gets under balanced routing, (count,)."""
    limit = expert_capacity(x, tokens)
    if x.chooser == "experts":
        return [limit] * x.count
    each, over = tokens * x.top_k // x.count, tokens * x.top_k % x.count
    even = [each + (e < over) for e in range(x.count)]
    if limit is None:
        return even
    return [min(n, limit) if isinstance(n, int) else np.minimum(n, limit) for n in even]


def round_up_rows(rows: Column, multiple: int) -> Column:
    """Round rows up to a `multiple`, as weight gradients in a narrow format require; zeros fill the rest."""
    return rows + -rows % multiple


def depends_on_other_tokens(x: RouterChoice, s: Strategy) -> bool:
    """Whether a token's experts, or their weights, depend on the other tokens of the sequence."""
    return bool(x.balance_loss) or (s.cp * s.tp > 1 and (x.chooser == "experts" or x.capacity is not None))


def depends_on_router(x: RouterChoice, s: Strategy) -> bool:
    """Whether bytes, FLOPs or memory depend on the router: tokens go to other ranks, may be dropped, or are chosen by
    experts."""
    return s.ep * s.etp > 1 or x.chooser == "experts" or x.capacity is not None


def own_tokens(tokens: Column, tp: int, index: int) -> Column:
    """Return the number of tokens routed by the rank at `index`, of the `tokens` that `tp` ranks share."""
    return tokens // tp + (index < tokens % tp)


@dataclass(frozen=True)
class ExpertTraffic:
    """Tokens and rows that a rank routes, sends and receives in one layer and micro-batch. `tokens`: that it routes;
    `rows`: their rows, each sent to all `copies` ranks that share an expert; `received`: rows that its experts
    receive; `most`: rows of its busiest expert; `padded`: `received`, with each expert's rows rounded up to the
    multiple that narrow products require."""

    tokens: Column
    rows: Column
    received: Column
    most: Column
    padded: Column
    copies: int = 1


def expert_traffic(x: RouterChoice, s: Strategy, tokens: Column, rank: int = 0, multiple: int = 1) -> ExpertTraffic:
    """Return the traffic of `rank`, given the `tokens` that it shares with the other tp ranks. `multiple`: that of
    which narrow products require each expert's rows to be. No rank receives more than rank 0."""
    grid, count = mesh(s), x.count
    at_tp = grid.along("tp")
    routed_tokens = own_tokens(tokens, s.tp, int(at_tp[rank]))
    choices = balanced_choices(routed_tokens, x)
    rows = sum(choices)
    if s.ep * s.etp == 1:
        return ExpertTraffic(routed_tokens, rows, rows, choices[0], sum(round_up_rows(n, multiple) for n in choices))
    here = count // s.ep
    first = int(grid.along("ep")[rank]) * here
    sources = Counter(int(at_tp[other]) for other in grid.group_of(rank, "ep+etp"))
    of_each: list[Column] = [0] * here
    for index, n in sources.items():
        choices = balanced_choices(own_tokens(tokens, s.tp, index), x)[first : first + here]
        of_each = [sum_ + n * more for sum_, more in zip(of_each, choices, strict=True)]
    return ExpertTraffic(
        routed_tokens, rows, sum(of_each), of_each[0], sum(round_up_rows(n, multiple) for n in of_each), s.etp
    )
