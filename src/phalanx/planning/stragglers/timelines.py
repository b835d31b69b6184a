"""Timelines of ranks in a simulated step, one rank for each class: passes, waits, gradients, update."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.planning.stragglers.pipelines import DelayedStep, Floats, RunnablePipelines


@dataclass(frozen=True)
class SimulatedSpan:
    """A span of a rank's timeline, in seconds from the start of the step; `waits`: whether the rank waits in it."""

    name: str
    waits: bool
    start_s: float
    stop_s: float
    micro_batch: int | None = None


@dataclass(frozen=True)
class SimulatedRank:
    """A rank's timeline; `alike`: the number of ranks with the same one, itself included."""

    rank: int
    alike: int
    spans: tuple[SimulatedSpan, ...]


def classes(x: RunnablePipelines, factor: Floats, step: DelayedStep) -> dict[int, int]:
    """Return the first rank of each class with the number of ranks in it, the smallest classes first. Ranks of one
    class have equal factors, equal factors of their pipeline's stages, and pipelines that end together."""
    at = x.lockstep
    rows = np.concatenate([step.of_stage, step.ends_s[:, None]], axis=1)
    alike = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    keys = np.stack([alike[at.pipeline], at.stage, np.unique(factor, return_inverse=True)[1].reshape(-1)])
    _, first, count = np.unique(keys, axis=1, return_index=True, return_counts=True)
    fewest = sorted(zip(count.tolist(), first.tolist(), strict=True))
    return {rank: number for number, rank in fewest}


def timelines(
    x: RunnablePipelines, step: DelayedStep, ranks: Sequence[int], alike: dict[int, int]
) -> Iterator[SimulatedRank]:
    """Yield the timelines of `ranks` in a step. `alike`: as `classes` returns it."""
    at = x.lockstep
    last = float(step.ends_s.max())
    for pipeline in dict.fromkeys(at.pipeline[list(ranks)].tolist()):
        run = x.schedule(pipeline, step.of_stage[pipeline])
        for rank in (r for r in ranks if at.pipeline[r] == pipeline):
            stage, spans, now = int(at.stage[rank]), list[SimulatedSpan](), 0.0
            actions = zip(run.schedule.actions[stage], run.times[stage], strict=True)
            for action, (start, stop) in actions:
                if start > now:
                    spans.append(SimulatedSpan("another stage", True, now, start))
                spans.append(SimulatedSpan(str(action), False, start, stop, action.micro_batch))
                now = stop
            end = float(step.ends_s[pipeline])
            parts = (
                ("end of its pipeline", True, end),
                ("other pipelines", True, last),
                ("gradients, parameters and the rest", False, step.step_s - x.update_s * step.update_factor),
                ("update", False, step.step_s),
            )
            for name, waits, until in parts:
                if until > now:
                    spans.append(SimulatedSpan(name, waits, now, until))
                    now = until
            yield SimulatedRank(rank, alike.get(rank, 1), tuple(spans))


def count_of_spans(x: RunnablePipelines, ranks: Sequence[int]) -> int:
    """Return the largest number of spans that the timelines of `ranks` can have: two for each pass, its own and the
    wait before it, and four at the end of a step."""
    run = x.schedule(0, np.ones(len(x.busy_s)))
    return sum(2 * len(run.schedule.actions[x.lockstep.stage[rank]]) + 4 for rank in ranks)
