"""A disturbed step: the cost of slow ranks, slow links, jitter and a kill, and where ranks wait."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Unpack

import numpy as np

from phalanx.answers.answer import Answer
from phalanx.answers.disturbances import Kill, factors, jitter_of, kill_in, ranks_in, slow_links
from phalanx.answers.prediction import UnevenLengths, uneven_steps
from phalanx.answers.question.query import QueryFields, Source, query_of
from phalanx.answers.question.question import Premises, Question
from phalanx.answers.question.resolution import read
from phalanx.answers.shared_network import LinksInUse, on_shared_links
from phalanx.planning.stragglers.own import own_pipelines
from phalanx.planning.stragglers.pipelines import DelayedStep, Floats, RunnablePipelines
from phalanx.planning.stragglers.priced import priced_pipelines
from phalanx.planning.stragglers.timelines import SimulatedRank, classes, count_of_spans, timelines
from phalanx.spec.errors import InputError
from phalanx.spec.ranges import require_seed
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_PAIRS = 4
"""Pairs of steps that are drawn and averaged where there is jitter: what is faster in one is slower in the other by
the same factor, so that their mean is nearer to that of many."""
_MOST_SPANS = 200_000
"""The most spans of a trace that a browser still opens."""
_MOST_RANKS = 64
"""The most ranks in a trace where the user names none."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes `factor` times as long, and its place in the mesh."""

    rank: int
    factor: float
    coordinates: dict[str, int]
    """By mesh axis, of those larger than 1."""
    lockstep_ranks: int
    """Ranks that go at its pace inside layers, itself among them."""


@dataclass(frozen=True)
class Wait:
    """A place where ranks lose time, and the GPU-seconds lost in a step."""

    where: str
    gpu_s: float
    share: float
    """Share of all GPU-seconds lost."""


@dataclass(frozen=True)
class Restart:
    """The cost of a kill with one kind of restart."""

    kind: str
    detect_s: float
    """Seconds until the failure is detected."""
    restart_s: float
    """From then until the checkpoint is loaded, a wait for a spare included."""
    again_s: float
    """Work done again: since the last durable save, on average, and of this step."""
    gpu_hours: float
    """Lost by all ranks together."""


@dataclass(frozen=True)
class KilledStep:
    """A kill within a step, and the cost of restarting."""

    what: str
    at_s: float
    """Seconds into the step."""
    stopped_ranks: int
    """Ranks that stop at once, as they communicate with the dead ones inside layers."""
    all_stopped_s: float
    """The most seconds until all ranks wait."""
    interval_s: float
    """Seconds of work between saves."""
    restarts: tuple[Restart, ...]
    taken: tuple[str, ...]
    """Values assumed where none were given, with their sources."""


@dataclass(frozen=True)
class SimulatedStep(Answer):
    """A step with slow ranks, and the same step without."""

    rows_of = "waits"
    question: Premises
    strategy: Strategy
    undisturbed_s: float
    """The predicted step."""
    step_time_s: float
    slowdown: float
    """The step over the predicted one."""
    lost_gpu_s: float
    """GPU-seconds lost in a step because ranks are not equally fast."""
    waits: tuple[Wait, ...]
    slow: tuple[SlowRank, ...]
    """The ranks that were named, at most 16 of them."""
    jitter: float
    """Relative standard deviation of a rank's time from step to step."""
    pipelines: int
    """Pipelines that wait for each other once a step only."""
    delayed_pipelines: int
    """Pipelines that end later than undisturbed."""
    lengths: UnevenLengths | None = None
    killed: KilledStep | None = None
    links: LinksInUse | None = None
    """The jobs that share its links, if they were asked for."""


def simulate(
    source: Source = None,
    *,
    slow: str = "",
    slow_link: str = "",
    kill: str = "",
    jitter: str | float = 0.0,
    seed: int = 0,
    lengths: str | None = None,
    on: str = "",
    neighbours: str | Path | Sequence[str | Path] = (),
    **fields: Unpack[QueryFields],
) -> SimulatedStep:
    """Simulate a priced step with disturbances. `slow`: `rank=37:1.3` takes 1.3 times as long, `node=4:1.1` is all
    ranks of a node, commas separate several; `slow_link`: `nic=37:0.5` has half of its rate, `node=4:0.5` all links
    of a node, `tier=NAME:0.5` a tier; `kill`: `rank=37@40%` of the step, `node=4@2.5s`; `jitter`: `2%` or 0.02 of
    each rank's time; `lengths`: as in predict; `neighbours`: other jobs on the same links, such as plan.json@8-15,
    where the job itself is `on` GPUs 0-7,16-23. Raises InputError."""
    question = read(query_of(source, fields))
    words = tuple(map(str, (neighbours,) if isinstance(neighbours, str | Path) else neighbours))
    return (
        alone_answer(question, slow, slow_link, kill, jitter, seed, lengths, str(on), words)
        or Simulation(question, slow, slow_link, jitter, seed, kill).answer
    )


