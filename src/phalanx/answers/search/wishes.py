"""The objective and the bounds of a search over strategies."""

from dataclasses import dataclass

from phalanx.answers.search.whole_training import Losses
from phalanx.planning.expense.rates import GivenRates, read_rates
from phalanx.planning.search import HEADROOM
from phalanx.planning.search.planner import COST_OBJECTIVES, OBJECTIVES
from phalanx.spec.errors import InputError, nearest

_OBJECTIVES = (*OBJECTIVES, *COST_OBJECTIVES, "days")


@dataclass(frozen=True)
class Wishes:
    """The objective and the bounds of a search."""

    objective: str = "throughput"
    """throughput or days (the shortest step); gpu-hours, money, energy or carbon (also on half of the GPUs, a
    quarter, ...); memory (the most left free by strategies within 10 % of the fastest)."""
    tokens: str | None = None
    """Tokens of the whole training, such as 300B; "optimal": 20 per active parameter."""
    price: float | None = None
    """Price of a GPU-hour, in any currency."""
    deadline: float | None = None
    """The most days that the whole training may take."""
    headroom: float = HEADROOM
    """Share of a device's memory that a strategy must leave free."""
    front: bool = False
    """Whether the whole Pareto front of time and memory is found."""
    lengths: str | None = None
    """Lengths of documents, such as lognormal:1200,1.1+packed (planning/lengths): the fastest candidates are ranked
    by the tokens that they train per second."""
    losses: Losses | None = None
    """Time that failures cost (reliability.losses.losses_under), for a search that counts them."""
    rates: str | None = None
    """Price, power and carbon of a GPU-hour, where the tables do not decide (planning/expense)."""

    def __post_init__(self) -> None:
        if self.objective not in _OBJECTIVES:
            raise InputError("objective", self.objective, "is not an objective", nearest(self.objective, _OBJECTIVES))
        if self.deadline is not None and not self.tokens:
            reason = "is missing: deadline is about a whole training"
            raise InputError("tokens", None, reason, "say how long it is, e.g. 300B")
        if self.objective in (*COST_OBJECTIVES, "days") and not self.tokens:
            reason = f"is missing: the objective {self.objective} is about a whole training"
            raise InputError("tokens", None, reason, "say how long it is, e.g. 300B")
        if self.losses is not None and (not self.tokens or self.objective == "memory"):
            reason = "is about a whole training: failures lengthen its days"
            raise InputError("goodput", None, reason, "say how long it is with tokens, and ask for days or money")
        self.given_rates()
        if not 0 <= self.headroom < 1:
            remedy = "write 0.05 to leave 5 % free"
            raise InputError("headroom", self.headroom, "is not a share of the memory", remedy)
        if self.deadline is not None and not 0 < self.deadline < float("inf"):
            raise InputError("deadline", self.deadline, "is not a number of days", "write 30")

    def given_rates(self) -> GivenRates:
        """Return the user's own rates. Raises InputError."""
        return read_rates(self.rates, self.price)


FASTEST = Wishes()
"""The fastest strategy, without other bounds."""
