"""A resolved question: model, cluster, GPUs, job, strategy, software stack and precision, with the price of its
strategy and the premises that each output states.

`resolution.read` makes it from a `Query`. A plan of our own runtime (`phalanx plan JOB.toml`) is priced exactly, as
that runtime runs it, unless a stack is named.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from phalanx.answers.question.precision import with_bounds, with_products
from phalanx.cost.analytic.estimate import Estimate, estimate, require_modelled
from phalanx.frameworks.caveats import Caveat
from phalanx.frameworks.registry import DOCUMENTED, facts
from phalanx.frameworks.stated_training import StatedTraining
from phalanx.planning.explain.analytic import AnalyticSubject, host_bytes_in
from phalanx.planning.explain.exact import ExactSubject
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.cluster.calibration import in_words
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions


@dataclass(frozen=True)
class Premises:
    """The question as it was resolved, which every answer states."""

    about: str
    cluster: str
    gpus: int
    global_batch: int
    seq: int
    strategy: Strategy | None
    dp_rule: str
    stack: str
    engine: Literal["formulas", "exact"]
    """What prices the step: the stack's fitted formulas, or exactly our own runtime's program."""
    precision: str
    options: StackOptions
    refused: str = ""
    """Why the stack does not run the strategy; "" where it does, or has no row of facts."""
    overfull: str = ""
    """Memory of the fullest rank and of a device, such as "90.0 of 74.5 GiB"; "" where it fits or has no price."""
    host_bytes: float = 0.0
    """Model state offloaded to the memory of each node's host, at least; 0 where none is."""
    host_memory_bytes: int | None = None
    """Memory of a node's host; None: unknown."""
    calibrated: str = ""
    """Whose measured steps calibrate the price; "" where none do."""
    caveats: tuple[Caveat, ...] = ()
    """What matters to the price of a configuration and is not modelled, not judged, assumed or missing."""


@dataclass(frozen=True)
class Question:
    """A question that every command can price."""

    about: str
    """The model as it was named, or the file."""
    pricing_on: Callable[[int], Pricing]
    """The question on any number of GPUs."""
    gpus: int
    strategy: Strategy | None
    """None where it is to be searched."""
    dp_rule: str
    """Words for where the strategy's dp is from."""
    stack: str
    precision: str
    notes: tuple[str, ...] = ()
    plan: Plan | None = None
    """The plan that was read, if one was."""
    exact: ExactSubject | None = None
    """A strategy of our own runtime with its exact price; None where the formulas of a stack price it."""
    caveats: tuple[Caveat, ...] = ()
    """What matters to the price and is not modelled, not judged, assumed or missing."""
    training: StatedTraining | None = None
    """The length of the whole training, as the file or the plan states it."""
    void_zero: int | None = None
    """As in Configured: it takes effect where a change brings more data parallelism."""
    void_sp: bool = False
    """As in Configured: it takes effect where a change brings tensor parallelism."""
    followed: Mapping[str, str] = field(default_factory=dict)
    """As in Configured."""

    @cached_property
    def pricing(self) -> Pricing:
        """The question on its GPUs."""
        return self.pricing_on(self.gpus)

    @cached_property
    def subject(self) -> AnalyticSubject:
        """The strategy, priced by the formulas of the stack. Raises InputError for fields that have no term there."""
        assert self.strategy is not None
        require_modelled(self.strategy, self.stack)
        if self.strategy.compression != "none":
            reason = "only phalanx predict prices compression"
            raise InputError("strategy.compression", self.strategy.compression, reason, "leave it out")
        return self.lintable

    @cached_property
    def lintable(self) -> AnalyticSubject:
        """The strategy for `lint`, which also reads fields without a term: buckets, compression."""
        assert self.strategy is not None
        return AnalyticSubject(self.pricing_on, self.strategy, self.gpus)

    @cached_property
    def estimate(self) -> Estimate:
        """The price with every term's formula and numbers, and the pipeline timed action by action.

        Compression is priced by the formulas alone. Raises InputError."""
        assert self.strategy is not None
        p, s = self.pricing, self.strategy
        if s.compression == "none":
            s = self.subject.as_cut
        result = estimate(p.model, p.cluster, p.job, s, self.stack, p.number_format, p.extra)
        if s.compression == "none":
            result = replace(result, step=replace(result.step, terms=self.subject.priced.terms))
        return result

    @property
    def shown(self) -> Strategy:
        """The strategy of `estimate` as outputs show it: with the blocks of its chunks, where these are not equal."""
        assert self.strategy is not None
        return self.strategy if self.strategy.compression != "none" else self.subject.shown

    @property
    def calibrated(self) -> str:
        """Whose measured steps calibrate the price, and how many; "" where none do."""
        if self.exact is not None:
            return str(self.plan.choices.get("calibrated", "")) if self.plan else ""
        own = self.pricing.cluster.calibration
        return in_words(own) if own else ""

    @cached_property
    def refused(self) -> str:
        """Why the stack's row refuses the strategy that is priced, in one line; "" if it runs it or has no row."""
        row, s = DOCUMENTED.get(self.stack), self.strategy
        if row is None or s is None or self.exact is not None:
            return ""
        p = self.pricing
        options = with_products(p.extra, self.precision, self.stack)
        refusal = row.refusal(s, options, facts(p.model, p.job, s))
        return "" if refusal is None else str(refusal.error(row.name))

    @property
    def premises(self) -> Premises:
        """The question as every output states it."""
        job = self.exact.job if self.exact else self.pricing.job
        cluster = self.exact.cluster if self.exact else self.pricing.cluster
        return Premises(
            about=self.about,
            cluster=cluster.name,
            gpus=self.gpus,
            global_batch=job.global_batch,
            seq=job.seq,
            strategy=self.strategy,
            dp_rule=self.dp_rule,
            stack=self.stack,
            engine="formulas" if self.exact is None else "exact",
            precision=self.precision,
            options=AS_RELEASED if self.exact else self.pricing.extra,
            refused=self.refused,
            overfull=self._overfull,
            host_bytes=0.0 if self.exact or self.strategy is None else host_bytes_in(self.pricing, self.strategy),
            host_memory_bytes=cluster.host_memory_bytes,
            calibrated=self.calibrated,
            caveats=self._bounded,
        )

    @property
    def _overfull(self) -> str:
        """See Premises.overfull."""
        needs, has = (0.0, 0) if self.exact is None else self.exact.memory
        if self.strategy is not None and self.exact is None:
            with suppress(InputError):  # a question about what this stack does not run
                needs, has = float(self.estimate.memory.reserved), int(self.estimate.allocatable_bytes)
        return f"{needs / GIB:,.1f} of {has / GIB:.1f} GiB" if needs > has else ""

    @property
    def _bounded(self) -> tuple[Caveat, ...]:
        """The caveats, with bounds from the price, if there is one."""
        if self.strategy is None or self.exact is not None or not any(c.limit for c in self.caveats):
            return self.caveats
        try:
            return with_bounds(self.caveats, self.estimate)
        except InputError:  # a question about what this stack does not run
            return self.caveats
