"""Choice of transport and algorithm for each collective: the fastest measured one, size by size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from phalanx.spec.cluster.collective_choice import Choice, Transport
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit

_SIZES = tuple(2**k for k in range(10, 31))
_FORCED = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "all_to_all": "pairwise"}
_CLEARLY = 0.95  # switch only below this share of the time, so that noise does not flip neighbouring sizes


def allowed(cluster: ClusterSpec, transport: Transport | Literal["auto"]) -> ClusterSpec:
    """Return the cluster with only one transport's measurements; with all of them for `auto`."""
    if transport == "auto":
        return cluster
    return replace(cluster, collectives=tuple(f for f in cluster.collectives if f.transport == transport))


def decide(cluster: ClusterSpec, transport: Transport | Literal["auto"]) -> tuple[Choice, ...]:
    """Choose transport and algorithm of every collective on a cluster.

    A transport other than `auto` runs every collective; if unmeasured, with the algorithms that send the fewest
    bytes."""
    choices = choose(allowed(cluster, transport).collectives)
    if choices or transport == "auto" or transport == "native":
        return choices
    names = {op: name if transport == "p2p" else "" for op, name in _FORCED.items()}
    return tuple(Choice(op, cluster.ranks_per_node, 0, transport, name, "asked for") for op, name in names.items())


def choose(fits: Iterable[CollectiveFit]) -> tuple[Choice, ...]:
    """Return the fastest transport and algorithm, and why, by operation, kind of group and message size."""
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
