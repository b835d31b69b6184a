"""The price of a pipeline schedule: the time of every action, the bubble, and the activations that ranks hold.

    bubble fraction   idle time over the step:    1 - work / (ranks x makespan)
    bubble overhead   idle time over the ideal:   makespan / (work / ranks) - 1

1F1B and GPipe: (P-1)/(M+P-1) and (P-1)/M for equal chunks, M micro-batches, P ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.schedule.pipeline.actions import PipelineSchedule, live_activations
from phalanx.schedule.pipeline.simulate import Times, run, run_on_shared_cores


@dataclass(frozen=True)
class Costs:
    """Seconds of F, I and W of every chunk for a micro-batch, and of a transfer between two ranks, for `overhead` of
    which sender and receiver cannot compute. `pace`: the speed with 1, 2, ... active ranks over the speed with all,
    if ranks share cores (then a transfer is all overhead); empty if each rank has its own."""

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    transfer: float = 0.0
    overhead: float = 0.0
    pace: Sequence[float] = ()

    @classmethod
    def equal(
        cls,
        chunks: int,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        transfer: float = 0.0,
    ) -> Costs:
        """Return equal costs for `chunks` chunks."""
        return cls([forward] * chunks, [input_grad] * chunks, [weight_grad] * chunks, transfer)


@dataclass(frozen=True)
class PricedSchedule:
    """A simulated schedule. `times`: start and end of every rank's actions, in seconds. `messages`: number of
    messages between ranks. `peak`: the most activations that each rank holds at once, counted per chunk and
    micro-batch."""

    schedule: PipelineSchedule
    times: Times
    messages: int
    peak: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last rank has finished."""
        return max((times[-1][1] for times in self.times if times), default=0.0)

    @property
    def work(self) -> tuple[float, ...]:
        """Seconds for which each rank is busy."""
        return tuple(sum(end - start for start, end in times) for times in self.times)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over the step, of all ranks."""
        return 1 - sum(self.work) / (len(self.work) * self.makespan)

    @property
    def bubble_overhead(self) -> float:
        """Idle time over the ideal step."""
        return self.makespan * len(self.work) / sum(self.work) - 1


def price(s: PipelineSchedule, costs: Costs) -> PricedSchedule:
    """Run a schedule with these costs. Raises Unproved if it deadlocks."""
    backward = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
    seconds = {"F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad, "B": backward}
    crossings = sum(a != b for a, b in itertools.pairwise(s.rank_of))
    peak = tuple(max(live_activations(actions), default=0) for actions in s.actions)
    if any(speed != 1 for speed in costs.pace):
        times = run_on_shared_cores(s, seconds, costs.overhead, costs.pace)
    else:
        times = run(s, seconds, costs.transfer, costs.overhead)
    return PricedSchedule(s, times, 2 * crossings * s.micro_batches, peak)
