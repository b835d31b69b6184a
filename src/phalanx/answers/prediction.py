"""A strategy's step time and memory, and what they consist of: what `phalanx predict` answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Unpack

from phalanx.answers.answer import DRAWN, Answer
from phalanx.answers.expenses import expense, rates_of, training_of
from phalanx.answers.question.query import QueryFields, Source, query_of
from phalanx.answers.question.question import Premises, Question
from phalanx.answers.question.resolution import read
from phalanx.cost.analytic.compression import Payment
from phalanx.cost.analytic.estimate import Estimate, compression_payment
from phalanx.cost.analytic.state_parts import StatePerParameter
from phalanx.planning.expense.expense import Expense, with_interval
from phalanx.planning.expense.rates import ExpenseRates
from phalanx.planning.explain.analytic import state_in
from phalanx.planning.explain.exact import ExactExplanation
from phalanx.planning.lengths.distribution import parse_lengths
from phalanx.planning.lengths.steps import UnevenStep, UnevenSteps
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.refine import PIPELINED
from phalanx.planning.training_cost import TrainingCost
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy
from phalanx.validate.intervals import Interval, interval_of

ESTIMATED = "estimated: formulas with constants fitted on published runs"
EXACT = "exact: our own runtime's step, priced on the cluster's measured or published rates"


@dataclass(frozen=True)
class UnevenLengths:
    """A step whose documents have unequal lengths."""

    line: str
    asked: UnevenStep
    ways: tuple[UnevenStep, ...]
    """The same documents batched in every way, `asked` among them."""
    cut_share: float
    """Share of the tokens that lie beyond the length of a sequence, and are not trained."""


@dataclass(frozen=True, kw_only=True)
class Prediction(Answer):
    """A strategy's step time and memory."""

    question: Premises
    strategy: Strategy
    """With `layers` listing the blocks of each chunk where these are not equal."""
    step_time_s: float
    """The sum of `terms_s`."""
    step_time_low_s: float | None = None
    """Between these two a measured step of this kind lies at 80 %, as far as published runs tell; None where our
    own runtime is priced exactly."""
    step_time_high_s: float | None = None
    interval: str = ""
    """The published runs that the interval is taken from."""
    tokens_per_s: float
    """Of all GPUs together."""
    tokens_per_s_per_gpu: float
    memory_bytes: float
    """Reserved on the fullest rank."""
    usable_bytes: float
    """Memory of a device that a step can use."""
    fits: bool
    terms_s: Mapping[str, float]
    memory_terms: Mapping[str, float]
    """Bytes by what occupies them."""
    state: StatePerParameter
    """Bytes of a parameter's weights, gradient and optimizer state."""
    mfu: float | None = None
    """Model FLOP/s as a share of the bf16 peak. None, like the FLOPs and bytes below, where our own runtime is priced
    exactly: there `memory_bytes` is the peak."""
    hfu: float | None = None
    """MFU with recomputed FLOPs counted too."""
    model_flops: float | None = None
    """FLOPs of a step that the model needs, over all ranks."""
    six_n_flops: float | None = None
    """6 FLOPs per active parameter and token, for comparison."""
    memory_steady_bytes: float | None = None
    """Allocated between two passes."""
    memory_peak_bytes: float | None = None
    """Allocated at the fullest instant; `memory_bytes` is what the allocator holds for it."""
    memory_reported_bytes: float | None = None
    """The figure that the stack's own log reports."""
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The numbers that went into each term's formula."""
    compression: Payment | None = None
    """Cost and savings of compressed gradients."""
    bytes_per_axis: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a rank of our own runtime hands to the transport, by mesh axis; {} where formulas price it."""
    lengths: UnevenLengths | None = None
    """The step with documents of unequal lengths; `step_time_s` and the tokens per second are of it."""
    origin: str
    training: TrainingCost | None = None
    """The whole training at the speed of this step: of the tokens that were asked for, else of the file's or plan's
    number of steps; None where neither is given."""
    training_from: str = ""
    """The option or key that gives its length."""
    expense: Expense | None = None
    """For the whole training, or for a million tokens."""
    rates: ExpenseRates | None = None
    """Prices of a GPU-hour, of energy and of carbon, with their sources."""
    estimate: Estimate | None = field(default=None, repr=False, compare=False, metadata=DRAWN)

    @property
    def engine(self) -> Literal["formulas", "exact"]:
        """The engine that priced it."""
        return self.question.engine


def predict(
    source: Source = None,
    *,
    lengths: str | None = None,
    tokens: str | None = None,
    rates: str | None = None,
    **fields: Unpack[QueryFields],
) -> Prediction:
    """Predict a strategy's step time and memory, without running anything.

        phalanx.predict(model="llama3-8b", cluster="dgx-h100", gpus=16, batch=64, seq=8192, strategy="tp=8,zero=1")
        phalanx.predict("plan.json")

    `source`: a plan.json, a run's folder, another framework's configuration, or a Query; `lengths`: a distribution of
    documents' lengths, such as lognormal:1200,1.1+packed (planning/lengths); `tokens`: number for the whole training,
    such as 300B; `rates`: your prices, such as price=2.5,grid=SWE (planning/expense). Raises InputError."""
    return with_expense(read(query_of(source, fields)), lengths, tokens, rates)


def with_expense(
    q: Question, lengths: str | None = None, tokens: str | None = None, line: str | None = None
) -> Prediction:
    """Return the prediction with the length and expense of a whole training. Raises InputError."""
    rates = rates_of(q, line)
    p = prediction_of(q, lengths)
    job = (q.exact or q.pricing).job
    step_tokens = job.global_batch * job.seq if lengths is None else p.tokens_per_s * p.step_time_s
    training = training_of(q, step_tokens, p.step_time_s, tokens)
    cost = expense(q, p.tokens_per_s, rates, training)
    if p.step_time_low_s is not None and p.step_time_high_s is not None:
        cost = with_interval(cost, p.step_time_low_s / p.step_time_s, p.step_time_high_s / p.step_time_s)
    said_by = "tokens" if tokens is not None else q.training.counted_by if training and q.training else ""
    return replace(p, training=training, training_from=said_by, expense=cost, rates=rates)


def prediction_of(question: Question, lengths: str | None = None) -> Prediction:
    """Price the strategy of a question. Raises InputError for what the stack's formulas do not model."""
    if lengths is not None:
        return _uneven(question, uneven_steps(question, lengths))
    return _exact(question) if question.exact is not None else _estimate(question)


