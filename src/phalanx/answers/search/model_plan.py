"""The fastest strategy for a model on a cluster under one stack, or under each: `plan` of a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from phalanx.answers.answer import DRAWN, Answer
from phalanx.answers.plan import plan_of
from phalanx.answers.prediction import ESTIMATED, interval_in
from phalanx.answers.question.query import Query, QueryFields, Source, query_of
from phalanx.answers.question.question import Premises, Question
from phalanx.answers.question.searches import first_answer, searches_of
from phalanx.answers.question.strategy_line import as_given
from phalanx.answers.search.weighing import Weighing, training_expense
from phalanx.answers.search.whole_training import (
    PricedOffer,
    cheapest,
    require_in_time,
)
from phalanx.answers.search.wishes import FASTEST, Wishes
from phalanx.cost.analytic.state_parts import StatePerParameter
from phalanx.planning import lookup
from phalanx.planning.budget import Goal
from phalanx.planning.budget import tokens as token_count
from phalanx.planning.expense.expense import Expense, with_interval
from phalanx.planning.expense.rates import ExpenseRates, rates_on, require_counted
from phalanx.planning.explain.analytic import AnalyticSubject, state_in
from phalanx.planning.lengths.distribution import parse_lengths
from phalanx.planning.lengths.steps import UnevenStep
from phalanx.planning.search.planner import COST_OBJECTIVES, Objective, SearchAnswer, answer
from phalanx.planning.search.refine import RankedStrategy
from phalanx.planning.search.replicas_alone import StepsAlone, steps_alone_around
from phalanx.planning.search.variations import ConditionCost, condition_costs, offers
from phalanx.planning.training_cost import TrainingCost, training_cost
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.files.plan import Plan
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

_PHASES = (("training",), ("training", "idle"))
"""Phases whose power is counted: without failures, and with them."""
_WEIGHED = 12
"""Candidates that are priced with unequal lengths: each takes about a second."""


@dataclass(frozen=True)
class PlannedStrategy:
    """A strategy that a search priced with its pipeline timed action by action."""

    strategy: Strategy
    family: str
    step_time_s: float
    step_time_low_s: float
    """Between these two a measured step of this kind lies at 80 %, as far as published runs tell."""
    step_time_high_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    micro_batches: int
    mfu: float
    memory_bytes: float
    """Reserved on the fullest rank."""
    usable_bytes: float
    communication_share: float
    """Exposed communication as a share of the step."""
    bubble_share: float
    imbalance: float
    """Excess of the slowest pipeline rank over the mean, as a share of the mean."""
    terms_s: Mapping[str, float]
    memory_terms: Mapping[str, float]
    state: StatePerParameter
    """Bytes of a parameter's weights, gradient and optimizer state."""
    training: TrainingCost | None
    expense: Expense
    """For the whole training, or for a million tokens where none is asked for."""
    lengths: UnevenStep | None = None
    """The step with documents of the lengths that were asked for; only of the fastest candidates."""
    origin: str = ESTIMATED


@dataclass(frozen=True)
class RejectedStrategy:
    """A strategy and why it is not the best one."""

    strategy: Strategy
    family: str
    reason: str
    fits: bool
    memory_bytes: float
    step_time_s: float


@dataclass(frozen=True)
class NarrowerFormats:
    """Narrower number formats that the stack has and that would be faster."""

    where: str
    """The formats as conditions for `where`."""
    options: Mapping[str, Any]
    strategy: Strategy
    step_time_s: float
    gain: float
    """Share of the step that is saved."""
    memory_bytes: float


@dataclass(frozen=True)
class SmallerCluster:
    """Fewer GPUs, with their best strategy."""

    gpus: int
    strategy: Strategy
    step_time_s: float
    training: TrainingCost | None = None
    expense: Expense | None = None


@dataclass(frozen=True)
class UnequalChunks:
    """The blocks of the best strategy's chunks, where they are not equal."""

    blocks: tuple[int, ...]
    equal_step_time_s: float | None
    """With equal chunks; None where those do not fit."""


