"""When gradients reduce, when parameters are gathered, and what a rank keeps sharded in between: one record.

    level   gradients reduce            kept unsharded           parameters gathered, m micro-batches
    0       once, or m times            gradients, parameters    never
    1       once                        gradients, parameters    once, after the update
    2       m times, or once            parameters               once, after the update; FSDP m times
    3       m times, or once            -                        2 m times, or once and kept

Whoever reduces several micro-batches once keeps unsharded gradients until then. Which of the two a strategy does is
said here for our own engine (`sharding_of`), and by policies for columns of strategies under any stack
(cost/ledger/sharding.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from phalanx.spec.strategy.spec import Strategy

Column = Any
"""A number or boolean of one strategy; or a NumPy column of them, one per strategy."""


@dataclass(frozen=True)
class Sharding:
    """How model state lies over the data axis, and how often it moves in a step. Of one strategy, booleans and whole
    numbers; of columns of strategies, arrays with 1 for true."""

    shards: Column
    """Ranks that share one state of what is not an expert: shard x cp; 1 where nothing is sharded."""
    replicas: Column
    """Ranks with the same shard: dp x cp / shards."""
    state: Column
    """Masters and the optimizer's state are sharded (level 1 and above), over several ranks."""
    parameters: Column
    """Parameters are sharded too, by the level itself (level 3)."""
    by_unit: Column
    """Parameters are sharded between micro-batches, and gathered and reduced unit by unit: level 3, and level 2 of a
    stack that frees them then."""
    reduces_each: Column
    """Gradients are reduced after every micro-batch, and only their shards kept; else once a step."""
    replicates_each: Column
    """All-reduces over replicas (without shards, over all ranks) take place after every micro-batch; else once a
    step."""
    gathers_each: Column
    """Parameters are gathered for every micro-batch; else at most once a step."""
    regathers: Column
    """The backward pass gathers again what the forward pass had, so that only units at work are gathered."""

    @property
    def updates_gather(self) -> bool:
        """Whether updated parameters are gathered right after the optimizer, to stay for the next step; of one
        strategy."""
        return bool(self.state and not self.parameters)

    @property
    def keeps_gathered(self) -> bool:
        """Whether what a first pass gathers stays until the step ends; of one strategy."""
        return bool(self.parameters and not self.gathers_each)

    def reductions(self, m: Column) -> Column:
        """Return how often the gradients of a step with m micro-batches are reduced."""
        return 1 + self.reduces_each * (m - 1)

    def replications(self, m: Column) -> Column:
        """Return how often they are all-reduced over replicas."""
        return 1 + self.replicates_each * (m - 1)

    def gathers(self, m: Column) -> Column:
        """Return how often parameters are gathered in such a step, where they are at all."""
        return 1 + self.gathers_each * (m * (1 + self.regathers) - 1)


@lru_cache(maxsize=4096)
def sharding_of(s: Strategy) -> Sharding:
    """Return what our own engine does under a strategy.

    Gradients are reduced with every micro-batch from level 2 on, unless `grad_sync` says once a step; parameters
    of level 3 are gathered for each pass of a unit, unless `reshard`, or a pipeline, keeps them for the step."""
    state = s.shards > 1
    level = s.level
    parameters = state and level.parameters
    gathers = parameters and not (s.reshard == "step" or (s.reshard is None and s.pp > 1))
    return Sharding(
        shards=s.shards,
        replicas=s.gradient_ranks // s.shards,
        state=state,
        parameters=parameters,
        by_unit=parameters,
        reduces_each=state and level.gradients and (parameters or s.grad_sync != "step"),
        replicates_each=False,
        gathers_each=gathers,
        regathers=gathers,
    )
