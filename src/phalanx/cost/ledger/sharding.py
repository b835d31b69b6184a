"""When gradients reduce, how often parameters are gathered, and what that keeps on a rank: a ZeRO level under a
stack's policy.

    level   gradients reduce            kept unsharded           parameters gathered, m micro-batches
    0       once, or m times            gradients, parameters    never
    1       once                        gradients, parameters    once, after the update
    2       m times, or once            parameters               once; FSDP m times
    3       m times, or once            -                        2 m times, or once and kept

Whoever reduces several micro-batches once keeps unsharded gradients until then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.policy import Policy
from phalanx.cost.ledger.rank_layout import Layout


@dataclass(frozen=True)
class Sharding:
    """Columns of 0 and 1 unless said otherwise. `level`: the ZeRO level that takes effect, 0 over one shard."""

    level: Column
    shards: Column
    """Ranks that share one state of what is not an expert: shard x cp, 1 at level 0."""
    replicas: Column
    """Ranks with the same shard: dp x cp / shards."""
    reduces_each: Column
    """1: gradients are reduced after every micro-batch, into shards; 0: once a step."""
    replicates_each: Column
    """1: all-reduces over replicas (at level 0 over all ranks) take place after every micro-batch; 0: once a step."""
    gathers_each: Column
    """1: parameters are gathered for every micro-batch; 0: at most once a step."""
    parameters: Column
    """1: parameters are sharded between steps."""
    regathers: Column
    """1: the backward pass gathers again what the forward pass had, so that only units at work are gathered."""

    @property
    def gradients(self) -> Column:
        """1: only shards of the gradients are kept from one micro-batch to the next."""
        return self.reduces_each


def sharding(layout: Layout, policy: Policy) -> Sharding:
    """Return how the columns of a layout are sharded under a policy."""
    ranks = layout.dp * layout.cp
    shards = np.where(layout.zero >= 1, np.minimum(np.maximum(layout.shards, 1), ranks), 1)
    level = np.where(shards > 1, layout.zero, 0)
    piped, two, three = np.asarray(layout.pp) > 1, level == 2, level >= 3

    def chosen(two_plain: Column, two_piped: Column, three_plain: Column, three_piped: Column) -> Column:
        """Return the policy's field for the level, without or with a pipeline; 0 below level 2."""
        of_two, of_three = np.where(piped, two_piped, two_plain), np.where(piped, three_piped, three_plain)
        return np.where(two, of_two, np.where(three, of_three, 0.0))

    reduces = chosen(
        policy.zero2_reduces,
        policy.zero2_reduces_in_pipeline,
        policy.zero3_reduces,
        policy.zero3_reduces_in_pipeline,
    )
    gathers = chosen(
        policy.zero2_gathers,
        policy.zero2_gathers_in_pipeline,
        policy.zero3_gathers,
        policy.zero3_gathers_in_pipeline,
    )
    # Of a single micro-batch nothing is added up, and each unit's gradients are reduced as they come.
    reduces = np.where((level >= 2) & ~piped & (np.asarray(layout.micro_batches) <= 1), 1.0, reduces)
    whole = np.where(piped, 0.0, policy.zero0_reduces)
    return Sharding(
        level=level,
        shards=shards,
        replicas=ranks / shards,
        reduces_each=reduces,
        replicates_each=np.where(level == 0, whole, reduces * policy.replicas_each),
        gathers_each=gathers,
        parameters=1.0 * (three | (two & (gathers > 0))),
        regathers=1.0 * (three & (gathers > 0)),
    )
