"""How long a question's training takes, and what it costs in money, energy and carbon, without failures."""

from phalanx.answers.question.question import Question
from phalanx.planning import budget
from phalanx.planning.expense.expense import Expense
from phalanx.planning.expense.rates import ExpenseRates, rates_on, read_rates
from phalanx.planning.training_cost import TrainingCost, expense_on, training_cost


def rates_of(q: Question, line: str | None) -> ExpenseRates:
    """Return the rates on a question's device, with a user's line of own values. Raises InputError."""
    cluster = q.exact.cluster if q.exact else q.pricing.cluster
    return rates_on(cluster.device.name, read_rates(line))


def training_of(q: Question, step_tokens: float, step_s: float, line: str | None = None) -> TrainingCost | None:
    """Return a whole training with steps of `step_tokens` in `step_s`: of as many tokens as `line` says
    (budget.tokens), else as the question's file or plan does; None where neither says it. Raises InputError."""
    about = q.exact or q.pricing
    tokens = None if q.training is None else q.training.whole_tokens(about.job.global_batch, about.job.seq)
    if line is not None:
        tokens = budget.tokens(line, about.model)
    return None if tokens is None else training_cost(budget.Goal(tokens, q.gpus), step_tokens, step_s)


def expense(q: Question, tokens_per_s: float, rates: ExpenseRates, training: TrainingCost | None = None) -> Expense:
    """Return what a million tokens cost, or a whole training."""
    about = q.exact or q.pricing
    return expense_on(q.gpus, tokens_per_s, rates, q.gpus > about.cluster.ranks_per_node, training)
