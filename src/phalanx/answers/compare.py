"""What `phalanx compare` does with plans and strategies: each one's price by term, its memory by part, its settings.

Every side is a question (answers/question): a plan, or a strategy's line in place of that of the first plan (or
of the model, cluster and numbers that options name). Settings are those that `phalanx export` would write where that
is one framework for all sides, else the fields of the strategies.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Unpack

from phalanx.answers.answer import Answer, flat, plain
from phalanx.answers.configurations.file_settings import program_of, settings_of
from phalanx.answers.expenses import expense, rates_of
from phalanx.answers.question.query import Query, QueryFields, query_of
from phalanx.answers.question.question import Question
from phalanx.answers.question.read import is_configuration
from phalanx.answers.question.resolution import read
from phalanx.cost.analytic.state_parts import StatePerParameter
from phalanx.planning.expense.expense import Expense
from phalanx.planning.expense.rates import ExpenseRates
from phalanx.planning.explain.analytic import state_in
from phalanx.planning.explain.exact import ExactExplanation
from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.strategy.spec import Strategy, format_field


@dataclass(frozen=True)
class ComparedPlan:
    """One side of a comparison."""

    name: str
    strategy: Strategy
    stack: str
    gpus: int
    tokens: int
    """In a step."""
    step_time_s: float
    """As predicted."""
    terms_s: Mapping[str, float]
    memory_bytes: float
    usable_bytes: float
    fits: bool
    """Whether the fullest rank has the memory."""
    memory_terms: Mapping[str, float]
    state: StatePerParameter
    """Bytes of a parameter's weights, gradient and optimizer state."""
    settings: Mapping[str, str]
    """Flags or keys of its stack by name, or fields of the strategy."""
    expense: Expense | None = None
    """For a million tokens."""
    rates: ExpenseRates | None = None
    """Prices of a GPU-hour, of energy and of carbon, with their sources."""
    measured_step_s: float | None = None
    """Median of a run's steps; None where the side is not a run's folder."""
    measured_memory_bytes: int | None = None
    """Peak of the fullest rank of a run."""


@dataclass(frozen=True)
class Comparison(Answer):
    """Two or three plans, configurations or strategies, priced, and the settings in which they differ."""

    sides: tuple[ComparedPlan, ...]
    settings_that_differ: Mapping[str, tuple[str, ...]]
    """Setting -> its value on each side, "" where a side has none."""

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each side."""
        return [flat({**plain(side), "settings": {}}) for side in self.sides]


def compare(*sides: str, rates: str | None = None, **fields: Unpack[QueryFields]) -> Comparison:
    """Compare two or three plans and configurations (files or folders) or strategies (lines such as tp=8,zero=1).

    A strategy's line is priced for the job of the first plan, or for the model, cluster and numbers in `fields`.
    `rates`: the user's prices, such as price=2.5 (planning/expense). Raises InputError."""
    return comparison_of(sides, query_of(None, fields), rates)


def comparison_of(names: Sequence[str], query: Query, rates: str | None = None) -> Comparison:
    """Price the sides and find the settings that differ. Raises InputError."""
    compared = sides(names, query, rates)
    return Comparison(tuple(compared), dict(differing([side.settings for side in compared])))


def sides(names: Sequence[str], query: Query, rates: str | None = None) -> list[ComparedPlan]:
    """Price plans and configurations (files or folders) and strategies (lines). `query`: the rest of the question.
    Raises InputError."""
    if not 2 <= len(names) <= 3:
        raise InputError("compare", len(names), "is not two or three things", "name two or three plans or strategies")
    files = [name for name in names if _is_file(name)]
    foreign = {name for name in files if is_configuration(Path(name))}
    planned = [name for name in files if name not in foreign]
    cluster = query.cluster or (_cluster_of(Path(planned[0])) if planned and foreign else None)

    def question(name: str, strategy: str | None = None) -> Question:
        given = replace(query, source=Path(name), strategy=strategy)
        if name in foreign:
            return read(replace(given, cluster=cluster))
        return read(replace(given, cluster=None, batch=None, seq=None, model=None) if foreign else given)

    questions = []
    for name in names:
        of_file = question(name) if name in files else question(files[0], name) if _has_base(files, query) else None
        questions.append(of_file or read(replace(query, strategy=name)))
    return [_side(*side, rates) for side in zip(names, questions, _settings(questions), strict=True)]


