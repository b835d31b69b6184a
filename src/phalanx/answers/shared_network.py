"""A step on links that other jobs use too: the GPUs of each job in one cluster, and each job's slowdown."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from phalanx.answers.disturbances import ranks_in
from phalanx.answers.question.query import Query
from phalanx.answers.question.question import Question
from phalanx.answers.question.resolution import read
from phalanx.planning.stragglers.links import SlowLink, sending_groups
from phalanx.planning.stragglers.own import own_pipelines
from phalanx.planning.stragglers.priced import priced_pipelines
from phalanx.planning.stragglers.shared_links import (
    SecondsOfStep,
    SharedNetwork,
    StepsTogether,
    shared_step,
    shared_tiers,
)
from phalanx.spec.cluster.part import ranges, subcluster
from phalanx.spec.cluster.presets import PRESETS, resized
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.ranges import require_seed
from phalanx.spec.strategy.mesh import Ranks
from phalanx.spec.strategy.spec import Strategy

_DRAWS, _STEPS = 16, 32
_MOST_JOBS = 6
"""The most jobs: every subset of them that may send at once is computed."""
_PLACED = re.compile(r"(.+)@([\d,\s-]+)")


@dataclass(frozen=True)
class JobOnLinks:
    """A job on a network that others use too."""

    about: str
    gpus: str
    """Numbers of its GPUs in the cluster, in the order of its ranks."""
    strategy: Strategy
    alone_s: float
    """Its step on these GPUs, without the other jobs."""
    step_s: float
    """Its step with them: the mean over drawn starts."""
    step_low_s: float
    """The same from the best of these starts."""
    step_high_s: float
    """The same from the worst."""
    slowdown: float
    sending_share: float
    """Share of its step alone in which it sends over shared links."""
    kept_share: float
    """Share of its rate alone that it keeps while it sends."""


@dataclass(frozen=True)
class LinksInUse:
    """Jobs that share links, the question's own first."""

    tiers: tuple[str, ...]
    """Tiers of links on which a job gets less than its rate if all send at once."""
    starts: int
    """Number of drawn starts."""
    jobs: tuple[JobOnLinks, ...]


@dataclass(frozen=True)
class OnSharedLinks:
    """The question's job among others."""

    links: LinksInUse
    by_phase: tuple[tuple[str, float], ...]
    """(phase, seconds by which it takes longer in a step)."""


def on_shared_links(question: Question, on: str, neighbours: Sequence[str], seed: int) -> OnSharedLinks:
    """Run a question's step on GPUs `on` of its cluster, such as 0-7,16-23, with other jobs on its links.

    `neighbours`: their files with their GPUs, such as plan.json@8-15. Without numbers a job gets the next GPUs in
    order. Raises InputError."""
    require_seed(seed)
    if len(neighbours) >= _MOST_JOBS:
        reason = f"are {len(neighbours)} other jobs on one network"
        raise InputError("neighbour", " ".join(neighbours), reason, f"name at most {_MOST_JOBS - 1}")
    files = [_file_and_gpus(word) for word in neighbours]
    named = [_numbers("on", on), *(_numbers("neighbour", gpus) for _, gpus in files)]
    taken = {gpu for gpus in named if gpus for gpu in gpus}
    questions = [question, *(_neighbour(file, question) for file, _ in files)]
    strategies = [_strategy(q) for q in questions]
    placed = [gpus or _next(s.world, taken) for gpus, s in zip(named, strategies, strict=True)]
    for s, gpus, word in zip(strategies, placed, ("on", *("neighbour" for _ in files)), strict=True):
        if len(gpus) != s.world:
            raise InputError(word, ranges(gpus), f"are {len(gpus)} GPUs", f"{s} has {s.world} ranks: name as many")
    if double := {g for gpus in placed for g in gpus if sum(g in other for other in placed) > 1}:
        raise InputError("neighbour", ranges(sorted(double)), "are GPUs of two jobs", "give each its own")
    cluster = _holding(question, max(max(gpus) for gpus in placed) + 1)
    parts = [subcluster(cluster, gpus) for gpus in placed]
    rows = [np.array(gpus, dtype=np.int64) for gpus in placed]
    groups = [sending_groups(s) for s in strategies]
    every = [[row[g] for g in of.layers + of.messages + of.gradients] for of, row in zip(groups, rows, strict=True)]
    tiers = shared_tiers(cluster, every)
    prices = [
        _price(q, p, _crossed_tiers(cluster, tiers, r, p)) for q, p, r in zip(questions, parts, rows, strict=True)
    ]
    jobs = [shared_step(price, of, row) for price, of, row in zip(prices, groups, rows, strict=True)]
    starts = np.random.default_rng(seed).random((_DRAWS, len(jobs)))
    together = SharedNetwork(cluster, jobs).run(starts, _STEPS)
    links = LinksInUse(
        tiers=tuple(cluster.tiers[i].name for i in tiers),
        starts=_DRAWS,
        jobs=tuple(
            JobOnLinks(
                about=q.about,
                gpus=ranges(gpus),
                strategy=s,
                alone_s=job.alone_s,
                sending_share=sum(p.sends(1.0) * p.at(1.0) for p in job.phases) / job.alone_s,
                **_steps(together, i, job.alone_s),
            )
            for i, (q, gpus, s, job) in enumerate(zip(questions, placed, strategies, jobs, strict=True))
        ),
    )
    longer = zip(jobs[0].phases, together.by_phase_s[0], strict=True)
    return OnSharedLinks(links, tuple((phase.name, float(s) - phase.at(1.0)) for phase, s in longer))


