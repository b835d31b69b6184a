"""Verify a strategy: compare the real step of one rank of each class, on fake tensors, with its StepProgram."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.cost.step.expand import expand
from phalanx.cost.step.program import StepProgram
from phalanx.schedule.layout import Layout, RankView
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.verify.diff import PASSES, Difference, differences, exactly, largest_deviation, memory_differences
from phalanx.verify.fake_step import Recorded, Unverifiable, imagine, place_of
from phalanx.verify.rank_classes import RankClass, classes


@dataclass(frozen=True)
class Verified:
    """The result for a class of ranks. `failed`: why its step did not finish, "" if it did; a failed step has no
    record. `deviation`: the largest difference of live bytes, None where passes differ. `seconds`: of examining
    it."""

    ranks: RankClass
    program: StepProgram
    recorded: Recorded | None
    differences: tuple[Difference, ...]
    deviation: int | None
    seconds: float
    failed: str = ""

    @property
    def proved(self) -> bool:
        """Whether the step finished and equals its StepProgram."""
        return not self.failed and not self.differences


def verify(
    spec: ModelSpec, job: Job, strategy: Strategy, begins: Callable[[RankClass], None] = lambda _: None
) -> tuple[Verified, ...]:
    """Verify every class of a strategy's ranks in turn; `begins` is called before each."""
    results = []
    layout = Layout(spec, job, strategy)
    for ranks in classes(layout):
        begins(ranks)
        results.append(_verified(layout.rank_view(ranks.rank), ranks))
    return tuple(results)


def _verified(view: RankView, ranks: RankClass) -> Verified:
    start = time.perf_counter()
    program = expand(view)
    try:
        recorded = imagine(view.model, view.job, view.strategy, ranks.rank)
    except Unverifiable as error:
        return Verified(ranks, program, None, (), None, time.perf_counter() - start, str(error))
    except Exception as error:  # a real run would end with it too
        why = f"{type(error).__name__}: {str(error).strip() or 'no message'}, at {place_of(error)}"
        return Verified(ranks, program, None, (), None, time.perf_counter() - start, why)
    # Fake gradients send the most that compression may send, so that bytes must agree exactly.
    results = list(differences(program.events, recorded.events, exactly))
    if not results and recorded.unawaited:
        first, *more = recorded.unawaited
        others = f", nor for {len(more)} more" if more else ""
        results.append(Difference("waits", "for every collective", f"none for {first}{others}"))
    deviation = None
    if not any(d.what == PASSES for d in results):
        results += memory_differences(program, recorded.events, recorded.memory)
        deviation = largest_deviation(program, recorded.events, recorded.memory)
    return Verified(ranks, program, recorded, tuple(results), deviation, time.perf_counter() - start)
