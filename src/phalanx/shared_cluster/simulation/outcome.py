"""The figures of a simulated policy, as distributions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.shared_cluster.simulation.history import JobHistory

QUANTILES = (0.5, 0.9, 0.99, 1.0)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Distribution:
    """Mean, and the quantiles of QUANTILES."""

    mean: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class PolicyOutcome:
    """The figures of one simulation; times in seconds, losses in GPU-seconds."""

    policy: str
    jobs: int
    queue: Distribution
    """Seconds of waiting after submission."""
    completion: Distribution
    """Seconds from submission to end."""
    makespan: float
    gpu_use: float
    """Share of all GPU time until the makespan in which GPUs were held."""
    fragmented: float
    """GPU-seconds during which the first waiting job had enough free GPUs, but not in the shape that it needs."""
    placement: float
    """GPU-seconds that jobs took longer than on their best placement."""
    preemptions: int
    resizes: int
    """How often running jobs changed their width."""
    tokens_per_s: float
    """Tokens per second over the makespan, of jobs with a plan."""


def outcome(history: JobHistory) -> PolicyOutcome:
    """Return the figures of a simulation."""
    jobs = history.jobs
    submit = np.array([job.submit for job in jobs])
    used = sum((run.end - run.start) * sum(bits.bit_count() for _, bits in run.gpus) for run in history.runs)
    span = max(history.makespan, 1e-9)
    return PolicyOutcome(
        policy=history.policy.title,
        jobs=len(jobs),
        queue=_distribution(np.array(history.waited)),
        completion=_distribution(np.array(history.finish) - submit),
        makespan=history.makespan,
        gpu_use=used / (span * history.nodes.capacity),
        fragmented=history.fragmented,
        placement=history.placement,
        preemptions=sum(history.preempted),
        resizes=sum(history.resized),
        tokens_per_s=sum(job.tokens for job in jobs) / span,
    )


def _distribution(values: Floats) -> Distribution:
    return Distribution(float(values.mean()), tuple(float(q) for q in np.quantile(values, QUANTILES)))


def use_over_time(history: JobHistory, columns: int) -> Floats:
    """Return the share of each node's GPUs that were held, (nodes, columns), over equal parts of the makespan."""
    nodes, step = history.nodes, max(history.makespan, 1e-9) / columns
    rate = np.zeros((len(nodes.sizes), columns + 1))
    first = np.zeros((len(nodes.sizes), columns + 1))
    # A run adds its GPUs to all columns between its ends, and parts of them to the columns that its ends are in.
    for run in history.runs:
        a, b = run.start / step, run.end / step
        i, j = min(int(a), columns), min(int(b), columns)
        for node, bits in run.gpus:
            gpus = bits.bit_count()
            rate[node, i] += gpus
            rate[node, j] -= gpus
            first[node, i] -= gpus * (a - i)
            first[node, j] += gpus * (b - j)
    held = np.cumsum(rate, axis=1) + first
    return np.asarray(held[:, :columns] / np.array(nodes.sizes)[:, None])
