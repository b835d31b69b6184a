"""The price of one strategy on a described cluster under a named software stack: time, memory, FLOPs, traffic.

`predict` (cost/predict.py) prices our own runtime exactly on a measured cluster; this prices any stack on any known
hardware, by the same formulas that are held against published runs (`phalanx validate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.analytic.compression import Payment, of, payment
from phalanx.cost.analytic.flops import active_params, hardware_flops, model_flops
from phalanx.cost.analytic.memory import Memory, memory
from phalanx.cost.analytic.model_shape import Shape, shape
from phalanx.cost.analytic.pipeline_formulas import makespan
from phalanx.cost.analytic.rank_layout import Layout, layout
from phalanx.cost.analytic.stacks import Profile, profile
from phalanx.cost.analytic.step import Step, step
from phalanx.cost.hardware.columns import Column, gather
from phalanx.cost.hardware.system import System
from phalanx.cost.pipeline_time import Costs
from phalanx.schedule.pipeline.stages import rank_of, splits_backward
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.legality import require_compressible
from phalanx.spec.strategy.spec import FIELDS, Strategy

_AS_DEFAULT = ("layers", "grad_sync", "reshard", "bucket", "prefetch")
"""Fields of a strategy that these formulas have no term for."""


@dataclass(frozen=True)
class Estimate:
    """Of one step; numbers, or columns where columns were priced."""

    step: Step
    memory: Memory
    model_flops: Column
    hardware_flops: Column
    active_params: Column
    shape: Shape
    layout: Layout
    system: System
    profile: Profile

    @property
    def seconds(self) -> Column:
        return self.step.seconds

    @property
    def mfu(self) -> Column:
        """Of the peak in bf16."""
        return self.model_flops / (self.seconds * self.layout.world * self.system.peak_bf16)

    @property
    def hfu(self) -> Column:
        return self.hardware_flops / (self.seconds * self.layout.world * self.system.peak_bf16)

    @property
    def fits(self) -> Column:
        """Against the device's usable bytes."""
        return self.memory.reserved <= self.system.memory_bytes


def require_modelled(s: Strategy) -> None:
    """Refuse by name what has no term here. Raises InputError."""
    for name in _AS_DEFAULT:
        if getattr(s, name) != FIELDS[name].default:
            reason = "is not modelled for published stacks"
            raise InputError(
                f"strategy.{name}", getattr(s, name), reason, "leave it out; phalanx plan prices our own"
            )
    require_compressible(s, "float32")


def estimate(
    model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy, stack: str, number_format: str = "bfloat16"
) -> Estimate:
    """Price one. Raises InputError for what is not modelled."""
    require_modelled(s)
    how = replace(layout(s, job, model.layers, number_format), compressed=of(model, s))
    found = priced(shape(model), how, system_of(cluster), profile(stack))
    if splits_backward(s):
        _as_it_runs(found.step, s, model)
    return found


def _as_it_runs(found: Step, s: Strategy, model: ModelSpec) -> None:
    """The bubble of a schedule that runs gradients of inputs and of weights apart (half of a backward pass each):
    its own actions, timed, over chunks as equal as blocks can be cut."""
    ranks, passes = rank_of(s), [own for _, own in found.blocks]
    experts = model.experts
    kinds = [passes[0 if experts is None or i in experts.dense_layers else -1] for i in range(model.layers)]
    cut = [[kinds[i] for i in own] for own in np.array_split(np.arange(model.layers), len(ranks))]
    cut[-1].append(found.head)
    forward = [sum(float(own.forward) for own in chunk) for chunk in cut]
    half = [sum(float(own.backward) for own in chunk) / 2 for chunk in cut]
    slowest = float(np.bincount(ranks, np.add(forward, np.multiply(half, 2))).max())
    m = int(found.of["head"]["micro_batches"])
    took = makespan(s.schedule, s.pp, m, s.virtual, Costs(forward, half, half), slowest)
    found.terms["bubble"] = max(took - m * slowest, 0.0)
    found.of["bubble"] = {"makespan_s": took, "micro_batches": m, "slowest_s": slowest}


def paid(e: Estimate) -> Payment | None:
    """What compressing its gradients saves; None where nothing is compressed, or gradients decide what is sent."""
    c = e.layout.compressed
    if not c.kind or c.bound:
        return None
    stride = e.layout.data_stride(e.system.tiers[0].ranks)
    n, p = float(e.step.of["dp"]["gradients"]), int(e.layout.dp * e.layout.cp)
    return payment(c, n, p, float(stride), e.system, e.profile)


def estimate_all(
    model: ModelSpec, cluster: ClusterSpec, job: Job, strategies: Sequence[Strategy], stack: str
) -> Estimate:
    """Price many, as columns: of every schedule the bubble of equal chunks by its formula."""
    for s in strategies:
        require_modelled(s)
    columns = gather([replace(layout(s, job, model.layers), compressed=of(model, s)) for s in strategies])
    return priced(shape(model), columns, system_of(cluster), profile(stack))


def priced(model: Shape, how: Layout, on: System, by: Profile) -> Estimate:
    """The formulas, on numbers or columns of any of the four."""
    found = step(model, how, on, by)
    return Estimate(
        found,
        memory(model, how, by, found.ahead),
        model_flops(model, how),
        hardware_flops(model, how),
        active_params(model),
        model,
        how,
        on,
        by,
    )