def alone_answer(
    question: Question,
    slow: str,
    slow_link: str,
    kill: str,
    jitter: str | float,
    seed: int,
    lengths: str | None,
    on: str,
    neighbours: Sequence[str],
) -> SimulatedStep | None:
    """Return the answer where `lengths` or `neighbours` are given, which go with no other disturbance; else None.
    Raises InputError."""
    if on and not neighbours:
        raise InputError("on", on, "says where a job is among others", "name another: --neighbour plan.json@8-15")
    asked = [("lengths", lengths)] * (lengths is not None) + [("neighbour", " ".join(neighbours))] * bool(neighbours)
    if not asked:
        return None
    if len(asked) > 1 or slow or slow_link or kill or jitter_of(jitter):
        raise InputError(*asked[0], "is simulated alone", "leave out what else disturbs the step")
    if neighbours:
        return of_neighbours(question, on, neighbours, seed)
    return of_lengths(question, lengths or "", seed)


class Simulation:
    """The simulation of a question's step with slow ranks, slow links, jitter or a kill. Raises InputError."""

    def __init__(
        self,
        question: Question,
        slow: str = "",
        slow_link: str = "",
        jitter: str | float = 0.0,
        seed: int = 0,
        kill: str = "",
    ) -> None:
        require_seed(seed)
        self.question = question
        exact, s = question.exact, question.strategy
        assert s is not None
        if s.local:
            reason = "has replicas that step alone, which are not simulated yet"
            raise InputError("strategy.local", s.local, reason, "leave it out")
        self.strategy, world = s, s.world
        cluster = exact.cluster if exact else question.subject.pricing.cluster
        self.kill = kill_in(kill, world, cluster.ranks_per_node) if kill else None
        links = slow_links(slow_link, world, cluster)
        if exact is None:
            self.pipelines = priced_pipelines(question.subject.pricing, s, links)
        else:
            self.pipelines = own_pipelines(exact.model, cluster, exact.job, s, links)
        self.factor = factors(slow, world, cluster.ranks_per_node)
        self.jitter = jitter_of(jitter)
        drawn = self.jitter * np.random.default_rng(seed).standard_normal((_PAIRS, world))
        self.draws = [self.factor * np.exp(x) for x in (*drawn, *-drawn)] if self.jitter else [self.factor]
        self.steps = [self.pipelines.delayed(draw) for draw in self.draws]

    @property
    def answer(self) -> SimulatedStep:
        """The slowdown, and where ranks wait. Raises InputError for a kill after the step's end."""
        x, s, steps = self.pipelines, self.strategy, self.steps
        step_s = float(np.mean([step.step_s for step in steps]))
        undisturbed_s = steps[0].undisturbed_s
        lost = s.world * (step_s - undisturbed_s)
        return SimulatedStep(
            question=self.question.premises,
            strategy=s,
            undisturbed_s=undisturbed_s,
            step_time_s=step_s,
            slowdown=step_s / undisturbed_s,
            lost_gpu_s=lost,
            waits=tuple(_waits(steps, lost)),
            slow=tuple(_slow_ranks(x, s, self.factor)),
            jitter=self.jitter,
            pipelines=x.lockstep.pipelines,
            delayed_pipelines=int((steps[0].ends_s > x.alone_s * (1 + 1e-9)).sum()),
            killed=self._killed(self.kill) if self.kill else None,
        )

    def _killed(self, kill: Kill) -> KilledStep:
        step, at = self.steps[0], self.pipelines.lockstep
        at_s = kill.at * step.step_s if kill.is_share else kill.at
        if at_s > step.step_s:
            raise InputError("kill", f"{at_s:g}s", f"is after the end of the step, {step.step_s:.4g} s", "use 40%")
        price: Callable[..., KilledStep] = import_module("phalanx.reliability.losses").kill_cost  # a vertical: named
        meet = at.pipeline * len(self.pipelines.busy_s) + at.stage
        dead = meet[kill.first_rank : kill.first_rank + kill.ranks]
        return price(self.question, kill, step.step_s, at_s, int(np.isin(meet, dead).sum()), float(step.ends_s.max()))

    def timelines(self, ranks: str = "") -> Iterator[SimulatedRank]:
        """Return the timelines of ranks such as `0-7,37`, or else of one rank of each class. Raises InputError."""
        x, step = self.pipelines, self.steps[0]
        alike = classes(x, self.draws[0], step)
        chosen = ranks_in(ranks, self.strategy.world) if ranks else tuple(alike)[:_MOST_RANKS]
        if (spans := count_of_spans(x, chosen)) > _MOST_SPANS:
            reason = f"are {len(chosen):,} ranks with {spans:,} spans: no browser draws them"
            raise InputError("ranks", ranks or "all classes", reason, f"name fewer; {_MOST_SPANS:,} spans are drawn")
        return timelines(x, step, chosen, alike)


