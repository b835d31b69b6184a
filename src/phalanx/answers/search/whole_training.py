"""From a strategy's step to the whole training: days, GPU-hours and what they cost, with failures where they are
asked for, and how many GPUs they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx.planning.budget import Goal, shortened
from phalanx.planning.expense.expense import A_MILLION, Expense, expense_of
from phalanx.planning.expense.rates import ExpenseRates
from phalanx.planning.lengths.distribution import Lengths
from phalanx.planning.lengths.steps import UnevenStep, UnevenSteps
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.variations import Offer
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class TrainingLosses:
    """What failures, restarts and saves take of a training with one layout, by the closed form."""

    effective_share: float
    """Of the time, in which the training advances."""
    saving_share: float
    """Stopped by saves."""
    again_share: float
    """Work done again."""
    down_share: float
    """Detection, restarts, waits for nodes, maintenance."""
    checkpoint_bytes: float
    stall_s: float
    """For how long a save stops the training."""
    load_s: float
    interval_s: float
    """Work between saves."""
    spare_gpus: int


def uneven_steps_of(
    lengths: Lengths | None, known: dict[Strategy, UnevenStep]
) -> Callable[[Pricing, Strategy], None]:
    """Return what draws a strategy's steps with documents of these lengths, once for each, into `known`."""

    def draw(p: Pricing, s: Strategy) -> None:
        if lengths is not None and s not in known:
            known[s] = UnevenSteps(replace(p, extra=replace(p.extra, document=0)), s, lengths).asked()

    return draw


Losses = Callable[[Pricing, Strategy, float], TrainingLosses]
"""From a question, a strategy and the seconds of its step."""


@dataclass(frozen=True)
class TrainingCost:
    """A whole training at the speed of a step, with failures where they are asked for."""

    tokens: float
    steps: float
    days: float
    gpu_hours: float
    """With failures, spare nodes included."""
    losses: TrainingLosses | None = None


def training_cost(goal: Goal, job: Job, step_s: float, losses: TrainingLosses | None = None) -> TrainingCost:
    """Return the days and the cost of a training whose undisturbed step takes `step_s`."""
    if losses is not None:
        goal, step_s = replace(goal, gpus=goal.gpus + losses.spare_gpus), step_s / losses.effective_share
    return TrainingCost(goal.tokens, goal.steps(job), goal.days(job, step_s), goal.gpu_hours(job, step_s), losses)


def expense_on(
    gpus: int, tokens_per_s: float, rates: ExpenseRates, over_nodes: bool, training: TrainingCost | None = None
) -> Expense:
    """Return what a million tokens cost on GPUs that train `tokens_per_s` together, or a whole training. Its spares
    and whoever waits for a restart draw what an idle node draws."""
    if training is None:
        hours = 1e6 / tokens_per_s / 3600 * gpus
        return expense_of(A_MILLION, hours, rates, {"training": hours}, over_nodes)
    hours, idle, lost = training.gpu_hours, 0.0, training.losses
    if lost is not None:
        idle = hours * (gpus * lost.down_share + lost.spare_gpus) / (gpus + lost.spare_gpus)
    phases = {"training": hours - idle} | ({"idle": idle} if idle else {})
    return expense_of(f"{shortened(training.tokens)} tokens", hours, rates, phases, over_nodes)


PricedOffer = tuple[Offer, TrainingCost, Expense]


def cheapest(offered: Sequence[PricedOffer], objective: str, deadline: float | None) -> PricedOffer:
    """Return the offer that takes least of what the objective counts, of those in time; if none is, that with the
    fewest days."""
    in_time = [row for row in offered if deadline is None or row[1].days <= deadline]
    if not in_time:
        return min(offered, key=lambda row: row[1].days)
    return min(in_time, key=lambda row: counted(row[2], objective))


def counted(expense: Expense, objective: str) -> float:
    """Return what an objective counts: GPU-hours, money, energy or carbon."""
    fields = {"money": expense.money, "energy": expense.energy_kwh, "carbon": expense.carbon_kg}
    value = fields.get(objective, expense.gpu_hours)
    assert value is not None
    return value


def require_in_time(
    goal: Goal, pricing: Pricing, s: Strategy, step_s: float, deadline: float, losses: Losses | None
) -> None:
    """Require that a training ends in time with its fastest strategy. Raises InputError."""

    def days_with(replicas: int) -> float:
        larger, step = replace(s, dp=replicas), step_s * s.dp / replicas
        return training_cost(goal, pricing.job, step, losses and losses(pricing, larger, step)).days

    days = days_with(s.dp)
    if days <= deadline:
        return
    replicas, reached = s.dp, days
    for _ in range(20):  # more GPUs also fail more often
        replicas = max(-int(-replicas * reached // deadline), replicas + 1)
        try:
            reached = days_with(replicas)
        except InputError:
            break
        if reached <= deadline:
            break
    reason = f"{goal.gpus} GPUs take {days:,.1f} days with {s}, the fastest"
    would = f"about {s.world // s.dp * replicas:,} GPUs would do"
    raise InputError("deadline", deadline, reason, would if reached <= deadline else "fail less, or restart faster")
