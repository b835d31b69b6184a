"""The price of one strategy on a described cluster under a named software stack: time, memory, FLOPs, traffic.

`predict` (cost/predict.py) prices our own runtime exactly on a measured cluster; this prices any stack on any known
hardware, by the same formulas that are held against published runs (`phalanx validate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cost.profiles import Profile, profile
from phalanx.cost.stack.columns import Column, gather
from phalanx.cost.stack.flops import active_params, hardware_flops, model_flops
from phalanx.cost.stack.hardware import system_of
from phalanx.cost.stack.layout import Layout, layout
from phalanx.cost.stack.memory import Memory, memory
from phalanx.cost.stack.shape import Shape, shape
from phalanx.cost.stack.step import Step, step
from phalanx.cost.stack.system import System
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model import ModelSpec
from phalanx.spec.strategy import FIELDS, Strategy

_AS_DEFAULT = ("layers", "compression", "grad_sync", "reshard", "bucket")
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
    usual = ("interleaved", "1f1b") if s.virtual > 1 else ("1f1b",)
    if s.pp > 1 and s.schedule not in usual:
        raise InputError(
            "strategy.schedule", s.schedule, "is not modelled for published stacks", f"use {' or '.join(usual)}"
        )


def estimate(
    model: ModelSpec, cluster: ClusterSpec, job: Job, s: Strategy, stack: str, number_format: str = "bfloat16"
) -> Estimate:
    """Price one. Raises InputError for what is not modelled."""
    require_modelled(s)
    return priced(shape(model), layout(s, job, model.layers, number_format), system_of(cluster), profile(stack))


def estimate_all(
    model: ModelSpec, cluster: ClusterSpec, job: Job, strategies: Sequence[Strategy], stack: str
) -> Estimate:
    """Price many, as columns."""
    for s in strategies:
        require_modelled(s)
    columns = gather([layout(s, job, model.layers) for s in strategies])
    return priced(shape(model), columns, system_of(cluster), profile(stack))


def priced(model: Shape, how: Layout, on: System, by: Profile) -> Estimate:
    """The formulas, on numbers or columns of any of the four."""
    return Estimate(
        step(model, how, on, by),
        memory(model, how, by),
        model_flops(model, how),
        hardware_flops(model, how),
        active_params(model),
        model,
        how,
        on,
        by,
    )
