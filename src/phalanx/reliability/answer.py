"""How much of a training's time is work, and what that makes of days, money, energy and carbon: the question of
`simulate goodput`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Unpack

import numpy as np

from phalanx.answers.answer import Answer
from phalanx.answers.question.query import QueryFields, Source, query_of
from phalanx.answers.question.question import Premises
from phalanx.planning.budget import short_number
from phalanx.planning.expense.expense import Expense, expense_of
from phalanx.planning.expense.rates import ExpenseRates, Taken
from phalanx.reliability import closed_form
from phalanx.reliability.closed_form import Floats
from phalanx.reliability.conditions import (
    MOST_SPARES,
    Conditions,
    Premise,
    job_of_query,
    premise_of,
    require_progress,
)
from phalanx.reliability.monte_carlo import Trials, simulate
from phalanx.spec.errors import InputError
from phalanx.spec.ranges import require_seed

_DAY = 86_400.0
_IDLE = ("detection", "restart", "waiting", "planned")
"""Parts of the time in which nodes draw what idle ones draw; so do spares."""
_QUANTILES = (10, 90)
"""Percentiles of the trials between which four of five lie."""
_MOST_TRIALS = 20_000


@dataclass(frozen=True)
class IntervalLoss:
    """What saving at another interval costs."""

    interval_s: float
    effective_share: float
    loss: float
    """Share of the effective time lost against the best interval."""


@dataclass(frozen=True)
class SpareLoss:
    """The effective share and the cost with a number of spare nodes, by the closed form."""

    spares: int
    effective_share: float
    gpu_hours_per_useful: float
    """GPU-hours paid, spares included, per GPU-hour of work."""


@dataclass(frozen=True)
class Help:
    """What one change gains, by the closed form."""

    change: str
    effective_share: float
    gain: float
    """Share by which the training becomes faster."""


@dataclass(frozen=True)
class Goodput(Answer):
    """A training with its failures."""

    question: Premises
    failures: str
    restart: str
    storage: str
    effective_share: float
    """Time in which the training advances over all its time, both means of the trials."""
    effective_low_share: float
    """A tenth of the trials is below it, and so may be the mean if a few trials have long waits."""
    effective_high_share: float
    effective_closed_form_share: float
    days: float
    days_low: float
    days_high: float
    tokens: float
    tokens_low: float
    tokens_high: float
    tokens_per_day: float
    step_time_s: float
    """Of an undisturbed step."""
    gpu_hours: float
    """Spare nodes included."""
    expense: Expense
    rates: ExpenseRates
    """Of its money, energy and carbon."""
    mttf_s: float
    """Mean time between unexpected failures of the job."""
    interruptions: float
    """Unexpected, in the whole training."""
    interruptions_low: float
    interruptions_high: float
    shares: Mapping[str, float]
    """Where the time goes: useful, saving, lost, detection, restart, waiting, planned."""
    checkpoint_bytes: float
    save_s: float
    """Until it is durable."""
    stall_s: float
    """For how long a save stops the training."""
    load_s: float
    interval_s: float
    """Work between saves."""
    best_interval_s: float
    young_interval_s: float
    daly_interval_s: float
    recovery_interval_s: float
    """The period of arXiv 2410.18124, less the save."""
    interval_loss: float
    """Share of the effective time lost against the best interval."""
    spares: int
    intervals: tuple[IntervalLoss, ...]
    spare_losses: tuple[SpareLoss, ...]
    helps: tuple[Help, ...]
    """What would help most, the most first."""
    taken: tuple[Taken, ...]
    """What was not given, with its source."""
    trials: int


def goodput(
    source: Source = None,
    *,
    days: float | None = None,
    tokens: float | None = None,
    given: Conditions | None = None,
    trials: int = 200,
    seed: int = 0,
    **fields: Unpack[QueryFields],
) -> Goodput:
    """Predict the time, money and energy of a training with failures, over `days` or until `tokens` are trained.

        phalanx.goodput("plan.json", tokens=15e12, given=Conditions(restart="manual"))

    `source`: a plan.json, a run's folder, another framework's configuration, or a Query. Raises InputError."""
    if (days is None) == (tokens is None):
        raise InputError("days", days, "one of days and tokens says how long the training is", "give one of them")
    for name, value, most in (("days", days, 36_500), ("tokens", tokens, 1e18), ("trials", trials, _MOST_TRIALS)):
        if value is not None and not 0 < value <= most:
            raise InputError(name, value, f"must be positive and at most {most:g}")
    require_seed(seed)
    given = given or Conditions()
    trained, question = job_of_query(query_of(source, fields), given.checkpoint_bytes)
    return goodput_of(premise_of(trained, given), question.premises, days, tokens, trials, seed)


def trials_of(p: Premise, days: float | None, tokens: float | None, trials: int, seed: int) -> Trials:
    """Simulate a training without its stops for maintenance. Raises InputError if it hardly advances."""
    work = None if tokens is None else tokens / p.trained.tokens_per_step * p.trained.step_s
    wall = None if days is None else days * _DAY / (1 + p.planned)
    share = float(p.shares().useful)
    span = (wall or 0.0) if work is None else work / max(share, 1e-9)
    require_progress(p, share, p.per_s * span)
    return simulate(
        p.causes,
        p.saving,
        p.interval_s,
        work_s=work,
        wall_s=wall,
        spares=p.spares,
        repair_s=p.given.repair_s,
        share_kept=p.share_kept,
        trials=trials,
        seed=seed,
    )


def goodput_of(
    p: Premise, about: Premises, days: float | None, tokens: float | None, trials: int, seed: int
) -> Goodput:
    """Answer for a resolved training. Raises InputError."""
    t = p.trained
    drawn = trials_of(p, days, tokens, trials, seed)
    wall = drawn.wall_s * (1 + p.planned)
    share, per_work = drawn.useful_s / wall, t.tokens_per_step / t.step_s
    low, high = _ends(share)
    days_low, days_high = _ends(wall / _DAY)
    tokens_low, tokens_high = _ends(drawn.useful_s * per_work)
    failures_low, failures_high = _ends(drawn.failures)
    shares = p.shares()
    best = p.shares(p.best_interval_s)
    total = wall.sum()
    mean = float(drawn.useful_s.sum() / total)
    hours = float(wall.mean()) / 3600
    paid = t.gpus + p.spares * t.gpus / t.nodes
    gpu_hours = hours * paid
    mttf = 1 / p.per_s if p.per_s else float("inf")
    recovery = sum(c.per_s * (c.detect_s + c.restart_s) for c in p.causes) * mttf if p.per_s else 0.0
    stall = max(p.saving.stall_s, 1e-9)
    spent = {
        "useful": mean,
        **{
            f.name.removesuffix("_s"): float(getattr(drawn, f.name).sum() / total)
            for f in fields(Trials)
            if f.name in ("saving_s", "lost_s", "detection_s", "restart_s", "waiting_s")
        },
        "planned": 1 - 1 / (1 + p.planned),
    }
    idle = gpu_hours - hours * t.gpus * (1 - sum(spent[name] for name in _IDLE))
    tokens_trained = float(drawn.useful_s.mean()) * per_work
    phases = {"training": gpu_hours - idle, "idle": idle}
    return Goodput(
        question=about,
        failures=p.counts.name,
        restart=p.kind.name,
        storage=p.storage.name,
        effective_share=mean,
        effective_low_share=low,
        effective_high_share=high,
        effective_closed_form_share=float(shares.useful),
        days=float(wall.mean()) / _DAY,
        days_low=days_low,
        days_high=days_high,
        tokens=tokens_trained,
        tokens_low=tokens_low,
        tokens_high=tokens_high,
        tokens_per_day=mean * per_work * _DAY,
        step_time_s=t.step_s,
        gpu_hours=gpu_hours,
        expense=expense_of(f"{short_number(tokens_trained)} tokens", gpu_hours, p.rates, phases, t.nodes > 1),
        rates=p.rates,
        mttf_s=mttf,
        interruptions=float(drawn.failures.mean()),
        interruptions_low=failures_low,
        interruptions_high=failures_high,
        shares=spent,
        checkpoint_bytes=t.checkpoint_bytes,
        save_s=p.save_s,
        stall_s=p.saving.stall_s,
        load_s=p.load_s,
        interval_s=p.interval_s,
        best_interval_s=p.best_interval_s,
        young_interval_s=closed_form.young(stall, mttf),
        daly_interval_s=closed_form.daly(stall, mttf),
        recovery_interval_s=closed_form.interval_with_recovery(stall, mttf, recovery) - stall,
        interval_loss=1 - float(shares.useful / best.useful),
        spares=p.spares,
        intervals=tuple(_intervals(p)),
        spare_losses=tuple(_spares(p)),
        helps=tuple(sorted(_helps(p), key=lambda h: -h.gain)),
        taken=p.taken,
        trials=trials,
    )


def _ends(trials: Floats) -> tuple[float, float]:
    """Return the ends of the interval that holds four of five trials."""
    low, high = np.percentile(trials, _QUANTILES)
    return float(low), float(high)


def _effective(p: Premise, **changes: Any) -> float:
    """Return the effective share by the closed form with conditions changed, at its best interval unless one is
    given."""
    return float(premise_of(p.trained, replace(p.given, **changes)).shares().useful)


def _intervals(p: Premise) -> Iterator[IntervalLoss]:
    """Yield the cost of intervals around the best one; nothing if the job never fails."""
    if not np.isfinite(p.best_interval_s):
        return
    best = float(p.shares(p.best_interval_s).useful)
    least = max(p.trained.step_s, p.save_s)  # the next save waits for the last one
    for tau in sorted({max(times * p.best_interval_s, least) for times in (0.25, 0.5, 1, 2, 4, 8)}):
        at = float(p.shares(tau).useful)
        yield IntervalLoss(tau, at, 1 - at / best)


def _spares(p: Premise) -> Iterator[SpareLoss]:
    """Yield what fewer and more spare nodes give."""
    more = {min(n, MOST_SPARES) for n in (2 * p.spares, p.spares + 1)}
    for spares in sorted({0, p.spares // 4, p.spares // 2, p.spares, *more}):
        at = _effective(p, spares=spares, interval_s=p.interval_s if np.isfinite(p.interval_s) else None)
        yield SpareLoss(spares, at, (1 + spares / p.trained.nodes) / at)


def _helps(p: Premise) -> Iterator[Help]:
    """Yield the changes that would help, each made alone."""
    given, now = p.given, float(p.shares().useful)
    storage = {f"{w}_bytes_per_s": 2 * getattr(p.storage, w)(p.trained.nodes) for w in ("write", "read")}
    changes: dict[str, dict[str, Any]] = {
        "save at the best interval": {"interval_s": None},
        "half as many failures": {"mttf_s": 2 / p.per_s if p.per_s else None},
        "storage of twice the bandwidth": storage,
        "saves that do not stop the training": {"synchronous": False, "stall_s": None},
        "checkpoints also in the memory of two nodes": {"checkpoint": "replicated"},
        "silent corruption found in half the time": {"silent_s": given.silent_s / 2},
        "a spare always at hand": {"spares": MOST_SPARES},
    }
    for name in ("job", "in-job", "in-process"):
        changes[f"restart {name}"] = {"restart": name, "detect_s": None, "restart_s": None}
    for name, change in changes.items():
        if name.startswith("half") and not p.per_s:
            continue
        interval = change.get("interval_s", given.interval_s)
        try:
            at = _effective(p, **{**change, "interval_s": interval})
        except InputError:
            continue
        if (gain := at / now - 1) > 1e-4:
            yield Help(name, at, gain)
