"""What an observed program costs on a cluster, what is wrong with it, and where it differs from a plan.

An observed.json (`phalanx observe --out`) stands in place of a plan: `predict`, `explain`, `comm`, `lint`, `compare`
and `plan --from` take it, with nothing else than a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from phalanx.answers.answer import Answer
from phalanx.answers.encode import plain
from phalanx.answers.model_plan import ModelPlan, Wishes, model_plan
from phalanx.answers.query import Query
from phalanx.planning.explain import observed, observed_lint
from phalanx.planning.explain.observed import ObservedFlow
from phalanx.planning.explain.observed_lint import ProgramFinding
from phalanx.planning.lookup import cluster_on
from phalanx.schedule.observation import Observation
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans


@dataclass(frozen=True)
class ObservedStep:
    """A step of an observed rank, priced: products and attention alone, so at least."""

    rank: int
    flops: int
    compute_s: float
    communication_s: float
    """Of all collectives, one after the other."""
    all_hidden_s: float
    """The longer of the two."""
    none_hidden_s: float
    """Their sum."""
    peak_bytes: int
    usable_bytes: float
    fits: bool
    collectives: tuple[ObservedFlow, ...]


@dataclass(frozen=True)
class ObservedPrice(Answer):
    """What a step of an observed program costs."""

    program: str
    cluster: str
    world: int
    ranks: tuple[ObservedStep, ...]

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each observed rank."""
        return [{**plain(r), "collectives": len(r.collectives)} for r in self.ranks]


@dataclass(frozen=True)
class ObservedFindings(Answer):
    """What is wrong with an observed program."""

    program: str
    findings: tuple[ProgramFinding, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanDifference:
    """One kind of event, or one quantity, of a rank in the plan and in the program: how many, and bytes or FLOPs."""

    rank: int
    what: str
    plan_count: int
    program_count: int
    plan_total: int
    program_total: int
    differs: bool


@dataclass(frozen=True)
class PlanDifferences(Answer):
    """Where an observed program's step differs from a plan."""

    differences: tuple[PlanDifference, ...]

    def __bool__(self) -> bool:
        return any(d.differs for d in self.differences)


@dataclass(frozen=True)
class ObservedImprovement(Answer):
    """What would make an observed program faster."""

    program: str
    axes: Mapping[str, int]
    now: tuple[ObservedStep, ...]
    findings: tuple[ProgramFinding, ...]
    better: ModelPlan | None
    """The best strategy of a stack on the program's ranks; None without a model, a batch and a length."""


def observation_of(query: Query) -> Observation | None:
    """Return the observation that a query's source holds, None where it is something else. Raises InputError for
    fields that belong to a strategy."""
    seen = None if query.source is None else observed.read(Path(query.source))
    if seen is not None:
        for field in fields(query):
            value = getattr(query, field.name)
            if value not in (None, ()) and field.name not in ("source", "cluster"):
                reason = "belongs to a strategy, not to an observed program"
                raise InputError(field.name, value, reason, "leave it out")
    return seen


def price(o: Observation, query: Query) -> ObservedPrice:
    """Price an observed step on the query's cluster. Raises InputError."""
    if query.cluster is None:
        raise InputError("cluster", None, "is missing", "an observation is priced on one, such as dgx-h100")
    cluster = cluster_on(query.cluster, query.calibration)(o.world)
    return ObservedPrice(o.program, str(query.cluster), o.world, _steps(observed.priced(o, cluster)))


def _steps(ranks: tuple[observed.PricedRank, ...]) -> tuple[ObservedStep, ...]:
    return tuple(
        ObservedStep(
            rank=p.rank.rank,
            flops=p.flops,
            compute_s=p.compute_s,
            communication_s=p.communication_s,
            all_hidden_s=max(p.compute_s, p.communication_s),
            none_hidden_s=p.compute_s + p.communication_s,
            peak_bytes=p.rank.peak,
            usable_bytes=p.usable,
            fits=p.fits,
            collectives=p.flows,
        )
        for p in ranks
    )


def findings(o: Observation, query: Query) -> ObservedFindings:
    """Find what is wrong with an observed program; in seconds too, where the query names a cluster. Raises
    InputError."""
    cluster = cluster_on(query.cluster, query.calibration)(o.world) if query.cluster is not None else None
    return ObservedFindings(o.program, tuple(observed_lint.lint(o, cluster)))


def compare(o: Observation, plan: Path) -> PlanDifferences:
    """Compare an observed program's step with a plan. Raises InputError."""
    saved = plans.read(plan / "plan.json" if plan.is_dir() else plan)
    return PlanDifferences(
        tuple(
            PlanDifference(d.rank, d.what, d.plan_count, d.program_count, d.plan_total, d.program_total, d.differs)
            for d in observed.compare_with_plan(o, saved)
        )
    )


def improve(o: Observation, query: Query, wishes: Wishes) -> ObservedImprovement:
    """Find what to change in an observed program; with a model, a batch and a length also the best strategy of a
    stack (by default FSDP2 by hand) on its ranks. Raises InputError."""
    if query.gpus is not None:
        raise InputError("gpus", query.gpus, f"the program was observed on {o.world} ranks", "leave it out")
    named = ("model", "batch", "seq")
    missing = [name for name in named if getattr(query, name) is None]
    if 0 < len(missing) < len(named):
        raise InputError(missing[0], None, "is missing", f"name all of {', '.join(named)}, or none")
    cluster = cluster_on(query.cluster, query.calibration)(o.world)
    search = replace(query, source=None, gpus=o.world, stack=query.stack or "fsdp2")
    return ObservedImprovement(
        program=o.program,
        axes=dict(o.axes),
        now=_steps(observed.priced(o, cluster)),
        findings=tuple(observed_lint.lint(o, cluster)),
        better=None if missing else model_plan(search, wishes),
    )