@dataclass(frozen=True)
class CostOfCondition:
    """The cost of a condition: the step with it over the step without, minus 1; None where nothing fits without it
    either, or where that was not searched."""

    condition: str
    cost: float | None
    without: Strategy | None
    step_time_s: float | None


@dataclass(frozen=True)
class ModelPlan(Answer):
    """The best strategies of a model on a cluster, and why the others are worse."""

    rows_of = "ranked"
    question: Premises
    model: ModelSpec
    device: str
    gpus: int
    options: StackOptions
    """Options of the stack with which the strategies are priced."""
    headroom: float
    rates: ExpenseRates
    """Prices of a GPU-hour, of energy and of carbon, with their sources."""
    best: PlannedStrategy
    """With `layers` listing the blocks of its chunks, as in the plan."""
    alternatives: tuple[PlannedStrategy, ...]
    families: Mapping[str, PlannedStrategy]
    """Family -> its fastest strategy that fits."""
    front: tuple[PlannedStrategy, ...]
    """Fastest first, each with less memory than all before it."""
    rejected: tuple[RejectedStrategy, ...]
    number_formats: tuple[NarrowerFormats, ...]
    fewer_gpus: SmallerCluster | None
    """A smaller number of GPUs that is as fast."""
    offers: tuple[SmallerCluster, ...]
    """Days and expense of a whole training by number of GPUs, where the objective is a cost."""
    chunks: UnequalChunks | None
    conditions: CostOfCondition | None
    """Cost of all conditions together."""
    each_condition: tuple[CostOfCondition, ...]
    """Cost of each on top of the others."""
    steps_alone: tuple[StepsAlone, ...]
    """The best strategy with other numbers of steps between synchronisations (`local`), and other bits of these."""
    strategies_evaluated: int
    """Number of legal strategies."""
    strategies_priced_one_by_one: int
    search_s: float
    notes: tuple[str, ...]
    plan: Plan = field(repr=False, compare=False, metadata=DRAWN)
    """The plan that `save` writes, for train, verify, explain, lint and export."""
    search: SearchAnswer = field(repr=False, compare=False, metadata=DRAWN)
    subject: AnalyticSubject = field(repr=False, compare=False, metadata=DRAWN)
    goal: Goal | None = field(default=None, repr=False, compare=False, metadata=DRAWN)

    @property
    def strategy(self) -> Strategy:
        """The best strategy."""
        return self.best.strategy

    @property
    def ranked(self) -> tuple[PlannedStrategy, ...]:
        """The best strategies, best first."""
        return (self.best, *self.alternatives)

    def save(self, file: str | Path = "plan.json") -> Path:
        """Write the plan and return its path. Raises OSError."""
        plans.write(self.plan, Path(file))
        return Path(file)


def plan(source: Source = None, wishes: Wishes = FASTEST, **fields: Unpack[QueryFields]) -> ModelPlan:
    """Find the fastest strategy for a model on a cluster that need not exist here.

        phalanx.plan(model="llama3-70b", cluster="dgx-h100", gpus=64, batch=512, seq=8192)

    `strategy` holds fields to keep, such as tp=8,pp=*; `where` conditions, such as "tp<=8, zero=1". Raises
    InputError, also if nothing fits: then it names the fewest GPUs that suffice."""
    return model_plan(query_of(source, fields), wishes)


def model_plan(
    query: Query,
    wishes: Wishes,
    announce: Callable[[str], None] = lambda _: None,
    watch: Callable[[int, int], None] | None = None,
    known: Sequence[Strategy] = (),
    fewer: bool = True,
) -> ModelPlan:
    """Search the strategies of a query. Raises InputError.

    `announce` is called with decisions on the way, `watch` with (strategies priced so far, legal strategies).
    `known`: strategies that are likely among the best, which speed up the search. `fewer`: whether smaller numbers of
    GPUs are tried too."""
    try:
        return first_answer(
            searches_of(query, query.stack or lookup.stack_on(query.cluster)),
            lambda question: _search(question, query, wishes, announce, watch, known, fewer),
        )
    except InputError as error:
        raise as_given(error, query) from None