def _steps(together: StepsTogether, job: int, alone_s: float) -> dict[str, float]:
    seconds = together.mean_s[:, job]
    return {
        "step_s": float(seconds.mean()),
        "step_low_s": float(seconds.min()),
        "step_high_s": float(seconds.max()),
        "slowdown": float(seconds.mean()) / alone_s,
        "kept_share": float(together.kept[job]),
    }


def _file_and_gpus(word: str) -> tuple[Path, str]:
    match = _PLACED.fullmatch(word.strip())
    return (Path(match[1]), match[2]) if match else (Path(word.strip()), "")


def _numbers(field: str, line: str) -> tuple[int, ...]:
    return ranks_in(line, 10**7, field, "GPUs") if line.strip() else ()


def _next(count: int, taken: set[int]) -> tuple[int, ...]:
    """Return the first `count` GPUs that are not in `taken`, and add them to it."""
    gpus = tuple(itertools.islice((number for number in itertools.count() if number not in taken), count))
    taken.update(gpus)
    return gpus


def _neighbour(file: Path, question: Question) -> Question:
    from phalanx.answers.question.read import is_configuration

    cluster = _holding(question, 1)
    if is_configuration(file):
        return read(Query(source=file, cluster=cluster))
    job = read(Query(source=file))
    device = (job.exact.cluster if job.exact else job.pricing.cluster).device.name
    if device != cluster.device.name:
        reason = f"was planned for {device}, and {cluster.name} has {cluster.device.name}"
        raise InputError("neighbour", str(file), reason, "plan it for the cluster that both are on")
    return job


def _strategy(question: Question) -> Strategy:
    s = question.strategy
    assert s is not None
    if s.local:
        reason = "has replicas that step alone, which are not simulated yet"
        raise InputError("strategy.local", s.local, reason, "leave it out")
    return s


def _holding(question: Question, gpus: int) -> ClusterSpec:
    """Return the question's cluster with at least `gpus` GPUs. Raises InputError if it has fewer."""
    cluster = question.exact.cluster if question.exact else question.pricing_on(max(gpus, question.gpus)).cluster
    if cluster.ranks < gpus and cluster.name in PRESETS:
        return resized(cluster, -(-gpus // cluster.ranks_per_node))
    if cluster.ranks < gpus:
        reason = f"are wanted, and {cluster.name} has {cluster.ranks}"
        raise InputError("gpus", gpus, reason, "name a cluster that holds all jobs")
    return cluster


def _crossed_tiers(cluster: ClusterSpec, tiers: Sequence[int], gpus: Ranks, part: ClusterSpec) -> tuple[int, ...]:
    """Return the tiers of a job's part of the cluster whose traffic crosses shared links: those outside the blocks
    below the innermost shared tier."""
    if not tiers:
        return ()
    below = cluster.tiers[tiers[0] - 1].ranks if tiers[0] else 1
    inside = len(gpus) // len(np.unique(gpus // below))
    return tuple(i for i, tier in enumerate(part.tiers) if tier.ranks > inside)


def _price(question: Question, part: ClusterSpec, tiers: Sequence[int]) -> Callable[[float], SecondsOfStep]:
    """Return a function from a share of the links to the seconds of a job's step on its part of the cluster."""
    s, exact = _strategy(question), question.exact

    def seconds(share: float) -> SecondsOfStep:
        slow = tuple(SlowLink("tier", i, share) for i in tiers) if share < 1 else ()
        if exact:
            x = own_pipelines(exact.model, part, exact.job, s, slow)
        else:
            x = priced_pipelines(replace(question.subject.pricing, cluster=part), s, slow)
        step = x.delayed(np.ones(s.world))
        passes = float(step.ends_s.max())
        return SecondsOfStep(passes, step.step_s - passes - x.update_s, x.update_s)

    return seconds
