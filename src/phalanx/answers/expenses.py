"""What training with a question's strategy costs in money, energy and carbon, without failures."""

from __future__ import annotations

from phalanx.answers.question.question import Question
from phalanx.planning import budget
from phalanx.planning.expense.expense import A_MILLION, Expense, expense_of
from phalanx.planning.expense.rates import ExpenseRates, rates_on, read_rates


def rates_of(q: Question, line: str | None) -> ExpenseRates:
    """Return the rates on a question's device, with a user's line of own values. Raises InputError."""
    cluster = q.exact.cluster if q.exact else q.pricing.cluster
    return rates_on(cluster.device.name, read_rates(line))


def expense(q: Question, tokens_per_s: float, rates: ExpenseRates, tokens: str | None = None) -> Expense:
    """Return what a million tokens cost, or as many as `tokens` says (budget.tokens). Raises InputError."""
    about = q.exact or q.pricing
    count = 1e6 if tokens is None else budget.tokens(tokens, about.model)
    hours = count / tokens_per_s / 3600 * q.gpus
    of = A_MILLION if tokens is None else f"{budget.shortened(count)} tokens"
    return expense_of(of, hours, rates, {"training": hours}, q.gpus > about.cluster.ranks_per_node)