def _search(
    question: Question,
    query: Query,
    wishes: Wishes,
    announce: Callable[[str], None],
    watch: Callable[[int, int], None] | None,
    known: Sequence[Strategy],
    fewer: bool,
) -> ModelPlan:
    # The number of GPUs, and what a candidate costs.
    rates = rates_on(question.pricing.cluster.device.name, wishes.given_rates(), _PHASES[wishes.losses is not None])
    require_counted(rates, wishes.objective)
    gpus, goal, offered = _number_of_gpus(question, wishes, rates, announce)
    lengths = parse_lengths(wishes.lengths) if wishes.lengths is not None else None
    weighing = Weighing(wishes, rates, gpus, goal, lengths)
    if lengths is not None and weighing.dynamic and lengths.slot:
        reason = "states the tokens a rank, which a search chooses: a sequence's over cp"
        raise InputError("lengths", lengths.line, reason, "use +dynamic alone")
    pricing = partial(weighing.pricing, question)
    objective: Objective = "memory" if wishes.objective == "memory" else "throughput"
    # The search, and what its conditions cost.
    result = answer(
        pricing,
        gpus,
        objective,
        whole_front=wishes.front,
        fewer=fewer,
        watch=watch,
        hints=known,
        weigh=weighing.weigh if wishes.losses or lengths else None,
        weighed=_WEIGHED if lengths else None,
    )
    if goal is not None and wishes.deadline is not None:
        first = result.ranked[0]
        step_s = weighing.full_step(first, result.pricing)
        require_in_time(goal, result.pricing, first.strategy, step_s, wishes.deadline, wishes.losses)
    costs: tuple[ConditionCost | None, tuple[ConditionCost, ...]] = None, ()
    if result.pricing.wanted:
        costs = condition_costs(pricing, gpus, result.best.seconds)
    best, p = result.to_run, result.pricing
    weighing.draw(p, best.strategy)
    plan = plan_of(p, best.priced, best.run, best.mfu, query.cluster or "", question.precision)
    plan = replace(plan, job=replace(p.job, documents="dynamic")) if weighing.dynamic else plan
    subject = AnalyticSubject(
        lambda n: p if n == gpus else pricing(n), result.best.strategy, gpus, wishes.headroom, result.prices
    )
    return _answer(question, result, weighing, offered, costs, plan, subject)


def _answer(
    question: Question,
    result: SearchAnswer,
    weighing: Weighing,
    offered: Sequence[PricedOffer],
    costs: tuple[ConditionCost | None, tuple[ConditionCost, ...]],
    plan: Plan,
    subject: AnalyticSubject,
) -> ModelPlan:
    """Return what a search found as its answer. `costs`: of all conditions together, and of each."""
    best, p, (whole, cost_by_condition) = result.to_run, result.pricing, costs
    plain_s = None if whole is None else whole.seconds

    def planned(r: RankedStrategy) -> PlannedStrategy:
        return _plan(r, result, weighing)

    return ModelPlan(
        question=question.premises,
        model=p.model,
        device=p.cluster.device.name,
        gpus=weighing.gpus,
        options=p.extra,
        headroom=p.headroom,
        rates=weighing.rates,
        best=planned(best),
        alternatives=tuple(map(planned, result.ranked[1:])),
        families={r.family: planned(r) for r in result.families},
        front=tuple(map(planned, result.front)),
        rejected=tuple(
            RejectedStrategy(r.priced.strategy, r.family, r.reason, r.priced.fits, r.priced.bytes_, r.priced.seconds)
            for r in result.rejected
        ),
        number_formats=tuple(
            NarrowerFormats(o.where, o.types, o.strategy, o.seconds, o.gain, o.bytes_) for o in result.types
        ),
        fewer_gpus=None
        if result.fewer is None
        else SmallerCluster(result.fewer.gpus, result.fewer.strategy, result.fewer.seconds),
        offers=tuple(SmallerCluster(o.gpus, o.strategy, o.seconds, cost, spent) for o, cost, spent in offered),
        chunks=None
        if result.lengths is None
        else UnequalChunks(tuple(result.lengths.blocks), result.lengths.equal_seconds),
        conditions=None if whole is None else CostOfCondition(whole.text, whole.share, whole.without, whole.seconds),
        each_condition=tuple(CostOfCondition(c.text, c.share, c.without, c.seconds) for c in cost_by_condition),
        steps_alone=steps_alone_around(p, best.strategy, plain_s) if best.strategy.local else (),
        strategies_evaluated=result.evaluated,
        strategies_priced_one_by_one=result.examined,
        search_s=result.seconds,
        notes=question.notes,
        plan=plan,
        search=result,
        subject=subject,
        goal=weighing.goal,
    )


