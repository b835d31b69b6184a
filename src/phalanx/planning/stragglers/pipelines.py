"""A step whose ranks are not equally fast: who waits for whom, and how far a delay travels.

Ranks meet in three places, and at each the fastest wait for the slowest:

    inside layers    tp, cp, ep; and the ranks of a shard, where the stack gathers parameters or reduces gradients for
                     every micro-batch: such a group is one stage of one pipeline, as slow as its slowest rank
    between stages   the schedule is run with the stages' own seconds
    between replicas gradients are reduced when the last pipeline has ended

A factor multiplies all that a rank does in its passes and in the update. Slow links lengthen the passes of the stages
whose groups cross them, the messages of the pipelines that do, and the reduction of gradients. A rank's wait is then
a sum of parts, which add up over all ranks to world x (slower step - undisturbed step).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phalanx.cost.pipeline_time import PricedSchedule
from phalanx.planning.stragglers.lockstep import Lockstep

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DelayedStep:
    """A step with the factors of its ranks. Waits are GPU-seconds of all ranks, by where they wait."""

    undisturbed_s: float
    step_s: float
    own_s: float
    """What slow ranks take longer themselves."""
    inside_s: float
    """Inside layers, for the slowest rank of a group."""
    stages_s: float
    """For other stages of the pipeline, beyond the bubble."""
    replicas_s: float
    """For other pipelines, before gradients are reduced."""
    update_s: float
    """For the slowest update."""
    update_factor: float
    """Of the slowest update."""
    links_s: Mapping[str, float]
    """For messages over slow links, by axis."""
    ends_s: Floats
    """When each pipeline ends its last backward pass, (pipelines,)."""
    of_stage: Floats
    """Factor of each stage, (pipelines, pp)."""


@dataclass(frozen=True)
class Delays:
    """What slow links add to a step. `passes_s`: to a stage's passes, by axis, (pipelines, pp); `messages_s`: to a
    pipeline's messages, (pipelines,); `rest_s`: to what follows the passes, by axis: "dp" for the reduction of
    gradients and the gathers of parameters, "all" where axes are priced together."""

    passes_s: Mapping[str, Floats] = field(default_factory=dict)
    messages_s: Floats | float = 0.0
    rest_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunnablePipelines:
    """A strategy's priced step, taken apart so that it can be run with other factors."""

    lockstep: Lockstep
    busy_s: Floats
    """Seconds of passes of each stage in a step, (pp,)."""
    run: Callable[[Floats], Floats]
    """When pipelines end their passes whose stages have these factors, (pipelines, pp) -> (pipelines,)."""
    schedule: Callable[[int, Floats], PricedSchedule]
    """The actions of a pipeline, by its number, whose stages have these factors, (pp,)."""
    alone_s: float
    """When an undisturbed pipeline ends."""
    beside_s: float
    """What a step takes in addition to its passes."""
    update_s: float
    delays: Delays = Delays()

    def delayed(self, factor: Floats) -> DelayedStep:
        """Return the step whose ranks take `factor` times as long, (world,)."""
        at, world = self.lockstep, len(factor)
        slowest = np.full((at.pipelines, len(self.busy_s)), -np.inf)
        np.maximum.at(slowest, (at.pipeline, at.stage), factor)
        of_stage = np.where(np.isfinite(slowest), slowest, 1.0)
        passes, busy = self.run(of_stage), self.busy_s[at.stage]
        ends = passes + self.delays.messages_s
        last = float(ends.max())
        added = {axis: s[at.pipeline, at.stage] for axis, s in self.delays.passes_s.items()}
        link = sum(added.values(), np.zeros(world))
        paced = of_stage[at.pipeline, at.stage] * (busy + link)
        updates = self.update_s * (float(factor.max()) - 1)
        links = {axis: float(seconds.sum()) for axis, seconds in added.items()}
        links["pp"] = float((ends - passes)[at.pipeline].sum())
        links |= {axis: world * seconds for axis, seconds in self.delays.rest_s.items()}
        return DelayedStep(
            undisturbed_s=self.alone_s + self.beside_s,
            step_s=last + self.beside_s + sum(self.delays.rest_s.values()) + updates,
            own_s=float(((factor - 1) * busy).sum()),
            inside_s=float((paced - factor * busy - link).sum()),
            stages_s=float(((passes[at.pipeline] - paced) - (self.alone_s - busy)).sum()),
            replicas_s=float((last - ends[at.pipeline]).sum()),
            update_s=world * updates,
            update_factor=float(factor.max()),
            links_s=links,
            ends_s=ends,
            of_stage=of_stage,
        )
