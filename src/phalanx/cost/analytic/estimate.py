"""The price of one strategy on a described cluster under a named software stack: time, memory, FLOPs, traffic.

`predict` (cost/step/predict.py) prices our own runtime exactly on a measured cluster; `estimate` prices any stack on
any known hardware, by the formulas that `phalanx validate` compares with published runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.analytic.compression import Payment, payment
from phalanx.cost.analytic.memory import Memory, allocatable_bytes, memory
from phalanx.cost.analytic.option_effects import constants, extended_shape, layout_with_options, require_priced
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.analytic.step import Step, step
from phalanx.cost.hardware.columns import Column, gather
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.compressed import compressed_changes, compressed_gradients
from phalanx.cost.ledger.flops import active_params, hardware_flops, model_flops
from phalanx.cost.ledger.model_shape import Shape, kinds_of_blocks, padded_shape, shape
from phalanx.cost.ledger.pipeline_formulas import makespan
from phalanx.cost.ledger.rank_layout import LayoutColumns, PlacedLayout, layout
from phalanx.cost.pipeline_time import Costs
from phalanx.frameworks.registry import priced_stack
from phalanx.schedule.pipeline.given_layout import ends_of, given_blocks
from phalanx.schedule.pipeline.stages import rank_of, splits_backward
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.legality import require_compressible
from phalanx.spec.strategy.spec import FIELDS, Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions

_POLICY_FIELDS = ("grad_sync", "reshard")
"""Fields decided by a stack's policy (cost/ledger/policy.py)."""
_AS_DEFAULT = (*_POLICY_FIELDS, "bucket", "prefetch")
"""Fields of a strategy that have no term here; only their defaults are priced."""


@dataclass(frozen=True)
class Estimate:
    """The price of one step and its inputs; fields are numbers, or columns if columns were priced."""

    step: Step
    memory: Memory
    model_flops: Column
    hardware_flops: Column
    active_params: Column
    shape: Shape
    layout: LayoutColumns
    system: System
    profile: Profile

    @property
    def seconds(self) -> Column:
        """Seconds of the step."""
        return self.step.seconds

    @property
    def mfu(self) -> Column:
        """Model FLOP utilisation, against the peak in bf16."""
        return self.model_flops / (self.seconds * self.layout.world * self.system.peak_bf16)

    @property
    def hfu(self) -> Column:
        """Hardware FLOP utilisation (recomputation counted), against the peak in bf16."""
        return self.hardware_flops / (self.seconds * self.layout.world * self.system.peak_bf16)

    @property
    def allocatable_bytes(self) -> Column:
        """Bytes of the device available to the stack's allocator."""
        return allocatable_bytes(self.system.memory_bytes, self.profile)

    @property
    def fits(self) -> Column:
        """Whether the reserved bytes fit in the memory available to the stack's allocator."""
        return self.memory.reserved <= self.allocatable_bytes


def require_modelled(s: Strategy, stack: str) -> None:
    """Raise InputError if a field of a strategy has no term here, or the stack cannot run the strategy."""
    _require_default(s, _AS_DEFAULT)
    require_compressible(s, "float32")
    _require_priced(stack, s)


def require_policy(s: Strategy, stack: str) -> None:
    """Raise InputError if the stack cannot run a strategy, or the strategy sets a field that the stack's policy
    decides."""
    _require_default(s, _POLICY_FIELDS)
    _require_priced(stack, s)


def _require_priced(name: str, s: Strategy) -> None:
    """Raise InputError if a stack's constants cannot price a strategy, naming the field."""
    refusal = priced_stack(name).as_priced.refusal(s)
    if refusal is not None:
        raise refusal.error(name)


def _require_default(s: Strategy, names: Sequence[str]) -> None:
    for name in names:
        if getattr(s, name) != FIELDS[name].default:
            remedy = "leave it out; `phalanx plan JOB.toml` prices it for our own runtime"
            reason = "is not modelled for published stacks"
            raise InputError(f"strategy.{name}", getattr(s, name), reason, remedy)


def estimate(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: Job,
    s: Strategy,
    stack: str,
    number_format: str = "bfloat16",
    options: StackOptions = AS_RELEASED,
) -> Estimate:
    """Price one strategy, with the options of its stack. Raises InputError for a strategy, chip or stack that is not
    modelled."""
    require_modelled(s, stack)
    require_priced(options, cluster.device.kind, number_format)
    how = layout_of_strategy(model, job, s, options, number_format)
    size = shape(model)
    result = estimate_columns(
        extended_shape(size, options), how, system_of(cluster), constants(stack, job, size, options)
    )
    if splits_backward(s):
        _run_schedule(result.step, s, model)
    return result


