"""Choice of transport and algorithm for each collective: the fastest measured one, size by size."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from phalanx.cost.collectives.critical_path import Path, costs
from phalanx.schedule.collectives.algorithm_file import algorithm_file
from phalanx.schedule.collectives.registry import build
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit
from phalanx.spec.errors import InputError
from phalanx.spec.job import Transport, is_algorithm_file

_SIZES = tuple(2**k for k in range(10, 31))
_FORCED = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "all_to_all": "pairwise"}
_CLEARLY = 0.95  # switch only below this share of the time, so that noise does not flip neighbouring sizes


def cluster_for_transport(cluster: ClusterSpec, transport: str) -> ClusterSpec:
    """Return the cluster with the measurements of one transport alone; unchanged for `auto`. For an algorithm's file,
    its predicted times replace the measurements of its operation and number of ranks. Raises InputError."""
    if transport == "auto":
        return cluster
    if is_algorithm_file(transport):
        return _with_file(cluster, transport)
    return replace(cluster, collectives=tuple(f for f in cluster.collectives if f.transport == transport))


def _with_file(cluster: ClusterSpec, name: str) -> ClusterSpec:
    a, inside = algorithm_file(name), cluster.ranks_per_node
    if a.op not in _FORCED:
        raise InputError("train.transport", name, f"is for {a.op}, which no step issues", f"use {', '.join(_FORCED)}")
    if a.ranks > cluster.ranks or (a.ranks > inside and a.ranks % inside):
        reason = f"is for {a.ranks} ranks, and {cluster.name} has {cluster.nodes} x {inside}"
        raise InputError("train.transport", name, reason, "write one for a group of them")
    hosts = max(1, a.ranks // inside)
    path = Path(build(a.op, name, a.ranks, a.chunks), costs(cluster))
    points = tuple((size, path.seconds(size / a.chunks)) for size in _SIZES)
    slope = (points[-1][1] - points[0][1]) / (_SIZES[-1] - _SIZES[0])
    fit = CollectiveFit(a.op, a.ranks, path.seconds(0.0), slope, 0.0, "p2p", name, points, hosts)
    kind = (fit.op, fit.group_size, fit.hosts)
    others = tuple(f for f in cluster.collectives if (f.op, f.group_size, f.hosts) != kind)
    return replace(cluster, collectives=(*others, fit))


def decide(cluster: ClusterSpec, transport: str) -> tuple[Choice, ...]:
    """Choose transport and algorithm of every collective on a cluster. A transport other than `auto` runs them all;
    if unmeasured, with the algorithms that send the fewest bytes."""
    choices = choose(cluster_for_transport(cluster, transport).collectives)
    if choices or transport in ("auto", "native"):
        return choices
    names = {op: name if transport == "p2p" else "" for op, name in _FORCED.items()}
    return tuple(
        Choice(op, cluster.ranks_per_node, 0, cast(Transport, transport), name, "asked for")
        for op, name in names.items()
    )


def choose(fits: Iterable[CollectiveFit]) -> tuple[Choice, ...]:
    """Return the fastest transport and algorithm, with the reason, by operation, size and hosts of the group, and
    message size."""
    by_group: dict[tuple[str, int, int], list[CollectiveFit]] = {}
    for fit in fits:
        by_group.setdefault((fit.op, fit.group_size, fit.hosts), []).append(fit)
    return tuple(choice for group, group_fits in by_group.items() for choice in _ranges(*group, group_fits))


def _ranges(op: str, ranks: int, hosts: int, fits: Sequence[CollectiveFit]) -> Iterable[Choice]:
    previous: CollectiveFit | None = None
    for size in _SIZES:
        best = min(fits, key=lambda fit: float(fit.seconds(size)))
        if previous is not None and best.seconds(size) >= _CLEARLY * previous.seconds(size):
            continue
        start = 0 if previous is None else size
        yield Choice(op, ranks, start, best.transport, best.algorithm, _reason(best, fits, size), hosts)
        previous = best


def _reason(best: CollectiveFit, fits: Sequence[CollectiveFit], size: int) -> str:
    slower = [fit for fit in fits if fit is not best]
    text = f"{_time(best.seconds(size))} at {_bytes(size)}"
    if not slower:
        return f"{text}; nothing else was allowed or measured"
    runner_up = min(slower, key=lambda fit: float(fit.seconds(size)))
    return f"{text}; next {runner_up.way}, {_time(runner_up.seconds(size))}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _bytes(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"
