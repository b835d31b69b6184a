"""Views of a placement: its price and bound, the price on an empty cluster, and other strategies on the same GPUs."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from phalanx.report.style import count_words, seconds, table
from phalanx.shared_cluster.placement.alternatives import PlacedAlternative, gains
from phalanx.shared_cluster.placement.price import PlacedJob
from phalanx.shared_cluster.placement.search import Placed
from phalanx.shared_cluster.placement.together import JobsPlaced
from phalanx.shared_cluster.topology.hostlist import compress

_SHOWN = 5
"""Number of other strategies in the table."""


def lines(job: PlacedJob, placed: Placed, empty: Placed) -> Iterator[str]:
    """Yield lines on the price of a placement, its gap to the bound, and the price on an empty cluster."""
    p = placed.placement
    hosts = len(list(p.ranks_by_host()))
    tokens = job.job.global_batch * job.job.seq / placed.seconds
    yield (
        f"{p.strategy}: {count_words(p.world, 'rank')} on {count_words(hosts, 'node')} of {p.cluster.name}; "
        f"{seconds(placed.seconds)} a step, {tokens:,.0f} tokens/s under {job.stack}"
    )
    if placed.exact:
        yield f"no placement on these GPUs is faster: all {placed.tried:,} were priced"
    elif placed.gap < 5e-4:
        yield f"no placement on these GPUs is faster: it reaches the bound ({placed.tried:,} were priced)"
    else:
        yield (
            f"best of {placed.tried:,} placements; no placement takes less than {seconds(placed.bound_s)}, "
            f"so a better one gains at most {1 - placed.bound_s / placed.seconds:.1%}"
        )
    ratio = placed.seconds / empty.seconds
    if ratio < 1.0005:
        yield "as fast as on this cluster with every GPU free"
    else:
        yield (
            f"with every GPU of this cluster free: {seconds(empty.seconds)}; "
            f"the shape of what is free costs {1 - 1 / ratio:.1%} of the tokens"
        )


def better(job: PlacedJob, placed: Placed, alternatives: Sequence[PlacedAlternative]) -> str:
    """Return a line on the fastest strategy on the same GPUs, with its gain and cause, or that there is none."""
    best = alternatives[0]
    gain = placed.seconds / best.placed.seconds - 1
    if gain < 5e-4:
        return "of the strategies that the search has for these GPUs none is faster than the plan's"
    tokens = job.job.global_batch * job.job.seq / best.placed.seconds
    also = [str(best.job.options)] if best.job.options != job.options else []
    why = "; ".join([*also, *gains(placed, best.placed)])
    return (
        f"better on these GPUs: {best.job.strategy}: {seconds(best.placed.seconds)} a step, "
        f"{tokens:,.0f} tokens/s, {gain:+.1%}{f' ({why})' if why else ''}"
    )


def alternatives_table(placed: Placed, alternatives: Sequence[PlacedAlternative]) -> Table:
    """Tabulate strategies placed on the same GPUs, the fastest first, compared with the plan's."""
    columns = ("strategy", "step", "against the plan", "bound")
    grid = table("strategies for these GPUs", *columns, left=("strategy",))
    for other in alternatives[:_SHOWN]:
        gain = other.placed.seconds / placed.seconds - 1
        name = str(other.placed.placement.strategy)
        bound = "exact" if other.placed.exact else seconds(other.placed.bound_s)
        grid.add_row(name, seconds(other.placed.seconds), f"{gain:+.1%}", bound)
    return grid


def jobs_table(names: Sequence[str], t: JobsPlaced) -> Table:
    """Tabulate jobs that are placed at once: nodes, step, and how much longer than on the empty cluster."""
    grid = table("", "job", "ranks", "nodes", "step", "of an empty cluster", left=("job", "nodes"))
    for name, a in zip(names, t.answers, strict=True):
        p = a.placed.placement
        hosts = compress(p.topology.hosts[int(h)] for h in sorted({int(h) for h in p.topology.host[p.gpu]}))
        ratio = a.placed.seconds / a.empty.seconds
        grid.add_row(name, f"{p.world:,}", hosts, seconds(a.placed.seconds), f"{ratio:.3f} times")
    return grid


def shares(names: Sequence[str], t: JobsPlaced) -> Iterator[str]:
    """Yield which uplinks several jobs share, in words."""
    for each in t.shared:
        jobs = " and ".join(f"{names[i]} (job {i + 1})" for i in each.jobs)
        yield f"{jobs} share the way out of {compress(each.hosts)}"
    if not t.shared:
        yield "no two jobs share an uplink"
    yield f"best of {t.tried:,} placements; phalanx simulate prices what jobs cost each other as they run"
