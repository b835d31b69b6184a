"""The figures of simulated policies: their distributions side by side, and pictures of nodes over time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.table import Table

from phalanx.report.pictures.figure import Heat, Picture
from phalanx.report.style import table
from phalanx.shared_cluster.simulation.cluster_state import JobHistory

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
    """Number of times that running jobs changed their width."""
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


ROWS = 24
"""Lines of a simulation in the terminal."""
_COLUMNS = 400


def span(seconds: float) -> str:
    """Write a time of scheduling: 45 s, 12 min, 3.4 h, 2.1 d."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def tables(outcomes: Sequence[PolicyOutcome]) -> Iterator[Table]:
    """Yield the figures of policies side by side: times, then use and losses."""
    names = ("mean", "median", "90 %", "99 %", "most")
    for title, queue in (("queue time", True), ("completion time, from the submission", False)):
        grid = table(title, "policy", *names, left=("policy",))
        for o in outcomes:
            d = o.queue if queue else o.completion
            grid.add_row(o.policy, span(d.mean), *map(span, d.quantiles))
        yield grid
    resized = ("resized",) if any(o.resizes for o in outcomes) else ()
    losses = ("fragmented", "placement", "stopped", *resized, "tokens/s")
    grid = table("", "policy", "makespan", "GPU use", *losses, left=("policy",))
    grid.title = None
    for o in outcomes:
        lost = (_gpu_hours(o.fragmented), _gpu_hours(o.placement), f"{o.preemptions:,}")
        rate = f"{o.tokens_per_s:,.0f}" if o.tokens_per_s else ""
        changes = [f"{o.resizes:,}"] if resized else []
        grid.add_row(o.policy, span(o.makespan), f"{o.gpu_use:.1%}", *lost, *changes, rate)
    grid.caption = (
        "fragmented: GPUs free in number, not in the shape that the first waiting job needs; "
        "placement: what jobs took longer than placed best"
    )
    grid.caption_justify = "left"
    yield grid


def _gpu_hours(gpu_seconds: float) -> str:
    hours = gpu_seconds / 3600
    return f"{hours:,.0f} GPU-h" if hours >= 100 else f"{hours:.1f} GPU-h"


def picture(histories: Sequence[JobHistory], cluster: str) -> Picture:
    """Draw the share of GPUs held over time under each policy, a line for each node, or for some nodes together."""
    panels = []
    for history in histories:
        o = outcome(history)
        head = f"{o.policy}: {o.jobs:,} jobs, mean queue time {span(o.queue.mean)}, GPU use {o.gpu_use:.0%}"
        panels.append(use(history, _COLUMNS, 64, head))
    source = "the simulation of `phalanx cluster simulate`"
    return Picture(f"{cluster}: GPUs held, a line for each node", tuple(panels), source)


def use(history: JobHistory, columns: int, rows: int, head: str = "") -> Heat:
    """Return the share of GPUs held over time, in at most `rows` lines of `columns` times."""
    count = len(history.nodes.sizes)
    together = -(-count // rows)
    shares = use_over_time(history, columns)
    lines = []
    for start in range(0, count, together):
        last = min(start + together, count) - 1
        name = f"node {start}" if last == start else f"nodes {start}-{last}"
        lines.append((name, shares[start : last + 1].mean(axis=0).tolist()))
    return Heat(lines, f"0 to {span(history.makespan)}", head)
