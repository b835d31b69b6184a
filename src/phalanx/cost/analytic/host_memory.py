"""Host memory of offloaded model state: master weights, moments and gradients of an optimizer that updates on the
host, and parameters that are kept there between uses."""

import numpy as np

from phalanx.cost.analytic.option_effects import BYTES, moment_bytes
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.ledger.gradient_flows import expert_ranks, experts_apart
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import LayoutColumns
from phalanx.spec.strategy.stack_options import StackOptions

_GRADIENT = 4.0
"""Bytes of a gradient next to the state that it updates: 16 of each parameter in all, which is what DeepSpeed's own
estimate has before its margin of a half (deepspeed/runtime/zero/stage3.py, estimate_zero3_model_states_mem_needs)."""


def host_bytes(model: Shape, layout: LayoutColumns, by: Profile, options: StackOptions, ranks_per_node: int) -> float:
    """Return the least bytes of model state that a node's host holds: without pinned copies, activations, data and
    the program itself. 0 if all of it is on the devices."""
    zero = sharding(layout, by.policy)
    shards = float(np.where(zero.state, zero.shards, 1.0))
    of_experts = float(expert_ranks(layout)) if zero.state and np.any(experts_apart(layout)) else shards
    updated = float(moment_bytes(model, options)) + BYTES[options.master] + _GRADIENT
    weight = 2.0 * options.parameter_offload * bool(zero.by_unit)
    each = options.optimizer_offload * updated + (1 - options.optimizer_offload) * weight
    experts = float(model.layers * model.mean(lambda kind: kind.expert_params))
    dense = float(model.params) - experts
    if options.lora:  # the base has weights alone
        adapters = float(model.adapters * model.layers)
        base = weight and float(by.whole_bytes)
        total = (dense * base + adapters * each) * _copies(layout, shards)
        theirs = experts * base + float(model.expert_adapters * model.layers) * each
        total += theirs * float(expert_ranks(layout)) / of_experts
    else:
        total = dense * each * _copies(layout, shards) + experts * each * float(expert_ranks(layout)) / of_experts
    world = float(layout.world)
    return total * min(ranks_per_node, world) / world


def _copies(layout: LayoutColumns, shards: float) -> float:
    """Return the number of copies of the state among the ranks that compute the same parameters."""
    return float(layout.dp * layout.cp) / shards