def _has_base(files: Sequence[str], query: Query) -> bool:
    """Whether a strategy's line is about the first file, rather than about what options name."""
    return bool(files) and (query.model is None or is_configuration(Path(files[0])))


def _cluster_of(path: Path) -> str | None:
    """Return the cluster that a plan was made for, by name or TOML file."""
    plan = plans.read(path / "plan.json" if path.is_dir() else path)
    choice = plan.choices.get("cluster") or {}
    return choice.get("file") or choice.get("preset")


def _is_file(name: str) -> bool:
    """Whether a word names a file: it exists, or has no `=`, as every strategy has."""
    return "=" not in name or os.path.exists(name)


def _side(name: str, q: Question, settings: Mapping[str, str], line: str | None) -> ComparedPlan:
    s = q.strategy
    assert s is not None
    if q.exact is not None:
        chosen = q.exact.chosen
        exact = ExactExplanation(chosen, (), q.exact.cluster.device.usable_bytes)
        job, seconds, terms, memory = q.exact.job, chosen.seconds, exact.terms, exact.memory_terms
        bytes_, usable = float(chosen.prediction.memory_bytes), float(exact.usable)
    else:
        p = q.subject.priced
        job, seconds, terms, memory = q.pricing.job, p.seconds, p.terms, p.memory_terms
        bytes_, usable = p.bytes_, float(p.usable)
    tokens = job.global_batch * job.seq
    fits = bytes_ <= usable
    rates = rates_of(q, line)
    cost = expense(q, tokens / seconds, rates)
    state = state_in(q.pricing, s)
    planned = ComparedPlan(
        name, s, q.stack, s.world, tokens, seconds, terms, bytes_, usable, fits, memory, state, settings, cost, rates
    )
    return replace(planned, **_measured_fields(Path(name))) if os.path.isdir(name) else planned


def _measured_fields(folder: Path) -> dict[str, Any]:
    """Return the measured fields of a run's folder; {} before it has recorded a step. Raises InputError."""
    record = folder / "recorded.json"
    if not record.is_file():
        return {}
    recorded = read_json(record, "recorded")
    peak, seconds = (
        recorded.get(name) if isinstance(recorded, dict) else None for name in ("memory_bytes", "step_time_s")
    )
    return {
        "measured_step_s": seconds if isinstance(seconds, float) and 0 < seconds < inf else None,
        "measured_memory_bytes": peak if type(peak) is int and 0 < peak < 2**63 else None,
    }


def _settings(questions: Sequence[Question]) -> list[dict[str, str]]:
    """Return the settings of each side: those that `phalanx export` writes where one framework can write all sides,
    else the fields of the strategies and the options."""
    programs = [
        None if q.exact else program_of(q, q.strategy, q.pricing.extra, q.subject.run.blocks)
        for q in questions
        if q.strategy is not None
    ]
    titles = {p.title if p else "" for p in programs}
    if titles != {""} and len(titles) == 1:
        return [settings_of(p) for p in programs if p]
    return [_fields(q) for q in questions]


def _fields(q: Question) -> dict[str, str]:
    s, options = q.strategy, {} if q.exact else q.pricing.extra.changed()
    of_strategy = {
        f.name: format_field(getattr(s, f.name)) for f in fields(Strategy) if getattr(s, f.name) is not None
    }
    return of_strategy | {name: format_field(value) for name, value in options.items()}


def differing(values: Sequence[Mapping[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the settings that are not the same on all sides: (name, value on each side, "" where it has none)."""
    names = dict.fromkeys(name for side in values for name in side)
    rows = [(name, tuple(side.get(name, "") for side in values)) for name in names]
    return [row for row in rows if len(set(row[1])) > 1]
