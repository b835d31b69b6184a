"""How far off predictions, choices and the kernel model are from published measurements.

Choices to which predictions lead (validate/choices.py) are compared with published runs:

Sweeps: the strategies of one question in the order predicted and in the order measured. Rank correlation is
Spearman's; regret is the measured time of the strategy predicted to be the fastest, over the shortest measured time,
minus 1. The strategy that a search would choose is the fastest of those predicted to fit, those that ran out of
memory included.

Recipes: the fastest strategy that the search finds for an expert's question, over the expert's own, both priced.
Below 1, the search would have chosen something else; whether that is faster was not measured.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.answers.answer import DRAWN, Answer
from phalanx.cost.analytic.chips import system
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.limits import conditions
from phalanx.planning.search.planner import best_on
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.search.refine import refine
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.spec import ClusterSpec, Tier
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions
from phalanx.validate import prediction_error
from phalanx.validate.choices import (
    PublishedSweep,
    canonical_strategy,
    differences,
    is_timed,
    median_by_strategy,
    memory_option,
    options_of,
    overlaps_experts,
    question_name,
    recipes,
    sweeps,
)
from phalanx.validate.collectives import NEEDED, link_scores, scores_by_chip
from phalanx.validate.from_row import Case, cases
from phalanx.validate.kernels import kernel_scores as score_kernels
from phalanx.validate.prediction_error import PredictionError, compare, kinds_of, predicted_columns, scores
from phalanx.validate.records import COLLECTIVES, RUNS, SMALL_RUNS, Row, load
from phalanx.validate.scores import spearman
from phalanx.validate.stacks import number_format
from phalanx.validate.systems import Benched, description

_OVERLAPPED = "virtual>1, ep>1, recompute not in (full, every*)"
"""Conditions on a strategy whose exchange of tokens overlaps another micro-batch (frameworks/megatron/facts.toml)."""
LINKS = ("cluster", "datasheet")
"""Links as measured along with the runs, or as the hardware's datasheets say."""


@dataclass(frozen=True)
class SweepScore:
    """How well the strategies of one question are ordered."""

    question: str
    family: str
    strategies: int
    """Strategies that ran and were timed."""
    spearman: float | None
    regret: float
    regret_left_out: float | None
    """Regret with constants fitted without the family; None for families to which nothing is fitted."""
    chosen: str
    """The strategy predicted to be the fastest of those that are predicted to fit; empty if none is."""
    chosen_out_of_memory: bool
    refused: int
    """Strategies that ran but are predicted not to fit."""


@dataclass(frozen=True)
class RecipeScore:
    """An expert's strategy, and the one that the search would choose."""

    question: str
    family: str
    stack: str
    moe: bool
    expert: str
    best: str
    """Empty if nothing is predicted to fit."""
    ratio: float | None
    """Predicted seconds of the best strategy over the seconds of the expert's."""
    expert_error: float
    """Predicted over measured seconds of the expert's strategy, minus 1."""
    option: str
    """An option outside the layout by which the expert saves memory; "" if none is known."""
    fits: bool
    """Whether the expert's strategy is predicted to fit, with that option."""
    share_of_memory: float
    """Its predicted memory over the device's usable memory."""
    differs: dict[str, tuple[Any, Any]]
    """Field -> (the best strategy's value, the expert's)."""


