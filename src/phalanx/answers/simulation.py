"""A step whose ranks are not equally fast: what slow ranks and jitter cost, and who waits for whom."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from phalanx.answers.answer import Answer
from phalanx.answers.prediction import UnevenLengths, uneven_steps
from phalanx.answers.question.query import QueryFields, Source, query_of
from phalanx.answers.question.question import Premises, Question, read
from phalanx.planning.stragglers import DelayedStep, Floats, PricedPipelines
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_DRAWS = 8
"""Steps of which jitter is the mean."""
_SLOW = re.compile(r"(?:(rank|node)=)?(\d+):([\d.]+)")


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes `factor` times as long, and where it is."""

    rank: int
    factor: float
    coordinates: dict[str, int]
    """Along every axis larger than 1."""
    lockstep_ranks: int
    """Ranks that go at its pace inside layers, itself among them."""


@dataclass(frozen=True)
class Wait:
    """Where time is lost, and of how many GPU-seconds a step."""

    where: str
    gpu_s: float
    share: float
    """Of all that is lost."""


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
    """GPU-seconds a step that no rank would lose if all were equally fast."""
    waits: tuple[Wait, ...]
    slow: tuple[SlowRank, ...]
    """The ranks that were named, at most 16 of them."""
    jitter: float
    """Standard deviation of a rank's passes from step to step."""
    pipelines: int
    """Pipelines that wait for each other once a step only."""
    delayed_pipelines: int
    """Pipelines that end later than undisturbed."""
    lengths: UnevenLengths | None = None


def simulate(
    source: Source = None,
    *,
    slow: str = "",
    jitter: str | float = 0.0,
    seed: int = 0,
    lengths: str | None = None,
    **fields: Unpack[QueryFields],
) -> SimulatedStep:
    """Run a priced step with ranks that are slower. `slow`: `rank=37:1.3` takes 1.3 times as long, `node=4:1.1` is
    all ranks of a node, several by commas; `jitter`: `2%` or 0.02 of each rank's time; `lengths`: as in predict.
    Raises InputError."""
    return simulation_of(read(query_of(source, fields)), slow, jitter, seed, lengths)


def simulation_of(
    question: Question, slow: str = "", jitter: str | float = 0.0, seed: int = 0, lengths: str | None = None
) -> SimulatedStep:
    """Run the step of a question's strategy with ranks that are slower, or with unequal sequences. Raises
    InputError."""
    if lengths is not None:
        if slow or _share(jitter):
            reason = "and slow ranks are simulated one at a time"
            raise InputError("lengths", lengths, reason, "leave slow and jitter out, or lengths")
        return _of_lengths(question, lengths, seed)
    if question.exact is not None:
        remedy = "name --model, --cluster, --gpus, --batch, --seq and --strategy"
        raise InputError("source", question.about, "is priced exactly, which is not simulated yet", remedy)
    x = question.subject
    pipelines = PricedPipelines(x.pricing, x.strategy)
    world = x.strategy.world
    factor = _factors(slow, world, x.pricing.cluster.ranks_per_node)
    sigma = _share(jitter)
    random = np.random.default_rng(seed)
    draws = [factor * np.exp(sigma * random.standard_normal(world)) for _ in range(_DRAWS if sigma else 1)]
    steps = [pipelines.delayed(draw) for draw in draws]
    step_s = float(np.mean([step.step_s for step in steps]))
    undisturbed_s = steps[0].undisturbed_s
    lost = world * (step_s - undisturbed_s)
    alone = float(pipelines.ends(np.ones((1, x.strategy.pp)))[0])
    return SimulatedStep(
        question=question.premises,
        strategy=x.strategy,
        undisturbed_s=undisturbed_s,
        step_time_s=step_s,
        slowdown=step_s / undisturbed_s,
        lost_gpu_s=lost,
        waits=tuple(_waits(steps, lost)),
        slow=tuple(_slow_ranks(pipelines, x.strategy, factor)),
        jitter=sigma,
        pipelines=pipelines.lockstep.pipelines,
        delayed_pipelines=int((steps[0].ends_s > alone * (1 + 1e-9)).sum()),
    )


def _of_lengths(question: Question, line: str, seed: int) -> SimulatedStep:
    """Run steps with unequal sequences; undisturbed is the step whose micro-batches are all the mean one."""
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
        waits=tuple(Wait(_WHERE[where], s, s / lost if lost else 0.0) for where, s in gpu_s.items()),
        slow=(),
        jitter=0.0,
        pipelines=int(steps.pipeline.max()) + 1,
        delayed_pipelines=0,
        lengths=UnevenLengths(line, step, (step,), steps.cut_share),
    )


_WHERE = {
    "turns_s": "micro-batches of one pipeline that take unequally long",
    "own_s": "slow ranks themselves",
    "inside_s": "inside layers: tp, cp, ep, shards",
    "stages_s": "other stages of the pipeline",
    "replicas_s": "other pipelines, before gradients are reduced",
    "update_s": "the slowest update",
}


def _waits(steps: list[DelayedStep], lost: float) -> list[Wait]:
    sums = {
        where: float(np.mean([getattr(s, name) for s in steps]))
        for name, where in _WHERE.items()
        if name != "turns_s"
    }
    rounding = 1e-9 * (abs(lost) + steps[0].undisturbed_s)
    sums = {where: seconds if abs(seconds) > rounding else 0.0 for where, seconds in sums.items()}
    return [Wait(where, seconds, seconds / lost if lost else 0.0) for where, seconds in sums.items()]


def _slow_ranks(pipelines: PricedPipelines, s: Strategy, factor: Floats) -> list[SlowRank]:
    at, of = pipelines.lockstep, mesh(s)
    return [
        SlowRank(
            rank,
            float(factor[rank]),
            of.coordinates(rank),
            int(((at.pipeline == at.pipeline[rank]) & (at.stage == at.stage[rank])).sum()),
        )
        for rank in np.flatnonzero(factor != 1)[:16].tolist()
    ]


def _factors(slow: str, world: int, node: int) -> Floats:
    """Return how much longer each rank takes, (world,). Raises InputError."""
    factor = np.ones(world)
    for word in filter(None, (part.strip() for part in slow.split(","))):
        match = _SLOW.fullmatch(word)
        if match is None or not 0 < (by := float(match[3])) < 1000:
            raise InputError("slow", word, "is no rank and factor", "use rank=37:1.3 or node=4:1.1")
        first, count = (int(match[2]) * node, node) if match[1] == "node" else (int(match[2]), 1)
        if first >= world:
            most = f"0 to {-(-world // node) - 1 if match[1] == 'node' else world - 1}"
            raise InputError("slow", word, f"is outside of the {world} ranks of the strategy", f"use {most}")
        factor[first : first + count] = by
    return factor


def _share(text: str | float) -> float:
    """Read a share such as `2%` or 0.02. Raises InputError."""
    word = str(text).strip()
    try:
        value = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise InputError("jitter", text, "is no share of a rank's time", "use 2% or 0.02")
    return value
