"""The price of an observed program on a cluster: its events, priced one by one.

compute        FLOPs of products and attention at the rate of the chip's long bf16 products; other kernels are not
               counted, so this is a lower bound
communication  each collective alone (cost/collectives/nccl_model.py), with its group's own ranks on the links
step           at least the longer of the two (all hidden), at most their sum (nothing hidden): streams decide what
               overlaps, and a recording without times does not show them
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.collectives.nccl_model import collective_s, message_s
from phalanx.cost.hardware.system import System
from phalanx.schedule.observation import Observation, Observed, RankObservation
from phalanx.schedule.observation_file import from_json
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.documents import read_text, require_shallow
from phalanx.spec.errors import InputError

_ALIKE = {"broadcast": "all_gather", "reduce": "reduce_scatter", "gather": "all_gather", "scatter": "reduce_scatter"}
"""Collectives priced as others that send equally many bytes over a ring."""


@dataclass(frozen=True)
class ObservedFlow:
    """A group of equal collectives or messages: their number, bytes of each, the links that they span, and total
    seconds."""

    op: str
    axis: str
    ranks: int
    dtype: str
    links: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PricedRank:
    """An observed rank's step on a cluster. `usable`: bytes of device memory available to a program."""

    rank: RankObservation
    flops: int
    compute_s: float
    flows: tuple[ObservedFlow, ...]
    usable: float

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives, one after the other."""
        return sum(f.seconds for f in self.flows)

    @property
    def fits(self) -> bool:
        """Whether the peak of live bytes fits in the device's memory."""
        return self.rank.peak <= self.usable


def read(path: Path) -> Observation | None:
    """Read an observation from a file; None if the file is something else. Raises InputError for a damaged one."""
    try:
        text = read_text(path, "observation")
        if '"observation"' not in text:
            return None
        content = require_shallow(json.loads(text))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("kind") != "observation":
        return None
    return from_json(text, str(path))


def priced(o: Observation, cluster: ClusterSpec) -> tuple[PricedRank, ...]:
    """Price every observed rank on a cluster. Raises InputError if it has fewer ranks than the program."""
    if cluster.ranks < o.world:
        raise InputError("cluster", cluster.name, f"has {cluster.ranks} ranks, the program {o.world}")
    system = system_of(cluster)
    rate = float(np.asarray(system.peak_bf16 * system.gemm))
    result = []
    for r in o.ranks:
        flops = sum(r.flops.values())
        result.append(
            PricedRank(
                r, flops, flops / rate, tuple(_flows(r, cluster, system)), float(np.asarray(system.memory_bytes))
            )
        )
    return tuple(result)


def _flows(r: RankObservation, cluster: ClusterSpec, system: System) -> list[ObservedFlow]:
    counts: Counter[tuple[str, str, tuple[int, ...], str, int]] = Counter()
    for o in r.communication:
        e = o.event
        counts[e.op, e.axis, _ends(o, r.rank), e.dtype, e.bytes] += 1
    result = []
    for (op, axis, ranks, dtype, n), count in counts.items():
        stride = abs(ranks[1] - ranks[0]) if len(ranks) > 1 else 1
        if op in ("send", "recv"):
            seconds = message_s(n, stride, system) if op == "send" else 0.0
        else:
            seconds = collective_s(_ALIKE.get(op, op), n, len(ranks), stride, system)
        each = float(np.asarray(seconds))
        result.append(ObservedFlow(op, axis, len(ranks), dtype, _links(ranks, cluster), count, n, count * each))
    return result


def _ends(o: Observed, rank: int) -> tuple[int, ...]:
    return tuple(sorted((rank, o.event.peer))) if o.event.peer is not None else o.ranks


def _links(ranks: tuple[int, ...], cluster: ClusterSpec) -> str:
    """Name the innermost tier of links with a block that contains all ranks of a group."""
    for tier in cluster.tiers:
        if len({r // tier.ranks for r in ranks}) == 1:
            return tier.name
    return cluster.tiers[-1].name
