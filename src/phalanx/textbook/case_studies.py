"""Case studies: published trainings, the strategy that each used, and the one that a search chooses instead.

Also rules of thumb (fifteen leaves of the usual decision trees, on the GPUs that each names), compared with a search;
and numeric criteria for when an axis of parallelism pays, which rules of thumb leave out.

T is the number of tokens of a rank and micro-batch, h the model's width, s the sequence, M the number of
micro-batches, P the ranks of the axis. A ridge is a chip's FLOP/s over the bytes/s of its memory, or of the link in
one direction (`phalanx tables roofline`):

    tp    (T, h) by (h, h/tp) in 2 bytes: 2 T h h/tp FLOP over 2 (T h + h h/tp + T h/tp) bytes, h/(tp+1) for large T
    pp    (P-1)/(M+P-1) <= 1/5 if M >= 4 (P-1)
    cp    a ring's step: 4 (s/cp)² h FLOP of attention over 4 (s/cp) h_kv bytes of keys and values
    dp    6 N T FLOP over 4 N bytes of an all-reduce; ZeRO-3: over 6 N, all-gathered twice and reduce-scattered
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.cost.analytic.step import TERM_NAMES
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search import priced, refine
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.planner import best_on
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.tables.table import Sheet, columns
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.rows import Rows, record
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class CaseStudy:
    """A published training."""

    name: str
    model: str
    cluster: str
    gpus: int
    batch: int
    seq: int
    used: str
    """The strategy that was used; "" if its layout is not published."""
    stack: str
    """The software stack that prices it."""
    measured_s: float | None
    """Published step time, seconds; None if there is none for this hardware and number format."""
    source: str
    note: str = ""
    """Details that are not published, or differ here."""
    gpu_hours: float | None = None
    """Published GPU-hours of all `tokens`."""
    tokens: float | None = None


CASES = tuple(Rows(Path(__file__).with_suffix(".toml"), record(CaseStudy, "name")).values())


@dataclass(frozen=True)
class CaseResult:
    """The strategy that was used and the one that a search chooses, priced, with the seconds of a step.

    In these seconds the pipeline is timed action by action. `used` is None if the strategy is not published, `chosen`
    if nothing fits; `why`: words for what the choice saves, or why there is none."""

    case: CaseStudy
    used: PricedStrategy | None
    used_s: float | None
    chosen: PricedStrategy | None
    chosen_s: float | None
    why: str


def study(case: CaseStudy) -> CaseResult:
    """Price the strategy that was used, and search for a better one.

    Raises InputError if the strategy that was used is not legal."""
    pricing = question(case)
    used, seconds = None, None
    if case.used:
        s = strategy(case)
        check(s, pricing.model, pricing.job, case.gpus)
        ((used, _),) = refine.refine(pricing, [s])
        seconds = used.seconds
    best = best_on(pricing, case.gpus)
    if best is None:
        return CaseResult(case, used, seconds, None, None, "nothing fits here")
    why = _savings(used, best.priced, pricing) if used else case.note
    return CaseResult(case, used, seconds, best.priced, best.seconds, why)


def question(case: CaseStudy) -> Pricing:
    """Return the model, cluster and job of a case, to be priced under its stack."""
    model, _ = model_named(case.model)
    if case.seq > model.max_seq:  # the training extended the model's context
        model = replace(model, max_seq=case.seq)
    return pricing_by_gpus(model, cluster_named(case.cluster), case.batch, case.seq, case.stack)(case.gpus)


def strategy(case: CaseStudy) -> Strategy:
    """Parse the strategy that a case used."""
    parsed = make_strategy(case.used)
    assert parsed is not None
    return parsed


def _savings(used: PricedStrategy, chosen: PricedStrategy, pricing: Pricing) -> str:
    """Name the terms on which the chosen strategy saves most."""
    if not used.fits:
        return f"as used it {priced.why_not(used, None, pricing)}"
    saved = {name: used.terms[name] - chosen.terms.get(name, 0.0) for name in used.terms}
    most = sorted(saved, key=lambda name: -saved[name])[:2]
    return ", ".join(
        f"{TERM_NAMES[name]} {saved[name] / used.seconds:.0%} less"
        for name in most
        if saved[name] > 0.005 * used.seconds
    )


def sheet(studied: Sequence[CaseResult] | None = None) -> Sheet:
    """Tabulate `studied`, by default all cases."""
    results: Iterable[CaseResult] = map(study, CASES) if studied is None else studied
    rows = []
    for x in results:
        c = x.case
        chosen = (str(x.chosen.strategy) if x.chosen else "none", x.chosen_s, x.why)
        used = (c.used or "not published", c.measured_s, x.used_s)
        rows.append((f"{c.name}, {c.gpus:,} x {c.cluster}", *used, *chosen))
    return Sheet(
        "published trainings: what was used, and what a search chooses",
        columns("training | used | measured [s] | predicted [s] | chosen | chosen, predicted [s] | because"),
        rows,
        "; ".join(f"{c.name}: {c.source}" + (f" ({c.note})" if c.note else "") for c in CASES),
    )


_PRICE = 2.0
"""Dollars a GPU-hour, as in DeepSeek-AI 2024b."""


def fact_sheet() -> Sheet:
    """Tabulate the published facts of all cases: the layout, and the GPU-hours in days and dollars."""
    rows = []
    for c in CASES:
        hours = c.gpu_hours
        days = (None, None) if hours is None else (hours / 1000 / 24, hours / c.gpus / 24)
        cost = None if hours is None else round(hours * _PRICE / 1e6, 2)
        rows.append((c.name, c.used or "not published", hours, *days, cost, c.note))
    return Sheet(
        "what was published of trainings",
        columns(
            "training | layout | GPU-hours [count] | days on 1,000 GPUs [count] | days on its GPUs [count]",
            f"M$ at ${_PRICE:g} an hour [count]",
            "what is not published, or differs",
        ),
        rows,
        "; ".join(f"{c.name}: {c.gpus:,} GPUs, {c.source}" for c in CASES if c.gpu_hours),
        charted=False,
    )


def _rule(name: str, row: Mapping[str, Any]) -> CaseStudy:
    """Return a rule as a case that no source has measured, priced under Megatron-Core."""
    return record(CaseStudy, "name")(name, {**row, "stack": "megatron-core", "measured_s": False, "source": "taught"})


RULES = tuple(Rows(Path(__file__).with_name("rules.toml"), _rule).values())


def rule_sheet(rules: Iterable[CaseStudy] = RULES) -> Sheet:
    """Tabulate rules: the cost of following each, and the strategy that a search chooses instead."""
    return Sheet(
        "taught rules: what following them costs",
        columns("rule | on | as the rule has it | step [s] | chosen | chosen step [s] | costs [share] | because"),
        [_row(study(case)) for case in rules],
        "costs: the rule's step over the chosen one's, less 1; none where the rule's strategy does not fit",
    )


def _row(x: CaseResult) -> tuple[object, ...]:
    c = x.case
    on = f"{c.model}, {c.gpus:,} of {c.cluster}, {c.batch:,} x {c.seq:,}"
    if x.chosen is None or x.chosen_s is None:
        return (c.name, on, c.used, x.used_s, "none", None, None, x.why)
    step = x.used_s if x.used and x.used.fits else None
    costs = step / x.chosen_s - 1 if step else None
    return (c.name, on, c.used, step, str(x.chosen.strategy), x.chosen_s, costs, x.why)


@dataclass(frozen=True)
class Criterion:
    """A criterion for when an axis pays."""

    axis: str
    pays: str
    holds: str
    """The criterion, in numbers."""
    lints: tuple[str, ...]
    """The lints of `phalanx lint` for jobs that do not meet it."""


CRITERIA = tuple(Rows(Path(__file__).with_name("criteria.toml"), record(Criterion, "axis")).values())


def criteria() -> Sheet:
    """Tabulate the criteria."""
    return Sheet(
        "criteria: when an axis pays",
        columns("axis | asked for when | pays if | lint"),
        [(c.axis, c.pays, c.holds, ", ".join(c.lints)) for c in CRITERIA],
        "T: tokens of a rank and micro-batch, h: width; ridges: `phalanx tables roofline`; "
        "lint: what says that it does not",
        charted=False,
    )
