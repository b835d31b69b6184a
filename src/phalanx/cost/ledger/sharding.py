"""Sharding of columns of strategies under a stack's policy, as the record of schedule/gradients/sharding.py; our own
engine is the stack `phalanx`."""

from __future__ import annotations

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.policy import Policy
from phalanx.cost.ledger.rank_layout import Layout
from phalanx.schedule.gradients.sharding import Sharding
from phalanx.spec.strategy.zero_levels import level_columns


def sharding(layout: Layout, policy: Policy) -> Sharding:
    """Return the Sharding of a layout's columns under a policy."""
    ranks = layout.dp * layout.cp
    declared = level_columns(np.asarray(layout.zero))
    shards = np.where(declared.state, np.minimum(np.maximum(layout.shards, 1), ranks), 1)
    state = shards > 1
    gradients, parameters = state & declared.gradients, state & declared.parameters
    piped = np.asarray(layout.pp) > 1

    def chosen(gradients_only: Column, piped_only: Column, everything: Column, piped_everything: Column) -> Column:
        """Return the policy's field where gradients or all state are sharded, without or with a pipeline; else 0."""
        of_gradients = np.where(piped, piped_only, gradients_only)
        of_all = np.where(piped, piped_everything, everything)
        return np.where(parameters, of_all, np.where(gradients, of_gradients, 0.0))

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
    # With a single micro-batch nothing is accumulated, and each unit's gradients are reduced as they arrive.
    reduces = np.where(gradients & ~piped & (np.asarray(layout.micro_batches) <= 1), 1.0, reduces)
    whole = np.where(piped, 0.0, policy.zero0_reduces)
    return Sharding(
        shards=shards,
        replicas=ranks / shards,
        state=state,
        parameters=parameters,
        by_unit=1.0 * (parameters | (gradients & (gathers > 0))),
        reduces_each=reduces,
        replicates_each=np.where(state, reduces * policy.replicas_each, whole),
        gathers_each=gathers,
        regathers=1.0 * (parameters & (gathers > 0)),
    )
