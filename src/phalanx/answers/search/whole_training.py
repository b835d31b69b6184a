"""The number of GPUs for a whole training: the one with the least cost, or one that meets the deadline."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from phalanx.planning.budget import Goal
from phalanx.planning.expense.expense import Expense
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.variations import Offer
from phalanx.planning.training_cost import TrainingCost, TrainingLosses, training_cost
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy

Losses = Callable[[Pricing, Strategy, float], TrainingLosses]
"""Failures of a training, as a function of pricing, strategy and seconds of a step."""
PricedOffer = tuple[Offer, TrainingCost, Expense]


def cheapest(offered: Sequence[PricedOffer], objective: str, deadline: float | None) -> PricedOffer:
    """Return the offer with the least GPU-hours, money, energy or carbon among those within the deadline; if there is
    none, the one with the fewest days."""
    in_time = [row for row in offered if deadline is None or row[1].days <= deadline]
    if not in_time:
        return min(offered, key=lambda row: row[1].days)
    return min(in_time, key=lambda row: objective_value(row[2], objective))


def objective_value(expense: Expense, objective: str) -> float:
    """Return the figure of an expense that an objective minimises: GPU-hours, money, energy or carbon."""
    fields = {"money": expense.money, "energy": expense.energy_kwh, "carbon": expense.carbon_kg}
    value = fields.get(objective, expense.gpu_hours)
    assert value is not None
    return value


def require_in_time(
    goal: Goal, pricing: Pricing, s: Strategy, step_s: float, deadline: float, losses: Losses | None
) -> None:
    """Require that a training meets its deadline with its fastest strategy. Raises InputError with the number of
    GPUs that would."""

    def days_with(replicas: int) -> float:
        larger, step = replace(s, dp=replicas), step_s * s.dp / replicas
        lost = losses and losses(pricing, larger, step)
        return training_cost(goal, pricing.job.global_batch * pricing.job.seq, step, lost).days

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