def _number_of_gpus(
    question: Question, wishes: Wishes, rates: ExpenseRates, announce: Callable[[str], None]
) -> tuple[int, Goal | None, list[PricedOffer]]:
    """Return (number of GPUs to search on, whole training or None, priced offers of other numbers of GPUs)."""
    if not wishes.tokens:
        return question.gpus, None, []
    gpus, job = question.gpus, question.pricing.job
    goal = Goal(token_count(wishes.tokens, question.pricing.model), gpus)
    if wishes.objective not in COST_OBJECTIVES:
        return gpus, goal, []
    offered: list[PricedOffer] = []
    for o in offers(lambda n: replace(question.pricing_on(n), headroom=wishes.headroom), gpus):
        p = question.pricing_on(o.gpus)
        lost = wishes.losses and wishes.losses(p, o.strategy, o.seconds)
        cost = training_cost(replace(goal, gpus=o.gpus), job.global_batch * job.seq, o.seconds, lost)
        offered.append((o, cost, training_expense(p, o.gpus, o.seconds, rates, cost)))
    if offered:
        best, cost, _ = cheapest(offered, wishes.objective, wishes.deadline)
        limit = "" if wishes.deadline is None else f" in {wishes.deadline:g} days"
        among = f"of {question.gpus} and its halves{limit}"
        least = "fewest GPU-hours" if wishes.objective == "gpu-hours" else f"least {wishes.objective}"
        announce(f"{best.gpus} GPUs take the {least}, {among}: {cost.days:,.0f} days")
        gpus = best.gpus
    return gpus, replace(goal, gpus=gpus), offered


def _plan(r: RankedStrategy, result: SearchAnswer, weighing: Weighing) -> PlannedStrategy:
    p, job = result.pricing, result.pricing.job
    # The expense of the whole training, or of a million tokens.
    weighed = weighing.lengths is None or r.strategy in weighing.uneven
    training, step_s = (weighing.whole_training(r, p), weighing.full_step(r, p)) if weighed else (None, r.seconds)
    spent = training_expense(p, r.strategy.world, step_s, weighing.rates, training)
    rate = job.global_batch * job.seq / r.seconds
    sure = interval_in(p, r.priced.terms, p.stack)
    return PlannedStrategy(
        strategy=r.strategy,
        family=r.family,
        step_time_s=r.seconds,
        step_time_low_s=r.seconds * sure.low,
        step_time_high_s=r.seconds * sure.high,
        tokens_per_s=rate,
        tokens_per_s_per_gpu=rate / r.strategy.world,
        micro_batches=r.strategy.accumulation(job),
        mfu=r.mfu,
        memory_bytes=r.priced.bytes_,
        usable_bytes=p.allocatable,
        communication_share=r.priced.communication,
        bubble_share=r.run.bubble / r.seconds,
        imbalance=r.run.imbalance,
        terms_s=r.priced.terms,
        memory_terms=r.priced.memory_terms,
        state=state_in(p, r.strategy),
        training=training,
        expense=with_interval(spent, sure.low, sure.high),
        lengths=weighing.uneven.get(r.strategy),
    )
