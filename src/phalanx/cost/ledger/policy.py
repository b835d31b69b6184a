"""Differences between stacks within a step, as data: one Policy each, from the stack's public source.

ZeRO's levels fix what is sharded between steps. They do not fix when gradients reduce, nor how long gathered
parameters stay: a level of one stack may take m times the traffic of the same level of another, or keep unsharded
gradients instead. Each policy names its source file and line.

Fields are 0 or 1, so that stacks can be gathered into columns. The capabilities of a stack (levels, schedules) are in
its facts (frameworks/*/facts.toml). `sharding` returns the record of schedule/gradients/sharding.py for columns of
strategies under a policy; our own engine is the stack `phalanx`.
"""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.rank_layout import LayoutColumns
from phalanx.schedule.gradients.sharding import Sharding
from phalanx.spec.strategy.zero_levels import level_columns


@dataclass(frozen=True)
class Policy:
    """When a stack reduces gradients and gathers parameters, by ZeRO level, without and with a pipeline; and other
    differences between stacks.

    `reduces`: 1 if gradients are reduced after every micro-batch, and their shards accumulated; 0 if unsharded
    gradients are accumulated and reduced once a step. `gathers`: 1 if parameters are gathered for every micro-batch;
    0 if once a step. ZeRO-1 does both once."""

    zero0_reduces: Column = 0.0
    """1: at level 0 without a pipeline, unsharded gradients are reduced after every micro-batch."""
    zero2_reduces: Column = 1.0
    zero2_reduces_in_pipeline: Column = 1.0
    zero2_gathers: Column = 0.0
    """1: parameters are sharded between micro-batches at level 2 too, and stay gathered from the forward to the
    backward pass (FSDP's SHARD_GRAD_OP)."""
    zero2_gathers_in_pipeline: Column = 0.0
    zero3_reduces: Column = 1.0
    zero3_reduces_in_pipeline: Column = 1.0
    zero3_gathers: Column = 1.0
    """1: at level 3 both passes of every micro-batch gather parameters."""
    zero3_gathers_in_pipeline: Column = 1.0
    levels_alone: Column = 0.0
    """1: a level takes effect on a single rank too, whose state is offloaded as the level's shards are."""
    replicas_each: Column = 0.0
    """1: if shards are reduced after every micro-batch, they are also summed over their replicas each time; 0:
    once."""
    repeats_last: Column = 1.0
    """1: recomputing a block repeats its last product and collective too, whose results are never read."""
    scatters_messages: Column = 0.0
    """1: even without sequence parallelism, each tp rank sends its part of a pipeline message, which the receivers
    gather."""
    halves_stream: Column = 0.0
    """1: collectives of sequence parallelism run in two halves, if each rank can have equally many tokens of both."""
    keeps_gathered: Column = 0.0
    """1: under sequence parallelism gathered inputs stay for their weights' gradients; 0: these are gathered
    again."""
    copies_each: Column = 0.0
    """1: partial gradients of tp ranks are summed parameter by parameter whenever gradients are reduced; 0: together
    and once."""
    loss_apart: Column = 0.0
    """1: the last two numbers of the loss over tp ranks travel separately."""
    sends_copies: Column = 0.0
    """1: a token goes to all etp ranks of its expert; 0: to one, and they gather."""
    equal_rounds: Column = 0.0
    """1: interleaved stages process micro-batches in equal rounds of at least one per rank; 0: of exactly one."""
    pads_core: Column = 0.0
    """1: if values are narrower than keys, or wider, attention's core computes both at the wider width."""
    sends_counts: Column = 0.0
    """1: ranks exchange the numbers of tokens in an all-to-all, and gather the choices of a sequence's tokens if one
    depends on others."""
    slices_head: Column = 0.0
    """1: unless the schedule splits backward passes, the head processes its tokens in slices if that keeps fewer
    bytes (schedule/layers/head.py); tp ranks in equal slices, each with its own all-reduces of the loss."""


PLAIN = Policy()
"""The default policy."""


def sharding(layout: LayoutColumns, policy: Policy) -> Sharding:
    """Return the Sharding of a layout's columns under a policy."""
    ranks = layout.dp * layout.cp
    declared = level_columns(np.asarray(layout.zero))
    shards = np.where(declared.state, np.minimum(np.maximum(layout.shards, 1), ranks), 1)
    state = (shards > 1) | (declared.state & (np.asarray(policy.levels_alone) > 0))
    gradients, parameters = state & declared.gradients, state & declared.parameters
    piped = np.asarray(layout.pp) > 1

    def chosen(gradients_only: Column, piped_only: Column, everything: Column, piped_everything: Column) -> Column:
        """Return the policy's field if gradients or all state are sharded, without or with a pipeline; else 0."""
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
