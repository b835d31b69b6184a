"""A picture of replicas that step alone: the step over the rate of the slowest link, and the rate from which the
hierarchical step is as short."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import sqrt

import numpy as np

from phalanx.cost.analytic.estimate import estimate
from phalanx.planning.lookup import cluster_named, model_named
from phalanx.report.pictures.figure import Lines, Mark, Picture, PlotAxis, Series
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.job import Job, Precision

_GBIT = 1e9 / 8
_LOWEST, _HIGHEST = 1.0, 10_000.0
"""Rates that are drawn, in Gbit/s."""
_WAYS = (
    ("hierarchical: shards inside, sums across", ""),
    ("the same in int4", ",compression=int4"),
    ("local=4", ",local=4"),
    ("local=16", ",local=16"),
    ("local=16 in int4", ",local=16,compression=int4"),
    ("local=64", ",local=64"),
)


def slowest_link(cluster: ClusterSpec, gbit_per_s: float) -> ClusterSpec:
    """Return a cluster with this rate out of each group that its outermost tier of links joins."""
    tier, rate = cluster.tiers[-1], gbit_per_s * _GBIT
    each = min(rate, cluster.tiers[-2].bandwidth_bytes_per_s_per_gpu_per_direction)
    tier = replace(
        tier, bandwidth_bytes_per_s_per_gpu_per_direction=each, uplink_bandwidth_bytes_per_s_per_direction=rate
    )
    return replace(cluster, tiers=(*cluster.tiers[:-1], tier))


def break_even(step: Callable[[float], float], plain: Callable[[float], float]) -> float | None:
    """Return the rate in Gbit/s below which `step` is shorter than `plain`, both functions of it; None if it is
    shorter at no rate or at all."""
    low, high = _LOWEST, _HIGHEST
    if step(low) >= plain(low) or step(high) < plain(high):
        return None
    while high > 1.01 * low:
        middle = sqrt(low * high)
        low, high = (middle, high) if step(middle) < plain(middle) else (low, middle)
    return sqrt(low * high)


def local_steps(
    model: str = "llama3-8b", cluster: str = "sites-h100", gpus: int = 256, batch: int = 512, seq: int = 8192
) -> Picture:
    """Draw the step of plain, compressed and rarely synchronised data parallelism over the rate between groups."""
    spec, whole_cluster = model_named(model)[0], cluster_named(cluster)(gpus)
    group = whole_cluster.tiers[-2].ranks if len(whole_cluster.tiers) > 1 else gpus
    if gpus <= group or gpus % group:
        least = max(2, gpus // group) * group
        reason = f"is not several groups of the {group} that {cluster} joins last"
        raise InputError("gpus", gpus, reason, f"use {least:,}")
    job = Job(batch, seq, Precision("bfloat16"))

    def step(line: str) -> Callable[[float], float]:
        s = make_strategy(line)
        assert s is not None
        return cache(lambda rate: float(estimate(spec, slowest_link(whole_cluster, rate), job, s, "phalanx").seconds))

    flat = f"dp={gpus},zero=3"
    steps = {"plain: shards over all": step(flat)} | {name: step(f"{flat},shard={group}{how}") for name, how in _WAYS}
    rates = [float(rate) for rate in np.geomspace(_LOWEST, _HIGHEST, 17)]
    plain = steps[_WAYS[0][0]]
    curves, marks, crossings = [], [], []
    for i, (name, seconds) in enumerate(steps.items()):
        curves.append(Series(name, [(rate, seconds(rate)) for rate in rates], colour=i))
        even = break_even(seconds, plain) if i > 1 else None
        if even is not None:
            marks.append(Mark(even, seconds(even), "", i))
            crossings.append(f"{name} {float(f'{even:.2g}'):,.0f}")
    tier = whole_cluster.tiers[-1].name
    panel = Lines(
        PlotAxis(f"{tier}: Gbit/s out of each group of {group} GPUs", "count", log=True, low=_LOWEST, high=_HIGHEST),
        PlotAxis("seconds of a step", "s", log=True),
        tuple(curves),
        tuple(marks),
        height=340,
    )
    return Picture(
        f"Replicas that step alone: {model}, {gpus} GPUs of {cluster}, {batch} x {seq:,} tokens",
        (panel,),
        f"`phalanx predict --stack phalanx --strategy {flat},shard={group},local=H`, at each rate",
        f"Points: the hierarchical step is as short from here on: {'; '.join(crossings) or 'none'} Gbit/s. With "
        "faster links the others take longer, or cost learning for nothing. No price says how much they cost of it.",
    )
