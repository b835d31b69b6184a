"""Planning questions: the functions behind `plan`, `predict`, `explain`, `compare`, `memory`, `comm`, `roofline` and
`scaling`, read as the command line reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.answers import compare as comparing
from phalanx.answers.question import Asked, Question, fixed, read
from phalanx.api.results import Comparison, Explanation, PlanResult, Prediction, Table, table
from phalanx.planning.explain import explanation
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.search import HEADROOM
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.search.refine import RankedStrategy
from phalanx.report.html.page import Section, page
from phalanx.report.html.plan import memory as memory_section
from phalanx.report.html.plan import waterfall
from phalanx.spec.errors import InputError

_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def plan(
    model: str,
    cluster: str,
    gpus: int,
    batch: int,
    seq: int,
    *,
    strategy: str | None = None,
    where: str | None = None,
    stack: str | None = None,
    precision: str | None = None,
    options: str | None = None,
    headroom: float = HEADROOM,
) -> PlanResult:
    """Find the fastest strategy for a model on a cluster, as `phalanx plan --model` does.

    `strategy`: fields to keep, such as tp=8,pp=*; `where`: conditions, such as "tp<=8, zero=1"; `options`: those of
    the stack, such as first_moment=bfloat16; `headroom`: share of a device's memory that must stay free. Raises
    InputError.
    """
    from dataclasses import replace

    from phalanx.answers.priced_plan import plan_of
    from phalanx.planning.search.planner import answer
    from phalanx.report.html.plan import report

    if not 0 <= headroom < 1:
        raise InputError("headroom", headroom, "is not a share of the memory", "write 0.05 to leave 5 % free")
    limits = ", ".join(filter(None, (fixed(strategy), where))) or None
    asked = read(Asked(None, model, cluster, gpus, batch, seq, None, stack, precision, limits, setting=options), True)
    result = answer(lambda n: replace(asked.pricing_on(n), headroom=headroom), asked.gpus)

    def one(r: RankedStrategy) -> Prediction:
        return _prediction(result.pricing, r.priced, r.mfu, asked.gpus)

    best = result.to_run

    subject = AnalyticSubject(
        lambda n: result.pricing if n == asked.gpus else asked.pricing_on(n),
        result.best.strategy,
        asked.gpus,
        headroom,
        result.prices,
    )
    return PlanResult(
        ranked=tuple(map(one, (best, *result.ranked[1:]))),
        families={r.family: one(r) for r in result.families},
        front=tuple(map(one, result.front)),
        rejected=tuple((str(r.priced.strategy), r.reason) for r in result.rejected),
        evaluated=result.evaluated,
        file=plan_of(result.pricing, best.priced, best.run, best.mfu, cluster, asked.precision),
        _page=lambda: report(result, None, subject),
    )


def predict(
    model: str | None = None,
    cluster: str | None = None,
    gpus: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    strategy: str | None = None,
    *,
    source: str | Path | None = None,
    stack: str | None = None,
    precision: str | None = None,
    options: str | None = None,
) -> Prediction:
    """Predict a strategy's step and memory, as `phalanx predict` does.

    `source`: a plan.json, a run's folder or another framework's configuration, in place of model, cluster, batch and
    seq. Raises InputError."""
    return _predicted(_asked(model, cluster, gpus, batch, seq, strategy, source, stack, precision, options))


def explain(
    model: str | None = None,
    cluster: str | None = None,
    gpus: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    strategy: str | None = None,
    *,
    source: str | Path | None = None,
    stack: str | None = None,
    precision: str | None = None,
    options: str | None = None,
) -> Explanation:
    """Show where a strategy's time and memory go and what each single change would do, as `phalanx explain` does.

    Raises InputError; also for a plan of our own runtime without a `stack`, whose neighbours only the command prices.
    """
    x = _asked(model, cluster, gpus, batch, seq, strategy, source, stack, precision, options)
    if x.exact is not None:
        raise InputError("source", str(source), "is priced exactly", "name a stack, or run phalanx explain")
    neighbours = tuple((what, p.seconds, p.bytes_, reason) for what, p, reason in explanation.why_not(x.subject))
    axes = tuple(
        {
            "axis": a.axis,
            "links": a.tier,
            "sent_bytes": a.sent,
            "flop_per_byte": a.intensity,
            "ridge": a.ridge,
            "regime": a.regime,
            "exposed_s": a.exposed_s,
        }
        for a in explanation.axes(x.subject)
    )
    return Explanation(_predicted(x), neighbours, axes)


def compare(
    *sides: str,
    model: str | None = None,
    cluster: str | None = None,
    gpus: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    stack: str | None = None,
    precision: str | None = None,
    options: str | None = None,
) -> Comparison:
    """Compare two or three plans, configurations or strategies, as `phalanx compare` does. Raises InputError."""
    from phalanx.report.html.comparison import report

    compared = comparing.sides(
        list(sides), Asked(None, model, cluster, gpus, batch, seq, None, stack, precision, setting=options)
    )
    differing = comparing.differing([side.settings for side in compared])
    return Comparison(
        tuple(
            Prediction(
                strategy=str(side.strategy),
                stack=side.stack,
                seconds=side.seconds,
                tokens_per_s=side.tokens / side.seconds,
                gpus=side.gpus,
                mfu=None,
                memory_bytes=side.bytes_,
                usable_bytes=side.usable,
                terms_s=side.terms,
                memory_terms=side.memory_terms,
                _page=lambda side=side: _page(str(side.strategy), side.terms, side.memory_terms, side.usable),  # type: ignore[misc]
            )
            for side in compared
        ),
        tuple((name, tuple(values)) for name, values in differing),
        lambda: report(compared, differing),
    )


def memory(params: str | float, bytes_per_parameter: int = 16, card_gb: float = 80.0) -> tuple[Table, ...]:
    """Tabulate the state of so many parameters (7e9, "7B") by level of ZeRO, the bytes of a parameter by kind, and
    what ZeRO saves, as `phalanx memory --params` does. Raises InputError."""
    from phalanx.planning.tables import textbook

    count = textbook.counted(str(params))
    sheets = (
        textbook.state(count, _RANKS, bytes_per_parameter, card_gb * 1e9),
        textbook.kinds(count, bytes_per_parameter),
        textbook.savings(_RANKS, bytes_per_parameter),
    )
    return tuple(map(table, sheets))


def traffic(
    model: str,
    cluster: str,
    gpus: int,
    batch: int,
    seq: int,
    strategy: str,
    stack: str | None = None,
    precision: str | None = None,
    options: str | None = None,
) -> Table:
    """Tabulate what each axis of a strategy sends, as `phalanx comm` does. Raises InputError."""
    from phalanx.planning.tables.communication import sheet

    return table(sheet(_asked(model, cluster, gpus, batch, seq, strategy, None, stack, precision, options).subject))


def roofline(
    model: str,
    cluster: str,
    gpus: int,
    batch: int,
    seq: int,
    strategy: str,
    stack: str | None = None,
    precision: str | None = None,
    options: str | None = None,
) -> tuple[Table, ...]:
    """Tabulate the operators of a block on the compute roofline, in training and in decoding (`phalanx roofline`).

    Raises InputError."""
    from phalanx.planning.tables.roofline import rooflines

    x = _asked(model, cluster, gpus, batch, seq, strategy, None, stack, precision, options)
    assert x.strategy is not None
    return tuple(map(table, rooflines(x.pricing, x.strategy)))


def scaling(
    model: str, cluster: str, gpus: Sequence[int], batch: int, seq: int, stack: str = "megatron-core"
) -> tuple[Table, Table]:
    """Tabulate strong and weak scaling over numbers of GPUs, as `phalanx scaling` does. Raises InputError."""
    from phalanx.planning.question import cluster_named, model_named, pricing_by_gpus
    from phalanx.planning.tables.scaling import by_gpus

    asked = pricing_by_gpus(model_named(model)[0], cluster_named(cluster), batch, seq, stack, HEADROOM)
    strong, weak = (table(by_gpus(asked, sorted(gpus), weak)) for weak in (False, True))
    return strong, weak


def _asked(
    model: str | None,
    cluster: str | None,
    gpus: int | None,
    batch: int | None,
    seq: int | None,
    strategy: str | None,
    source: str | Path | None,
    stack: str | None,
    precision: str | None,
    options: str | None,
) -> Question:
    path = None if source is None else Path(source)
    return read(Asked(path, model, cluster, gpus, batch, seq, strategy, stack, precision, setting=options))


def _predicted(x: Question) -> Prediction:
    if x.exact is not None:
        from phalanx.planning.explain.exact import ExactExplanation

        usable = x.exact.cluster.device.usable_bytes
        e = ExactExplanation(x.exact.chosen, (), usable)
        job, priced = x.exact.job, x.exact.chosen
        return Prediction(
            strategy=str(x.strategy),
            stack=x.stack,
            seconds=priced.seconds,
            tokens_per_s=job.global_batch * job.seq / priced.seconds,
            gpus=x.gpus,
            mfu=None,
            memory_bytes=float(priced.prediction.memory_bytes),
            usable_bytes=float(usable),
            terms_s=e.terms,
            memory_terms=e.memory_terms,
            _page=lambda: _page(str(x.strategy), e.terms, e.memory_terms, usable),
        )
    return _prediction(x.pricing, x.subject.priced, float(x.estimate.mfu), x.gpus)


def _prediction(pricing: Pricing, priced: PricedStrategy, mfu: float, gpus: int) -> Prediction:
    """Return a strategy that the formulas of a stack priced."""
    job, changed = pricing.job, pricing.extra.changed()
    return Prediction(
        strategy=str(priced.strategy),
        stack=pricing.stack,
        seconds=priced.seconds,
        tokens_per_s=job.global_batch * job.seq / priced.seconds,
        gpus=gpus,
        mfu=mfu,
        memory_bytes=priced.bytes_,
        usable_bytes=float(pricing.allocatable),
        terms_s=priced.terms,
        memory_terms=priced.memory_terms,
        options=str(pricing.extra) if changed else "",
        _page=lambda: _page(str(priced.strategy), priced.terms, priced.memory_terms, pricing.allocatable),
    )


def _page(title: str, terms: dict[str, float], memory_terms: dict[str, float], usable: float) -> str:
    from phalanx.planning.search.why_not import TERM_NAMES

    sections: list[Section] = [
        waterfall("Time of a step", dict(terms), TERM_NAMES),
        memory_section(
            "Memory by part", {title: dict(memory_terms)}, ("usable", float(usable)), "of the fullest rank"
        ),
    ]
    return page(title, "prediction", sections, {"terms_s": dict(terms)})