def layout_of_strategy(
    model: ModelSpec, job: Job, s: Strategy, options: StackOptions = AS_RELEASED, number_format: str = "bfloat16"
) -> LayoutColumns:
    """Return the layout of one strategy with its compression, its stack's options and the blocks that they
    prescribe."""
    layers = model.layers + options.mtp
    even = replace(
        layout(s, job, layers, number_format),
        compressed=compressed_gradients(model, s),
        changes=compressed_changes(model, s),
    )
    given_blocks(s, options, layers)  # raises for parts that do not add up
    return layout_with_options(even, options, ends_of(s, options, layers))


def estimate_placed(
    model: ModelSpec,
    system: System,
    job: Job,
    s: Strategy,
    stack: str,
    distances: Mapping[str, Column],
    number_format: str = "bfloat16",
    options: StackOptions = AS_RELEASED,
) -> Estimate:
    """Price one strategy with its ranks placed on GPUs. `distances`: fields of PlacedLayout by name, each a number or
    a column with an element for each placement. Raises InputError as `estimate` does."""
    require_modelled(s, stack)
    _require_default(s, ("local",))
    even = layout_of_strategy(model, job, s, options, number_format)
    given = {field.name: getattr(even, field.name) for field in fields(LayoutColumns)}
    given |= {"compressed": compressed_gradients(model, s), "changes": compressed_changes(model, s)}
    how = PlacedLayout(**given | dict(distances))
    size = shape(model)
    return estimate_columns(extended_shape(size, options), how, system, constants(stack, job, size, options))


def _run_schedule(result: Step, s: Strategy, model: ModelSpec) -> None:
    """Set the bubble of a schedule that splits the backward pass (half of it each for input and weight gradients),
    from a run of its actions over chunks as equal as whole blocks allow."""
    ranks, passes = rank_of(s), [kind for _, kind in result.blocks]
    kinds = [passes[place] for place in kinds_of_blocks(model)]
    chunk_passes = [[kinds[i] for i in kind] for kind in np.array_split(np.arange(model.layers), len(ranks))]
    chunk_passes[-1].append(result.head)
    forward = [sum(float(kind.forward) for kind in chunk) for chunk in chunk_passes]
    half_backward = [sum(float(kind.backward) for kind in chunk) / 2 for chunk in chunk_passes]
    slowest = float(np.bincount(ranks, np.add(forward, np.multiply(half_backward, 2))).max())
    m = int(result.of["head"]["micro_batches"])
    seconds = makespan(s.schedule, s.pp, m, s.virtual, Costs(forward, half_backward, half_backward), slowest)
    result.terms["bubble"] = max(seconds - m * slowest, 0.0)
    result.of["bubble"] = {"makespan_s": seconds, "micro_batches": m, "slowest_s": slowest}


def compression_payment(e: Estimate) -> Payment | None:
    """Return the gradient exchange with and without compression; None without compression, or if the bytes depend on
    the gradients."""
    c = e.layout.compressed
    if not c.kind or c.bound:
        return None
    stride = e.layout.data_stride(e.system.tiers[0].ranks)
    n, p = float(e.step.of["dp"]["gradients"]), int(e.layout.dp * e.layout.cp)
    return payment(c, n, p, float(stride), e.system, e.profile)


def estimate_all(
    model: ModelSpec, cluster: ClusterSpec, job: Job, strategies: Sequence[Strategy], stack: str
) -> Estimate:
    """Price many strategies as columns; every schedule's bubble follows the formula for equal chunks. Raises
    InputError as `estimate` does."""
    for s in strategies:
        require_modelled(s, stack)
    columns = gather([layout_of_strategy(model, job, s) for s in strategies])
    size = shape(model)
    return estimate_columns(size, columns, system_of(cluster), constants(stack, job, size, AS_RELEASED))


def estimate_columns(model: Shape, layout: LayoutColumns, on: System, by: Profile) -> Estimate:
    """Apply the formulas to numbers, or to columns of any of the four arguments."""
    result = step(model, layout, on, by)
    return Estimate(
        result,
        memory(model, layout, by, result.ahead),
        model_flops(model, layout),
        hardware_flops(padded_shape(model, layout.tp, by.vocab_multiple), layout, by.policy),
        active_params(model),
        model,
        layout,
        on,
        by,
    )
