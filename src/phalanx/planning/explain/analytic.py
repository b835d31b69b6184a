"""One strategy priced by the formulas of a software stack: step time, pipeline, traffic, and its neighbours."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from phalanx.cost.analytic.estimate import layout_of_strategy, require_policy
from phalanx.cost.analytic.host_memory import host_bytes
from phalanx.cost.analytic.state_parts import StatePerParameter, state_of
from phalanx.cost.ledger.flops import hardware_flops, model_flops
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import LayoutColumns
from phalanx.frameworks.registry import facts, row_of
from phalanx.planning.explain.lint import changed_fields
from phalanx.planning.explain.targets import BUBBLE, EXPOSED, IMBALANCE, MFU, OVERLAP, Target
from phalanx.planning.explain.traffic import TrafficRow, flows, term_of
from phalanx.planning.search import HEADROOM
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.search.refine import PipelineRun, RankedStrategy, RefinedPrices
from phalanx.planning.search.stack_options import single_changes
from phalanx.planning.search.strategy_columns import columns_of
from phalanx.schedule.pipeline.given_layout import given_blocks, write_layers
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy, format_field
from phalanx.spec.strategy.stack_options import StackOptions
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

_OFFLOADS: tuple[dict[str, Any], ...] = (
    {"accumulate": "sharded"},
    {"optimizer_offload": 1.0},
    {"optimizer_offload": 1.0, "parameter_offload": True},
)
"""Options that take model state off a device."""


@dataclass(frozen=True)
class AnalyticSubject:
    """A strategy of a question, with everything that explanations and lints need. Raises InputError if the strategy
    is not legal for the model and job."""

    larger: Callable[[int], Pricing]
    """From a number of GPUs to the question on that many."""
    strategy: Strategy
    gpus: int
    """Number of available GPUs; the strategy may use fewer."""
    headroom: float = HEADROOM
    """Share of a device's memory that alternative strategies must leave free, as in a search."""
    known: RefinedPrices | None = None
    """Prices of a search under the same question and headroom, if there was one."""

    def __post_init__(self) -> None:
        check(self.strategy, self.pricing.model, self.pricing.job, None)
        require_policy(self.strategy, self.pricing.stack)

    @cached_property
    def pricing(self) -> Pricing:
        """The question on all `gpus`."""
        return self.larger(self.gpus)

    @cached_property
    def pricing_of_others(self) -> Pricing:
        """The question with the headroom of a search."""
        return replace(self.pricing, headroom=self.headroom)

    @property
    def model(self) -> ModelSpec:
        """The model of the question."""
        return self.pricing.model

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster that holds all `gpus`."""
        return self.pricing.cluster

    @property
    def job(self) -> Job:
        """The job of the question."""
        return self.pricing.job

    @cached_property
    def _priced(self) -> RankedStrategy:
        return (self.known or RefinedPrices(self.pricing)).price([self.strategy])[0]

    @cached_property
    def _others(self) -> RefinedPrices:
        """Prices of other strategies, their pipelines timed action by action."""
        return self.known or RefinedPrices(self.pricing_of_others)

    @property
    def priced(self) -> PricedStrategy:
        """The strategy's price, its pipeline timed action by action."""
        return self._priced.priced

    @property
    def run(self) -> PipelineRun:
        """The pipeline, timed action by action."""
        return self._priced.run

    @property
    def as_cut(self) -> Strategy:
        """The strategy with its pipeline split made explicit, unless options of its stack prescribe it."""
        s = self.strategy
        given = s.pp == 1 or given_blocks(s, self.pricing.extra, sum(self.run.blocks)) is not None
        return s if given else replace(s, layers=write_layers(self.run.blocks))

    @property
    def shown(self) -> Strategy:
        """The strategy as displayed: with its pipeline split if that is uneven."""
        return self.as_cut if len(set(self.run.blocks)) > 1 else self.strategy

    @cached_property
    def flows(self) -> list[TrafficRow]:
        """Traffic of a rank in a step, by axis and operation."""
        return flows(self.pricing, self.strategy)

    @cached_property
    def _layout(self) -> LayoutColumns:
        """The strategy's layout, in columns of one row."""
        return self.pricing.layout(columns_of([self.strategy]))

    @property
    def reduces_each(self) -> bool:
        """Whether every micro-batch reduces its gradients."""
        how = sharding(self._layout, self.pricing.profile.policy)
        return bool(how.reduces_each[0] > 0 or how.replicates_each[0] > 0)

    @property
    def comparable_seconds(self) -> float:
        """Step time, seconds."""
        return self.priced.seconds

    @property
    def memory(self) -> tuple[float, int]:
        """Bytes needed by the fullest rank, and bytes available to it."""
        return float(self.priced.bytes_), self.pricing.allocatable

    @property
    def host_bytes(self) -> float:
        """Bytes of model state that each node's host holds."""
        return host_bytes_in(self.pricing, self.strategy)

    @cached_property
    def repeated_s(self) -> float:
        """Exposed seconds of the tensor-parallel communication that recomputation repeats: part of the step's term
        `recompute`."""
        if self.strategy.recompute == "none" or self.strategy.tp == 1:
            return 0.0
        profile, once = self.pricing.profile, flows(self.pricing, replace(self.strategy, recompute="none"))
        now, before = ([f for f in rows if f.axis == "tp"] for rows in (self.flows, once))
        inside = any(f.tier == self.pricing.cluster.tiers[0].name for f in now)
        again = sum(f.seconds for f in now) - sum(f.seconds for f in before)
        return again * (1 - float(profile.tp_overlap) * inside)  # it waits as the forward pass does

    def exposed_seconds(self, axis: str) -> float:
        """Return the exposed seconds of an axis's communication in a step: its share of the term that it is in. The
        term of expert parallelism also has permutations and waiting, so there it is the messages' seconds that the
        stack does not overlap."""
        term, profile = term_of(axis), self.pricing.profile
        own_s = sum(f.seconds for f in self.flows if f.axis == axis)
        if term == "ep" and not profile.overlaps_experts:
            return own_s * (1 - float(profile.ep_overlap))
        alone_s = sum(f.seconds for f in self.flows if term_of(f.axis) == term)
        exposed_s = self.priced.terms.get(term, 0.0) + (self.repeated_s if term == "tp" else 0.0)
        return exposed_s * own_s / alone_s if alone_s else 0.0

    def hidden(self, axis: str) -> float:
        """Return the share of an axis's communication that other work covers."""
        alone_s = sum(f.seconds for f in self.flows if f.axis == axis)
        return 1 - min(1.0, self.exposed_seconds(axis) / alone_s) if alone_s else 0.0

    @property
    def tensor_parallel(self) -> float:
        """Tensor-parallel communication as a share of the step."""
        return self.priced.terms.get("tp", 0.0) / self.priced.seconds

    @property
    def imbalance(self) -> float:
        """Excess of the slowest pipeline rank over the mean, as a share of the mean."""
        return self.run.imbalance

    @property
    def gradients_sent(self) -> float:
        """Bytes of gradients that a rank sends in a step."""
        return sum(f.sent for f in self.flows if f.axis in ("dp", "edp") and f.what == "gradients")

    def alternative(self, s: Strategy) -> PricedStrategy | None:
        """Price another strategy by the formulas; None if it is not legal, does not fit, or the stack refuses a field
        that it changes."""
        try:
            check(s, self.model, self.job, None)
        except InputError:
            return None
        if self._refused_for_a_change(s):
            return None
        p = self._others.price([s])[0].priced
        return p if p.fits else None

    def sets(self, field: str) -> bool:
        """Whether a configuration of the stack sets a field of the strategy."""
        row = self.pricing.row
        return row is None or (bool(row.strategy[field].key) and not row.strategy[field].in_code)

    def offloaded(self) -> Iterator[tuple[str, PricedStrategy]]:
        """Yield (settings, price) with options of the stack that take state off the device, at each level of ZeRO
        from the strategy's on, with its own recomputation or full, if it fits."""
        row, now = row_of(self.pricing.stack), self.strategy
        if not row.documented or self.cluster.device.kind != "cuda":
            return
        kinds = dict.fromkeys((now.recompute, "full"))
        for offload, level, kind in product(_OFFLOADS, ZERO_LEVELS[now.zero :], kinds):
            s = replace(now, zero=level.number, recompute=kind)
            options = StackOptions(**self.pricing.extra.changed() | offload)
            has = all(name in row.options and row.options[name].allows(value) for name, value in offload.items())
            has = has and ("accumulate" not in offload or s.accumulation(self.job) > 1)
            if not has or row.refusal(s, options, facts(self.model, self.job, s)) or options == self.pricing.extra:
                continue
            away_from = replace(self.pricing_of_others, extra=options)
            p, host = RefinedPrices(away_from).price([s])[0].priced, self.cluster.host_memory_bytes
            if p.fits and (host is None or host_bytes_in(away_from, s) <= host):
                changed = {name: getattr(s, name) for name in ("zero", "recompute")}
                changed = {name: value for name, value in changed.items() if value != getattr(now, name)}
                line = [f"{name}={value}" for name, value in changed.items()]
                yield ",".join(line + [f"{name}={format_field(value)}" for name, value in offload.items()]), p

    def gains(self) -> Iterator[tuple[str, str, PricedStrategy]]:
        """Yield (field or option, the settings that change it, the price with them) of every neighbour, of every
        other value of an option that a search sets, and of products in 16 bits in place of fp32, if they fit."""
        s = self.strategy
        for what, p in self.neighbours:
            if p.fits and not self._refused_for_a_change(p.strategy):
                yield what.split(" ")[0], changed_fields(s, p.strategy), p
        for name, pricing in single_changes(self.pricing_of_others):
            row = pricing.row
            if row is not None and row.refusal(s, pricing.extra, facts(self.model, self.job, s)) is None:
                p = RefinedPrices(pricing).price([s])[0].priced
                if p.fits:
                    entry = row.options[name]
                    yield name, f"{name}={getattr(pricing.extra, name)} ({entry.key or entry.written})", p
        half = next((d for d in ("bfloat16", "float16") if d in self.cluster.device.dense_flops_per_s), None)
        if self.job.precision.compute == "float32" and half is not None and self.pricing.number_format == "bfloat16":
            job = replace(self.job, precision=replace(self.job.precision, compute=half))
            p = RefinedPrices(replace(self.pricing, job=job)).price([s])[0].priced
            if p.fits:
                yield "precision", f"precision={'bf16' if half == 'bfloat16' else 'fp16'}", p

    def _refused_for_a_change(self, s: Strategy) -> bool:
        """Whether the stack refuses another strategy because of a field in which it differs from this one. A refusal
        that applies to both is reported along with the findings (answers/question/question.py)."""
        row, extra = self.pricing.row, self.pricing.extra
        refusal = None if row is None else row.refusal(s, extra, facts(self.model, self.job, s))
        return refusal is not None and getattr(s, refusal.field, None) != getattr(self.strategy, refusal.field, None)

    @property
    def seconds(self) -> float:
        """Step time."""
        return self.priced.seconds

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of a step required by the model, over all ranks."""
        return float(model_flops(self.pricing.shape, self._layout)[0])

    @cached_property
    def hardware_flops(self) -> float:
        """FLOPs of a step executed by the chips, including recomputation, over all ranks."""
        return float(hardware_flops(self.pricing.shape, self._layout, self.pricing.profile.policy)[0])

    @property
    def mfu(self) -> float:
        """Model FLOP/s as a share of the bf16 peak."""
        return self.model_flops / (self.seconds * self.strategy.world * float(self.pricing.system.peak_bf16))

    @property
    def bubble(self) -> float:
        """Bubble as a share of the step."""
        return self.run.bubble / self.seconds

    @property
    def overlap(self) -> float:
        """Hidden share of the data-parallel communication time; 1 without data parallelism."""
        total = sum(flow.seconds for flow in self.flows if flow.axis in ("dp", "edp"))
        return 1 - min(self.priced.terms.get("dp", 0.0) / total, 1.0) if total else 1.0

    @property
    def marks(self) -> list[tuple[Target, float]]:
        """Each target with the strategy's figure."""
        return [
            (MFU, self.mfu),
            (BUBBLE, self.bubble),
            (EXPOSED, sum(self.exposed_seconds(a) for a in {f.axis for f in self.flows}) / self.seconds),
            (OVERLAP, self.overlap),
            (IMBALANCE, self.run.imbalance),
        ]

    @cached_property
    def neighbours(self) -> list[tuple[str, PricedStrategy]]:
        """(change, price) of every strategy that differs in one decision, the fastest that fits first."""
        others = self._others.neighbours(self.strategy)
        ranked = self._others.price([s for _, s in others])
        named = [(what, r.priced) for (what, _), r in zip(others, ranked, strict=True)]
        return sorted(named, key=lambda item: (not item[1].fits, item[1].seconds))


def host_bytes_in(p: Pricing, s: Strategy) -> float:
    """Return the least bytes of a strategy's state that each node's host holds; 0 if none is offloaded."""
    if not (p.extra.optimizer_offload or p.extra.parameter_offload):
        return 0.0
    how = layout_of_strategy(p.model, p.job, s, p.extra, p.number_format)
    return host_bytes(p.shape, how, p.profile, p.extra, p.cluster.ranks_per_node)


def state_in(p: Pricing, s: Strategy) -> StatePerParameter:
    """Return the parts of the model state on a strategy's rank."""
    how = layout_of_strategy(p.model, p.job, s, p.extra, p.number_format)
    state = state_of(p.shape, how, p.profile, p.job, p.extra)
    if p.stack != "phalanx":
        return state
    # Our own runtime's state is counted exactly, with these.
    return replace(state, line=f"{state.line}; and buffers of buckets and units, tables, the batch")