def uneven_steps(q: Question, line: str, seed: int = 0) -> UnevenSteps:
    """Price a question's strategy under a distribution of lengths. Raises InputError."""
    lengths = parse_lengths(line)
    if q.exact is not None:
        reason = "is about a stack's formulas, and this price is exact"
        raise InputError("lengths", line, reason, "name --model, --cluster, --gpus, --batch, --seq and --strategy")
    if q.pricing.extra.document:
        raise InputError("options.document", q.pricing.extra.document, "is what lengths say", "leave one of them out")
    return UnevenSteps(q.pricing, q.subject.strategy, lengths, seed)


def _uneven(q: Question, steps: UnevenSteps) -> Prediction:
    """Return the prediction with unequal lengths: the terms of the even step, scaled, and the rest as `lengths`."""
    lengths, full = steps.lengths, _estimate(q)
    ways = {(way, by_cost): steps.step(way, by_cost) for way, by_cost in steps.ways}
    requested = ways[lengths.way, lengths.balanced]
    scale = (requested.even_s - requested.other_s) / (steps.priced.seconds - steps.other_s)
    other = requested.other_s / steps.other_s if steps.other_s else 1.0
    terms = {name: value * (scale if name in PIPELINED else other) for name, value in steps.priced.terms.items()}
    times = requested.step_s / full.step_time_s
    return replace(
        full,
        step_time_s=requested.step_s,
        step_time_low_s=full.step_time_low_s and full.step_time_low_s * times,
        step_time_high_s=full.step_time_high_s and full.step_time_high_s * times,
        tokens_per_s=requested.tokens_per_s,
        tokens_per_s_per_gpu=requested.tokens_per_s / steps.strategy.world,
        terms_s={**terms, "lengths": requested.step_s - sum(terms.values())},
        mfu=None,
        hfu=None,
        model_flops=None,
        six_n_flops=None,
        factors={},
        lengths=UnevenLengths(lengths.line, requested, tuple(ways.values()), steps.cut_share),
    )


def _estimate(q: Question) -> Prediction:
    e, memory, premises = q.estimate, q.estimate.memory, q.premises
    host = premises.host_memory_bytes
    tokens, seconds = e.layout.step_tokens, float(e.seconds)
    sure = interval_in(q.pricing, {name: float(value) for name, value in e.step.terms.items()}, q.stack)
    return Prediction(
        question=premises,
        strategy=q.shown,
        step_time_s=seconds,
        step_time_low_s=seconds * sure.low,
        step_time_high_s=seconds * sure.high,
        interval=str(sure),
        tokens_per_s=float(tokens / e.seconds),
        tokens_per_s_per_gpu=float(tokens / e.seconds / e.layout.world),
        memory_bytes=float(memory.reserved),
        usable_bytes=float(e.allocatable_bytes),
        fits=bool(e.fits) and (host is None or premises.host_bytes <= host),
        terms_s={name: float(value) for name, value in e.step.terms.items()},
        memory_terms={name: float(value) for name, value in memory.terms.items()},
        state=state_in(q.pricing, q.shown),
        mfu=float(e.mfu),
        hfu=float(e.hfu),
        model_flops=float(e.model_flops),
        six_n_flops=float(6 * e.active_params * tokens),
        memory_steady_bytes=float(memory.steady),
        memory_peak_bytes=float(memory.peak),
        memory_reported_bytes=float(memory.shown),
        factors={name: {k: float(v) for k, v in of.items()} for name, of in e.step.of.items()},
        compression=compression_payment(e),
        origin=ESTIMATED,
        estimate=e,
    )


def interval_in(p: Pricing, terms_s: Mapping[str, float], stack: str) -> Interval:
    """Return the interval of a step that was priced by formulas."""
    products = p.extra.products if p.extra.products != "auto" else p.number_format
    return interval_of(p.model, terms_s, bool(p.extra.lora), products, stack, p.cluster.device.name)


def _exact(q: Question) -> Prediction:
    assert q.exact is not None
    exact = ExactExplanation(q.exact.chosen, (), q.exact.cluster.device.usable_bytes)
    candidate, job = exact.chosen, q.exact.job
    rate = job.global_batch * job.seq / candidate.seconds
    return Prediction(
        question=q.premises,
        strategy=candidate.as_requested,
        step_time_s=candidate.seconds,
        tokens_per_s=rate,
        tokens_per_s_per_gpu=rate / q.exact.strategy.world,
        memory_bytes=float(candidate.prediction.memory_bytes),
        usable_bytes=float(exact.usable),
        fits=not candidate.reason,
        terms_s=exact.terms,
        memory_terms=exact.memory_terms,
        state=state_in(q.pricing, q.exact.strategy),
        bytes_per_axis={axis: int(n) for axis, n in candidate.prediction.bytes_per_axis.items()},
        origin=EXACT,
    )
