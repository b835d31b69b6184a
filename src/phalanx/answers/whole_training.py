"""From a strategy's step to the whole training: days, GPU-hours and money, with failures where they are asked for,
and how many GPUs they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx.planning.budget import Goal
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
    cost: float | None
    """None without a price."""
    losses: TrainingLosses | None = None


def training_cost(goal: Goal, job: Job, step_s: float, losses: TrainingLosses | None = None) -> TrainingCost:
    """Return the days and the cost of a training whose undisturbed step takes `step_s`."""
    if losses is not None:
        goal, step_s = replace(goal, gpus=goal.gpus + losses.spare_gpus), step_s / losses.effective_share
    return TrainingCost(
        goal.tokens, goal.steps(job), goal.days(job, step_s), goal.gpu_hours(job, step_s), goal.money(job, step_s),
        losses,
    )  # fmt: skip


def cheapest(
    offered: Sequence[Offer], costs: Sequence[TrainingCost], deadline: float | None
) -> tuple[Offer, TrainingCost]:
    """Return the offer with the fewest GPU-hours of those in time; if none is, that with the fewest days."""
    rows = list(zip(offered, costs, strict=True))
    in_time = [row for row in rows if deadline is None or row[1].days <= deadline]
    return min(in_time, key=lambda row: row[1].gpu_hours) if in_time else min(rows, key=lambda row: row[1].days)


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
