"""Where a strategy's time and memory go, what to change first, and what each single change would do: `explain`."""

from dataclasses import dataclass, field
from typing import Unpack

from phalanx.answers.answer import DRAWN, Answer
from phalanx.answers.prediction import Prediction, with_expense
from phalanx.answers.question.query import QueryFields, Source, query_of
from phalanx.answers.question.question import Question
from phalanx.answers.question.resolution import read
from phalanx.planning.explain import explanation, operators
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.explain.exact import explain_exactly
from phalanx.planning.explain.explanation import Loss
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class TargetMark:
    """A figure of the step, and the values that count as good and excellent."""

    name: str
    value: float
    good: float
    excellent: float
    mark: str
    source: str


@dataclass(frozen=True)
class AxisTraffic:
    """A mesh axis on the communication roofline, per rank and step."""

    axis: str
    tier: str
    """The links that the axis's groups span."""
    sent_bytes: float
    flop_per_byte: float
    ridge: float
    """FLOP per byte from which the links keep up with the chip."""
    regime: str
    exposed_s: float
    critical_batch: float | None
    """Sequences per step from which the data axis is bound by compute; None if its traffic grows with the batch."""


@dataclass(frozen=True)
class OperatorIntensity:
    """An operator of a block, forward, on the compute roofline."""

    name: str
    size: str
    flops: float
    bytes: float
    intensity: float
    """FLOP per byte of memory."""
    bound: str
    takes_s: float


@dataclass(frozen=True)
class Neighbour:
    """A strategy that differs in one decision."""

    change: str
    strategy: Strategy
    step_time_s: float
    memory_bytes: float
    fits: bool
    reason: str
    """What it saves, or why it is no better; "" where an exact price says it all."""


@dataclass(frozen=True)
class Explanation(Answer):
    """A prediction with its reasons. Where the price is exact, the fields that only formulas can fill are empty."""

    rows_of = "neighbours"
    prediction: Prediction
    targets: tuple[TargetMark, ...]
    communication: tuple[AxisTraffic, ...]
    operators: tuple[OperatorIntensity, ...]
    ridge: float | None
    """FLOP per byte of memory from which the chip computes at its peak."""
    losses: tuple[Loss, ...]
    order: str
    """The price of the other order of the mesh, in words; "" if there is no other."""
    neighbours: tuple[Neighbour, ...]
    subject: AnalyticSubject | None = field(default=None, repr=False, compare=False, metadata=DRAWN)


def explain(source: Source = None, **fields: Unpack[QueryFields]) -> Explanation:
    """Explain a strategy's step time and memory, and price every strategy that differs in one decision.

    `source`: a plan.json, a run's folder, another framework's configuration, or a Query. Raises InputError."""
    return explanation_of(read(query_of(source, fields)))


def explanation_of(question: Question) -> Explanation:
    """Explain the strategy of a question. Raises InputError."""
    if question.exact is not None:
        return _exact(question)
    x = question.subject
    return Explanation(
        prediction=with_expense(question),
        targets=tuple(
            TargetMark(t.name, value, t.good, t.excellent, t.mark(value), t.source) for t, value in x.marks
        ),
        communication=tuple(
            AxisTraffic(a.axis, a.tier, a.sent, a.intensity, a.ridge, a.regime, a.exposed_s, a.critical_batch)
            for a in explanation.axes(x)
        ),
        operators=tuple(
            OperatorIntensity(o.name, o.shape, o.flops, o.bytes_, o.intensity, o.bound, o.seconds)
            for o in operators.training(x.pricing, x.strategy)
        ),
        ridge=operators.ridge(x.pricing),
        losses=tuple(explanation.losses(x)),
        order=explanation.order_costs(x),
        neighbours=tuple(
            Neighbour(change, p.strategy, p.seconds, p.bytes_, p.fits, reason)
            for change, p, reason in explanation.why_not(x)
        ),
        subject=x,
    )


def _exact(question: Question) -> Explanation:
    assert question.exact is not None
    exact = explain_exactly(question.exact)
    neighbours = tuple(
        Neighbour(change, c.as_requested, c.seconds, float(c.prediction.memory_bytes), not c.reason, c.reason)
        for change, c in exact.neighbours
    )
    return Explanation(with_expense(question), (), (), (), None, (), "", neighbours)
