"""From the time of a step to the whole training: days, GPU-hours and what they cost, with failures if asked for."""

from dataclasses import dataclass

from phalanx.planning.budget import Goal, short_number
from phalanx.planning.expense.expense import A_MILLION, Expense, expense_of
from phalanx.planning.expense.rates import ExpenseRates


@dataclass(frozen=True)
class TrainingLosses:
    """Shares of a training's time with one layout, by the closed form, and its checkpoints."""

    effective_share: float
    """Share of the time in which the training advances."""
    saving_share: float
    """Share in which saves stop it."""
    again_share: float
    """Share of work that is done again."""
    down_share: float
    """Share of detection, restarts, waits for nodes and maintenance."""
    checkpoint_bytes: float
    stall_s: float
    """For how long a save stops the training."""
    load_s: float
    interval_s: float
    """Work between saves."""
    spare_gpus: int


@dataclass(frozen=True)
class TrainingCost:
    """A whole training at the speed of a step; with failures if `losses` are given."""

    tokens: float
    steps: float
    days: float
    gpu_hours: float
    """With failures, spare nodes included."""
    losses: TrainingLosses | None = None


def training_cost(
    goal: Goal, step_tokens: float, step_s: float, losses: TrainingLosses | None = None
) -> TrainingCost:
    """Return the days and the cost of a training whose undisturbed step of `step_tokens` takes `step_s`."""
    gpus = goal.gpus
    if losses is not None:
        gpus, step_s = gpus + losses.spare_gpus, step_s / losses.effective_share
    steps = goal.tokens / step_tokens
    return TrainingCost(goal.tokens, steps, steps * step_s / 86_400, steps * step_s / 3600 * gpus, losses)


def expense_on(
    gpus: int, tokens_per_s: float, rates: ExpenseRates, over_nodes: bool, training: TrainingCost | None = None
) -> Expense:
    """Return the cost of a million tokens on GPUs that train `tokens_per_s` together, or of a whole `training`, whose
    spare nodes and nodes that wait for a restart draw the power of idle ones."""
    if training is None:
        hours = 1e6 / tokens_per_s / 3600 * gpus
        return expense_of(A_MILLION, hours, rates, {"training": hours}, over_nodes)
    hours, idle, lost = training.gpu_hours, 0.0, training.losses
    if lost is not None:
        idle = hours * (gpus * lost.down_share + lost.spare_gpus) / (gpus + lost.spare_gpus)
    phases = {"training": hours - idle} | ({"idle": idle} if idle else {})
    return expense_of(f"{short_number(training.tokens)} tokens", hours, rates, phases, over_nodes)
