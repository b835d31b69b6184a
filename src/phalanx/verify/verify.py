"""Verify a strategy: the step of one rank of each class, on tensors without content, against the StepProgram."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.cost.step.expand import expand
from phalanx.cost.step.program import StepProgram
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.verify.diff import PASSES, Difference, differences, exactly, largest_deviation, memory_differences
from phalanx.verify.fake_step import Recorded, Unverifiable, imagine, place_of
from phalanx.verify.rank_classes import RankClass, classes


@dataclass(frozen=True)
class Verified:
    """What came out for a class of ranks. `failed`: why its step did not come to an end, "" if it did; otherwise
    nothing is recorded. `deviation`: bytes by which live memory differs at most, None where the passes differ."""

    ranks: RankClass
    program: StepProgram
    recorded: Recorded | None
    differences: tuple[Difference, ...]
    deviation: int | None
    seconds: float
    failed: str = ""

    @property
    def proved(self) -> bool:
        return not self.failed and not self.differences


def verify(
    spec: ModelSpec, job: Job, strategy: Strategy, begins: Callable[[RankClass], None] = lambda _: None
) -> tuple[Verified, ...]:
    """All classes of a strategy's ranks, one after the other; `begins` is told which comes next."""
    found = []
    for ranks in classes(spec, job, strategy):
        begins(ranks)
        found.append(_verified(spec, job, strategy, ranks))
    return tuple(found)


def _verified(spec: ModelSpec, job: Job, strategy: Strategy, ranks: RankClass) -> Verified:
    start = time.perf_counter()
    program = expand(spec, job, strategy, ranks.rank)
    try:
        recorded = imagine(spec, job, strategy, ranks.rank)
    except Unverifiable as error:
        return Verified(ranks, program, None, (), None, time.perf_counter() - start, str(error))
    except Exception as error:  # whatever it is, a real run would end with it too
        why = f"{type(error).__name__}: {str(error).strip() or 'no words'}, at {place_of(error)}"
        return Verified(ranks, program, None, (), None, time.perf_counter() - start, why)
    # Without content nothing decides how much is sent: it is the most.
    found = list(differences(program.events, recorded.events, exactly))
    if not found and recorded.unawaited:
        first, *more = recorded.unawaited
        others = f", nor for {len(more)} more" if more else ""
        found.append(Difference("waits", "for every collective", f"none for {first}{others}"))
    deviation = None
    if not any(d.what == PASSES for d in found):
        found += memory_differences(program, recorded.events, recorded.held)
        deviation = largest_deviation(program, recorded.events, recorded.held)
    return Verified(ranks, program, recorded, tuple(found), deviation, time.perf_counter() - start)
