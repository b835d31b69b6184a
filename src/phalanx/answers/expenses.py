"""How long the training of a question takes without failures, and its cost in money, energy and carbon."""

from phalanx.answers.question.question import Question
from phalanx.planning import budget
from phalanx.planning.expense.expense import Expense
from phalanx.planning.expense.rates import ExpenseRates, rates_on, read_rates
from phalanx.planning.training_cost import TrainingCost, expense_on, training_cost


def rates_of(q: Question, line: str | None) -> ExpenseRates:
    """Return the prices on a question's device; `line` has the user's own, such as price=2.5. Raises InputError."""
    cluster = q.exact.cluster if q.exact else q.pricing.cluster
    return rates_on(cluster.device.name, read_rates(line))


def training_of(q: Question, step_tokens: float, step_s: float, line: str | None = None) -> TrainingCost | None:
    """Return the cost of a whole training in steps of `step_tokens` and `step_s`. Its tokens are in `line`
    (budget.tokens), else in the question's file or plan; None where neither has them. Raises InputError."""
    about = q.exact or q.pricing
    tokens = None if q.training is None else q.training.whole_tokens(about.job.global_batch, about.job.seq)
    if line is not None:
        tokens = budget.tokens(line, about.model)
    return None if tokens is None else training_cost(budget.Goal(tokens, q.gpus), step_tokens, step_s)


def expense(q: Question, tokens_per_s: float, rates: ExpenseRates, training: TrainingCost | None = None) -> Expense:
    """Return the expense of a million tokens, or of a whole training where one is given."""
    about = q.exact or q.pricing
    return expense_on(q.gpus, tokens_per_s, rates, q.gpus > about.cluster.ranks_per_node, training)
