"""When gradients reduce, when parameters are gathered, and what a rank keeps sharded in between: one record.

    level   gradients reduce            kept unsharded           parameters gathered, m micro-batches
    0       once, or m times            gradients, parameters    never
    1       once                        gradients, parameters    once, after the update
    2       m times, or once            parameters               once, after the update; FSDP m times
    3       m times, or once            -                        2 m times, or once and kept

An engine that reduces once for several micro-batches keeps unsharded gradients until then. `sharding_of` decides this
for our own engine; policies decide it for columns of strategies under any stack (cost/ledger/policy.py).
"""

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
    """Number of shards of the state outside of experts: shard x cp; 1 where nothing is sharded."""
    replicas: Column
    """Ranks with the same shard: dp x cp / shards."""
    state: Column
    """Whether masters and optimizer state are sharded (level 1 and above), over several ranks."""
    parameters: Column
    """Whether parameters are sharded too (level 3)."""
    by_unit: Column
    """Whether parameters are sharded between micro-batches, and gathered and reduced unit by unit: level 3, and level
    2 of a stack that frees them between micro-batches."""
    reduces_each: Column
    """Whether gradients are reduced after every micro-batch, keeping only shards; else once a step."""
    replicates_each: Column
    """Whether all-reduces over replicas (without shards, over all ranks) take place after every micro-batch; else
    once a step."""
    gathers_each: Column
    """Whether parameters are gathered for every micro-batch; else at most once a step."""
    regathers: Column
    """Whether the backward pass gathers parameters again, so that only the running units are gathered."""

    @property
    def updates_gather(self) -> bool:
        """Whether updated parameters are gathered right after the optimizer and kept for the next step; for one
        strategy."""
        return bool(self.state and not self.parameters)

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered parameters are kept until the step ends; for one strategy."""
        return bool(self.parameters and not self.gathers_each)

    def reductions(self, m: Column) -> Column:
        """Return the number of gradient reductions in a step with m micro-batches."""
        return 1 + self.reduces_each * (m - 1)

    def replications(self, m: Column) -> Column:
        """Return the number of all-reduces of gradients over replicas in a step with m micro-batches."""
        return 1 + self.replicates_each * (m - 1)

    def gathers(self, m: Column) -> Column:
        """Return the number of parameter gathers in a step with m micro-batches, if parameters are gathered at
        all."""
        return 1 + self.gathers_each * (m * (1 + self.regathers) - 1)


@lru_cache(maxsize=4096)
def sharding_of(s: Strategy) -> Sharding:
    """Return the sharding of our own engine under a strategy. Gradients are reduced with every micro-batch from level
    2 on, unless `grad_sync` says once a step; parameters of level 3 are gathered for each pass of a unit, unless
    `reshard`, or a pipeline, keeps them for the step."""
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
