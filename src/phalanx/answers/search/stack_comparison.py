"""The same question under every stack, the fastest first: `plan --stack all`."""

from dataclasses import dataclass, replace

from phalanx.answers.answer import Answer
from phalanx.answers.question.query import Query
from phalanx.answers.question.question import Premises
from phalanx.answers.question.searches import search_of
from phalanx.planning.search import HEADROOM
from phalanx.planning.search.variations import compare
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class StackBest:
    """A stack's best strategy; without one, `reason` says why."""

    stack: str
    title: str
    strategy: Strategy | None
    step_time_s: float | None
    mfu: float | None
    memory_bytes: float | None
    reason: str


@dataclass(frozen=True)
class StackComparison(Answer):
    """The same question under every stack, the fastest first."""

    rows_of = "stacks"
    question: Premises
    stacks: tuple[StackBest, ...]


def compare_stacks(query: Query, headroom: float = HEADROOM) -> StackComparison:
    """Search a query's strategies under every stack. Raises InputError if none has an answer."""
    question = search_of(replace(query, stack=None), any_stack=True)
    base = replace(question.pricing, headroom=headroom)
    compared = compare(lambda name: replace(base, stack=name), question.gpus)
    if compared[0].best is None:
        first = compared[0]
        raise InputError("stack", "all", f"no stack has an answer: {first.row.name} {first.reason}")
    return StackComparison(
        replace(question.premises, stack="all"),
        tuple(
            StackBest(f.row.name, f.row.title, None, None, None, None, f.reason)
            if f.best is None
            else StackBest(f.row.name, f.row.title, f.best.strategy, f.seconds, f.mfu, f.best.bytes_, f.reason)
            for f in compared
        ),
    )