def of_lengths(question: Question, line: str, seed: int) -> SimulatedStep:
    """Simulate a step with unequal sequences; the undisturbed step has the mean micro-batch throughout."""
    require_seed(seed)
    steps = uneven_steps(question, line, seed)
    step = steps.step(steps.lengths.way, steps.lengths.balanced)
    world = steps.strategy.world
    parts = {"inside_s": step.meeting_s, "turns_s": step.turns_s, "replicas_s": step.replicas_s}
    lost = world * (step.step_s - step.even_s)
    gpu_s = {where: world * seconds if abs(seconds) > 1e-9 * step.step_s else 0.0 for where, seconds in parts.items()}
    return SimulatedStep(
        question=question.premises,
        strategy=steps.strategy,
        undisturbed_s=step.even_s,
        step_time_s=step.step_s,
        slowdown=step.step_s / step.even_s,
        lost_gpu_s=lost,
        waits=tuple(Wait(_PLACES[where], s, s / lost if lost else 0.0) for where, s in gpu_s.items()),
        slow=(),
        jitter=0.0,
        pipelines=int(steps.pipeline.max()) + 1,
        delayed_pipelines=0,
        lengths=UnevenLengths(line, step, (step,), steps.cut_share),
    )


def of_neighbours(question: Question, on: str, neighbours: Sequence[str], seed: int) -> SimulatedStep:
    """Simulate a step with other jobs on its links; the undisturbed step is on the same GPUs without them."""
    shared = on_shared_links(question, on, neighbours, seed)
    own = shared.links.jobs[0]
    world = own.strategy.world
    longer = [(name, world * s if abs(s) > 1e-9 * own.step_s else 0.0) for name, s in shared.by_phase]
    lost = sum(gpu_s for _, gpu_s in longer)
    return SimulatedStep(
        question=question.premises,
        strategy=own.strategy,
        undisturbed_s=own.alone_s,
        step_time_s=own.step_s,
        slowdown=own.slowdown,
        lost_gpu_s=lost,
        waits=tuple(Wait(f"{name}: links that others use", s, s / lost if lost else 0.0) for name, s in longer),
        slow=(),
        jitter=0.0,
        pipelines=1,
        delayed_pipelines=0,
        links=shared.links,
    )


_PLACES = {
    "turns_s": "micro-batches of one pipeline that take unequally long",
    "own_s": "slow ranks themselves",
    "inside_s": "inside layers: tp, cp, ep, shards",
    "stages_s": "other stages of the pipeline",
    "replicas_s": "other pipelines, before gradients are reduced",
    "update_s": "the slowest update",
}
_LINKS = {
    "pp": "messages between stages over slow links: pp",
    "dp": "gradients and parameters over slow links: dp",
    "all": "all that is sent over slow links",
}


def _waits(steps: list[DelayedStep], lost: float) -> list[Wait]:
    sums = {
        where: float(np.mean([getattr(s, name) for s in steps]))
        for name, where in _PLACES.items()
        if name != "turns_s"
    }
    for axis in steps[0].links_s if any(steps[0].links_s.values()) else ():
        sums[_LINKS.get(axis, f"inside layers over slow links: {axis}")] = steps[0].links_s[axis]
    rounding = 1e-9 * (abs(lost) + steps[0].undisturbed_s)
    sums = {where: seconds if abs(seconds) > rounding else 0.0 for where, seconds in sums.items()}
    return [Wait(where, seconds, seconds / lost if lost else 0.0) for where, seconds in sums.items()]


def _slow_ranks(pipelines: RunnablePipelines, s: Strategy, factor: Floats) -> list[SlowRank]:
    at, grid = pipelines.lockstep, mesh(s)
    return [
        SlowRank(
            rank,
            float(factor[rank]),
            grid.coordinates(rank),
            int(((at.pipeline == at.pipeline[rank]) & (at.stage == at.stage[rank])).sum()),
        )
        for rank in np.flatnonzero(factor != 1)[:16].tolist()
    ]