def score(rows: Sequence[Row], announce: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Score the choices on published rows, as `phalanx validate choices --json` prints them. `announce` receives
    lines of progress."""
    usable, skipped = cases(list(rows))
    questions = sweeps(usable)
    tuned, others = recipes(usable)
    of_sweeps = {links: [score_sweep(s, links) for s in questions] for links in LINKS}
    of_recipes = []
    reasons = Counter(reason for _, reason in (*others, *skipped))
    for i, c in enumerate(tuned):
        try:
            of_recipes.append(score_recipe(c))
        except InputError as error:  # a layout that no search has, such as one of more chunks than blocks
            reasons[str(error)] += 1
        if (i + 1) % 10 == 0 or i + 1 == len(tuned):
            announce(f"recipes: {i + 1} of {len(tuned)} searched")
    return {
        "sweeps": {
            **_summary_of_sweeps(of_sweeps["cluster"]),
            "links": {links: _summary_of_sweeps(scores) for links, scores in of_sweeps.items()},
            "by_family": {
                family: {
                    links: _summary_of_sweeps([s for s in scores if s.family == family])
                    for links, scores in of_sweeps.items()
                }
                for family in sorted({s.family for s in of_sweeps["cluster"]})
            },
            "each": {links: [asdict(s) for s in scores] for links, scores in of_sweeps.items()},
        },
        "recipes": {
            kind: _summary_of_recipes([r for r in of_recipes if r.moe == (kind == "moe")])
            for kind in ("dense", "moe")
        },
        "left_out": dict(reasons.most_common()),
    }


def score_sweep(sweep: PublishedSweep, links: str) -> SweepScore:
    """Score the order of one question's strategies, with links as measured or of the datasheets."""
    benchmarks = sweep.benchmarks() if links == "cluster" else [Benched()] * len(sweep.runs)
    predicted, (memory, _, room) = predicted_columns(sweep.runs, benchmarks=benchmarks)
    seconds = median_by_strategy(sweep, predicted)
    measured = median_by_strategy(sweep, [c.measured_s or np.nan for c in sweep.runs])
    strategies = list(measured)
    fits = np.asarray(memory.reserved) <= room
    candidates = np.flatnonzero(fits)
    chosen = sweep.runs[int(candidates[np.argmin(predicted[candidates])])] if len(candidates) else None
    kind = kinds_of(sweep.runs[0].row)
    without = next((by for kinds, by in prediction_error.left_out_constants() if kind in kinds), None)
    blind = median_by_strategy(sweep, predicted_columns(sweep.runs, without, benchmarks)[0]) if without else None
    return SweepScore(
        question=sweep.name,
        family=sweep.family,
        strategies=len(strategies),
        spearman=spearman([seconds[s] for s in strategies], [measured[s] for s in strategies]),
        regret=_regret(seconds, measured),
        regret_left_out=_regret(blind, measured) if blind else None,
        chosen=str(chosen.strategy) if chosen else "",
        chosen_out_of_memory=bool(chosen and not chosen.row.completed),
        refused=sum(is_timed(c) and not fit for c, fit in zip(sweep.runs, fits, strict=True)),
    )


def _regret(predicted: dict[Strategy, float], measured: dict[Strategy, float]) -> float:
    return measured[min(measured, key=lambda s: predicted[s])] / min(measured.values()) - 1


def score_recipe(c: Case) -> RecipeScore:
    """Search an expert's question and compare the best strategy with the expert's. Raises InputError for a layout
    that cannot be run."""
    pricing, (theirs, _) = question(c), options_of(c.row, canonical_strategy(c))
    own = price_expert(c, pricing)
    best = best_on(pricing, c.strategy.world)
    return RecipeScore(
        question=question_name(c),
        family=c.row.family,
        stack=c.profile,
        moe=c.row.moe,
        expert=str(theirs),
        best=str(best.strategy) if best else "",
        ratio=best.seconds / own.seconds if best else None,
        expert_error=own.seconds / (c.measured_s or np.nan) - 1,
        option=memory_option(c.row),
        fits=own.fits,
        share_of_memory=own.bytes_ / own.usable,
        differs=differences(best.strategy, theirs) if best else {},
    )


def price_expert(c: Case, pricing: Pricing) -> PricedStrategy:
    """Price the strategy of a recipe on its question. Raises InputError for a layout that cannot be run."""
    theirs, options = options_of(c.row, canonical_strategy(c))
    with_options = replace(pricing, extra=replace(options, overlap_experts=pricing.extra.overlap_experts))
    try:
        return refine(with_options, [theirs])[0][0]
    except InputError:  # a strategy that the search would not name, such as one of unequal chunks
        return refine(with_options, [options_of(c.row, c.strategy)[0]])[0][0]


def question(c: Case) -> Pricing:
    """Return a recipe's question: its model, job and stack, on the same number of the same GPUs."""
    name, node, nic, cloud = description(c.row)
    world = c.strategy.world
    node = min(node, world)
    chip, source = CHIPS[name], "the run's source"
    inside = Tier("nvlink", node, 5e-6, chip.link_bytes_per_s, "published", source)
    between = Tier("network", -(-world // node) * node, 15e-6, nic, "published", source)
    cluster = ClusterSpec(c.row["gpu"], chip.as_device(), node, -(-world // node), (inside, between), ())
    rates = system(name, node, nic, cloud)
    plain = Pricing(c.model, cluster, c.job, c.profile, number_format(c.row), rates, free=True)
    if not overlaps_experts(c.row):
        return plain
    return replace(plain, extra=StackOptions(overlap_experts="on"), wanted=conditions(_OVERLAPPED)[0])


def _summary_of_sweeps(scores: Sequence[SweepScore]) -> dict[str, Any]:
    regrets = [s.regret for s in scores]
    blind = [s.regret_left_out for s in scores if s.regret_left_out is not None]
    return {
        "n": len(scores),
        "spearman_median": _quantile([s.spearman for s in scores if s.spearman is not None], 50),
        "regret_median": _quantile(regrets, 50),
        "regret_p90": _quantile(regrets, 90),
        "regret_p90_left_out": _quantile(blind, 90),
        "chosen_out_of_memory": sum(s.chosen_out_of_memory for s in scores),
        "strategies": sum(s.strategies for s in scores),
        "refused": sum(s.refused for s in scores),
    }


def _summary_of_recipes(scores: Sequence[RecipeScore]) -> dict[str, Any]:
    ratios = [r.ratio for r in scores if r.ratio is not None]
    options = sorted({r.option for r in scores})
    by_option = {option or "none": [r for r in scores if r.option == option] for option in options}
    fields: Counter[str] = Counter()
    for r in scores:
        fields.update(r.differs.keys())
    return {
        "n": len(scores),
        "ratio_p10": _quantile(ratios, 10),
        "ratio_median": _quantile(ratios, 50),
        "ratio_p90": _quantile(ratios, 90),
        "said_to_fit": _share_that_fits(scores),
        "said_to_fit_by_option": {
            option: {"n": len(members), "said_to_fit": _share_that_fits(members)}
            for option, members in by_option.items()
        },
        "fields_that_differ": dict(fields.most_common()),
        "each": [asdict(r) for r in scores],
    }


def _share_that_fits(scores: Sequence[RecipeScore]) -> float | None:
    return sum(r.fits for r in scores) / len(scores) if scores else None


def _quantile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


@dataclass(frozen=True)
class PredictionScores(Answer):
    """Errors of predicted step times and memory."""

    plain_field = "scores"
    scores: dict[str, Any]
    """Errors in percent, by quantity and by source family."""
    runs: PredictionError | None = field(default=None, metadata=DRAWN)
    """The error of every run, where one family was asked for."""


@dataclass(frozen=True)
class ChoiceScores(Answer):
    """How good the choices are that predictions lead to."""

    plain_field = "scores"
    scores: dict[str, Any]
    """Scores of sweeps and of recipes."""
    rows: int = field(default=0, metadata=DRAWN)
    each: bool = field(default=False, metadata=DRAWN)
    """Whether each recipe is shown, since one family was asked for."""


@dataclass(frozen=True)
class KernelScores(Answer):
    """Errors of the kernel model."""

    plain_field = "scores"
    scores: dict[str, Any]
    """Errors in percent, by kind of kernel and by chip; numbers of rows left out, by reason."""


@dataclass(frozen=True)
class CollectiveScores(Answer):
    """Errors of predicted times of single collectives."""

    plain_field = "scores"
    scores: dict[str, Any]
    """Errors in percent, by chip and operation; numbers of rows left out, by reason."""


def prediction_scores(runs: Path | None, family: str | None) -> PredictionScores:
    """Score predictions of published runs, runs of a file, or runs of one source family. Raises InputError."""
    compared = compare(_rows(runs, family))
    summary = scores(compared)
    if runs is None and family is None:
        summary["collectives"] = link_scores(load(COLLECTIVES, NEEDED))
    return PredictionScores(summary, compared if family is not None else None)


def choice_scores(runs: Path | None, family: str | None, announce: Callable[[str], None]) -> ChoiceScores:
    """Score choices among published runs, runs of a file, or runs of one source family. Raises InputError."""
    rows = _rows(runs, family)
    return ChoiceScores(score(rows, announce), len(rows), family is not None)


def kernel_scores(kernels: Path | None) -> KernelScores:
    """Score the kernel model on kernels that were measured alone, or on a file of them. Raises InputError."""
    return KernelScores(score_kernels(kernels))


def collective_scores(collectives: Path | None) -> CollectiveScores:
    """Score predicted times of published collectives, or of a file of them. Raises InputError."""
    return CollectiveScores(scores_by_chip(load(collectives or COLLECTIVES, NEEDED, "collectives")))


def _rows(runs: Path | None, family: str | None) -> list[Row]:
    measured = load(runs) if runs is not None else load(RUNS) + load(SMALL_RUNS)
    if family is None:
        return measured
    chosen = [row for row in measured if row.family == family]
    if not chosen:
        raise InputError("rows", family, "is not a source family", nearest(family, {row.family for row in measured}))
    return chosen
