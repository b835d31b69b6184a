"""The cost of a search's candidates, by which it ranks them: of a step over documents of unequal lengths, and of the
whole training in days, GPU-hours, money, energy or carbon."""

from dataclasses import dataclass, field, replace

from phalanx.answers.question.question import Question
from phalanx.answers.search.whole_training import objective_value
from phalanx.answers.search.wishes import Wishes
from phalanx.planning.budget import Goal
from phalanx.planning.expense.expense import Expense
from phalanx.planning.expense.rates import ExpenseRates
from phalanx.planning.lengths.distribution import Lengths
from phalanx.planning.lengths.dynamic import CONDITIONS
from phalanx.planning.lengths.steps import UnevenStep, UnevenSteps
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.limits import conditions
from phalanx.planning.search.planner import COST_OBJECTIVES
from phalanx.planning.search.refine import RankedStrategy
from phalanx.planning.training_cost import TrainingCost, expense_on, training_cost
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Weighing:
    """The cost of a search's candidates: of steps over documents of unequal lengths, and of the whole training."""

    wishes: Wishes
    rates: ExpenseRates
    gpus: int
    goal: Goal | None
    lengths: Lengths | None
    uneven: dict[Strategy, UnevenStep] = field(default_factory=dict)
    """Steps with documents of the lengths that were asked for, of the strategies priced with them so far."""

    @property
    def dynamic(self) -> bool:
        """Whether sequences are packed by their lengths, not cut at one."""
        return self.lengths is not None and self.lengths.way == "dynamic"

    def pricing(self, question: Question, count: int) -> Pricing:
        """Return the pricing of a question on `count` GPUs, with documents of the mean length."""
        p = replace(question.pricing_on(count), headroom=self.wishes.headroom)
        if self.lengths is None:
            return p
        wanted = (*p.wanted, *conditions(CONDITIONS)[0]) if self.dynamic else p.wanted
        return replace(p, wanted=wanted, extra=replace(p.extra, document=self.lengths.document(p.job.seq)))

    def draw(self, p: Pricing, s: Strategy) -> None:
        """Price a strategy's step with documents of unequal lengths, if these were asked for."""
        if self.lengths is not None and s not in self.uneven:
            self.uneven[s] = UnevenSteps(replace(p, extra=replace(p.extra, document=0)), s, self.lengths).asked()

    def whole_training(self, r: RankedStrategy, p: Pricing) -> TrainingCost | None:
        """Return days and GPU-hours of the whole training; None where none is asked for."""
        if self.goal is None:
            return None
        lost = self.wishes.losses and self.wishes.losses(p, r.strategy, r.seconds)
        step = self.uneven.get(r.strategy)
        trained = p.job.global_batch * p.job.seq if step is None else step.tokens_per_s * step.step_s
        return training_cost(self.goal, trained, step.step_s if step else r.seconds, lost)

    def full_step(self, r: RankedStrategy, p: Pricing) -> float:
        """Return the seconds in which as many tokens are trained as full sequences have."""
        step = self.uneven.get(r.strategy)
        return r.seconds if step is None else p.job.global_batch * p.job.seq / step.tokens_per_s

    def weigh(self, r: RankedStrategy, p: Pricing) -> float:
        """Return the number by which candidates are ranked: less is better."""
        self.draw(p, r.strategy)
        cost = self.whole_training(r, p)
        if cost is None:
            return self.full_step(r, p)
        if self.wishes.objective not in COST_OBJECTIVES:
            return cost.days
        return objective_value(training_expense(p, self.gpus, r.seconds, self.rates, cost), self.wishes.objective)


def training_expense(
    p: Pricing, gpus: int, step_s: float, rates: ExpenseRates, training: TrainingCost | None
) -> Expense:
    """Return the expense of a training, or of a million tokens, whose step on `gpus` GPUs takes `step_s` seconds."""
    rate = p.job.global_batch * p.job.seq / step_s
    return expense_on(gpus, rate, rates, gpus > p.cluster.ranks_per_node, training)
