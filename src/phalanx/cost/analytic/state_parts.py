"""The parts of the model state in bytes per parameter: weights, gradients, master weights, moments, and the number of
ranks over which each is sharded. The parts, each over its shards, sum to live_bytes.state_bytes.
"""

from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.analytic.option_effects import BYTES, MIXED, moment_bytes, per_parameter
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.ledger.gradient_flows import expert_ranks
from phalanx.cost.ledger.live_bytes import state_bytes, whole_gradient_bytes
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import LayoutColumns
from phalanx.spec.job import Job
from phalanx.spec.strategy.stack_options import StackOptions

ADAPTERS = "adapters"
_NOTHING = 0.005
"""Bytes per parameter up to which a part is left out."""


@dataclass(frozen=True)
class StatePart:
    """A part of the state: bytes per parameter that a rank computes with, before sharding over `shards` ranks."""

    what: str
    bytes_per_parameter: float
    shards: int
    of: str = "model"
    """Whose parameters: the model's own, or its adapters'."""


@dataclass(frozen=True)
class StatePerParameter:
    """The state that a rank keeps from step to step."""

    line: str
    """All of it in words."""
    parts: tuple[StatePart, ...]
    expert_shards: int
    """Ranks that share the state of routed experts."""
    on_host: float
    """Share of master weights and moments that is in the host's memory, not in `parts`."""
    gradients_on_host: float
    """Share of the gradients there."""
    weights_on_host: bool
    """Whether the weights are there between their uses."""
    idle_bytes: float
    """Bytes per parameter, among the parts, that are not allocated at the peak of activations."""


def _line(s: StatePerParameter, over: str) -> str:
    """Return the state in words. `over`: the axes and the level of ZeRO that shard it."""
    groups: dict[tuple[str, int], list[str]] = {}
    for part in s.parts:
        groups.setdefault((part.of, part.shards), []).append(f"{part.what} {part.bytes_per_parameter:.4g}")
    terms = [
        f"{'of adapters: ' if of == ADAPTERS else ''}{', '.join(words)} "
        + ("whole" if shards == 1 else f"over {shards:,} ranks ({over})")
        for (of, shards), words in groups.items()
    ]
    if any(part.shards not in (1, s.expert_shards) for part in s.parts):
        terms.append(f"of experts over {s.expert_shards:,}")
    if s.on_host:
        there = ["weights"] * s.weights_on_host + ["master weights"] + ["gradients"] * bool(s.gradients_on_host)
        terms.append(f"{s.on_host:.0%} of {', '.join(there)} and moments on the host instead")
    if s.idle_bytes:
        terms.append(f"{s.idle_bytes:.3g} of these are free when activations are at their fullest")
    return f"state, bytes a parameter on a rank: {'; '.join(terms)}"


def state_of(model: Shape, layout: LayoutColumns, by: Profile, job: Job, options: StackOptions) -> StatePerParameter:
    """Return the state of one strategy. `by`: the stack's constants with these options."""
    zero = sharding(layout, by.policy)
    shards = int(zero.shards) if zero.state else 1
    frozen, device_share = bool(options.lora), 1 - options.optimizer_offload
    sizes = per_parameter(job.precision, job.optimizer, options)
    apart = job.precision.master_dtype != job.precision.compute
    moments = device_share * (float(moment_bytes(model, options)) + sizes.moments - MIXED.moments)
    master = device_share * (BYTES[options.master] + sizes.master * apart - MIXED.master)
    gradients, reduced = float(by.accumulated_bytes), float(by.reduced_bytes)
    host_share = float(by.gradients_on_host) * bool(zero.reduces_each or zero.by_unit)
    gradients *= 1 - host_share
    if frozen:
        moments = master = reduced = 0.0
    outer = float(layout.outer_bytes)
    copied = float(by.parameter_bytes) * options.reference.startswith("copy")
    if zero.by_unit:
        masters = master if np.any(by.cast_gradient) else 0.0  # of shards of weights and gradients in 16 bits
        gradients = min(gradients, 2.0 * (1 - host_share)) if masters else gradients
        weights = float(by.full_shard_bytes) - gradients - moments - masters
        copied *= not options.parameter_offload
        gradients, weights = gradients + min(weights, 0.0), max(weights, 0.0)  # with parameters on the host
        added_up = ("gradients that add up", float(whole_gradient_bytes(by, zero)), 1)
        rows = [("weights", weights - copied, shards), ("gradients", gradients, shards), added_up]
        rows.append(("master weights", masters, shards))
    else:
        own = 1 if not zero.reduces_each or not zero.state else shards
        gradients += reduced * (not zero.reduces_each)
        sharded = master + moments if shards == 1 or frozen else float(by.shard_bytes)
        total = float(state_bytes(layout, by, zero, np.maximum(zero.shards, 1)))
        weights = total - gradients / own - (sharded + outer) / shards - copied
        rows = [("weights", weights, 1), ("gradients", gradients, own), ("master weights", sharded - moments, shards)]
    rows += [("moments", moments, shards), ("the reference's weights", copied, shards if zero.by_unit else 1)]
    rows.append(("the outer optimizer's", outer, shards))
    parts = [StatePart(f"frozen {what}" if frozen else what, n, over) for what, n, over in rows if n > _NOTHING]
    if frozen:
        by_unit, on_host = bool(zero.by_unit), by.parameters_on_host * zero.by_unit
        of_adapters = (
            ("weights", 2.0 * (1 - on_host), shards if by_unit else 1),
            ("gradients", 4.0 * (1 - on_host * zero.reduces_each), shards if zero.reduces_each else 1),
            ("master weights and moments", float(by.adapter_state_bytes) * device_share, shards),
        )
        parts += [StatePart(what, float(n), over, ADAPTERS) for what, n, over in of_adapters if n > _NOTHING]
    axes = "x".join(name for name, n in (("dp", layout.dp), ("cp", layout.cp)) if n > 1)
    level = 0 if not zero.state else 3 if zero.parameters else 2 if zero.reduces_each else 1
    of_experts = int(expert_ranks(layout)) if model.routes and layout.ep > 1 and shards > 1 else shards
    idle = float(by.idle_bytes) if shards > 1 and not zero.by_unit else 0.0
    waits = options.parameter_offload and bool(zero.by_unit)
    state = StatePerParameter("", tuple(parts), of_experts, options.optimizer_offload, host_share, waits, idle)
    return replace(state, line=_line(state, f"{axes}, ZeRO-{level}"))
