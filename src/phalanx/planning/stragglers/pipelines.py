"""A step whose ranks are not equally fast: which ranks wait for which, and how far a delay travels.

Ranks meet in three places, and at each the fastest wait for the slowest:

    inside layers    tp, cp, ep; and the ranks of a shard, where the stack gathers parameters or reduces gradients for
                     every micro-batch: such a group is one stage of one pipeline, as slow as its slowest rank
    between stages   the schedule is run with the stages' own seconds
    between replicas gradients are reduced when the last pipeline has ended

A factor multiplies the seconds of a rank's passes and update. Slow links lengthen the passes of the stages whose
groups cross them, the messages of the pipelines that do, and the reduction of gradients. A rank's wait is then a sum
of parts, which add up over all ranks to world x (slower step - undisturbed step).
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
    """A step in which each rank takes a factor times as long. Waits are GPU-seconds of all ranks together."""

    undisturbed_s: float
    step_s: float
    own_s: float
    """Additional seconds of the slow ranks themselves."""
    inside_s: float
    """Waits inside layers for the slowest rank of a group."""
    stages_s: float
    """Waits for other stages of the pipeline, beyond the bubble."""
    replicas_s: float
    """Waits for other pipelines, before gradients are reduced."""
    update_s: float
    """Waits for the slowest update."""
    update_factor: float
    """Factor of the slowest update."""
    links_s: Mapping[str, float]
    """Waits for messages over slow links, by axis."""
    ends_s: Floats
    """Seconds at which each pipeline ends its last backward pass, (pipelines,)."""
    of_stage: Floats
    """Factor of each stage, (pipelines, pp)."""


@dataclass(frozen=True)
class Delays:
    """Seconds that slow links add to a step. `passes_s`: to a stage's passes, by axis, (pipelines, pp); `messages_s`:
    to a pipeline's messages, (pipelines,); `rest_s`: after the passes, by axis: "dp" for the reduction of gradients
    and the gathers of parameters, "all" if axes are priced together."""

    passes_s: Mapping[str, Floats] = field(default_factory=dict)
    messages_s: Floats | float = 0.0
    rest_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunnablePipelines:
    """A strategy's priced step in parts, so that it can be run with slower ranks."""

    lockstep: Lockstep
    busy_s: Floats
    """Seconds of passes of each stage in a step, (pp,)."""
    run: Callable[[Floats], Floats]
    """From the factors of stages, (pipelines, pp), to the seconds at which pipelines end their passes, (pipelines,).
    """
    schedule: Callable[[int, Floats], PricedSchedule]
    """From a pipeline's number and the factors of its stages, (pp,), to its timed actions."""
    alone_s: float
    """Seconds at which an undisturbed pipeline ends."""
    outside_s: float
    """What a step takes in addition to its passes."""
    update_s: float
    delays: Delays = Delays()

    def delayed(self, factor: Floats) -> DelayedStep:
        """Return the step in which each rank takes `factor` times as long, (world,)."""
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
            undisturbed_s=self.alone_s + self.outside_s,
            step_s=last + self.outside_s + sum(self.delays.rest_s.values()) + updates,
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
