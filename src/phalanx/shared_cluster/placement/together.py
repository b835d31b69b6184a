"""The placement of several jobs on the same free GPUs, with the least loss and as few shared uplinks as possible.

It is a beam search: jobs are placed one after the other, the largest first. Each is tried on all remaining GPUs, and
for every tier on the fewest blocks (hosts, leaf switches) that hold it, the tightest first; the best few answers are
continued. At the end every job is priced with the GPUs of all others in use. Answers are ranked by the sum of the
jobs' steps over their steps on the empty cluster, then by uplinks that several jobs cross, then by blocks in use.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.shared_cluster.placement.answer import PlaceAnswer
from phalanx.shared_cluster.placement.free_gpus import FreeGpus
from phalanx.shared_cluster.placement.price import PlacedJob
from phalanx.shared_cluster.placement.search import Carvings, Placed, place
from phalanx.spec.cluster.topology import Ints, Topology
from phalanx.spec.errors import InputError

MOST_JOBS = 16
"""The most jobs that are placed at once."""
_BEAM, _SPARE = 6, 4
"""Answers that are continued, and alternatives of a tier, by spare GPUs, on which a job is tried."""


@dataclass(frozen=True)
class SharedUplink:
    """A block of hosts whose uplink several jobs use; `jobs`: their places in the order of the plans."""

    hosts: tuple[str, ...]
    jobs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class JobsPlaced:
    """Several plans placed on free GPUs at once, in the order in which they were named."""

    answers: tuple[PlaceAnswer, ...]
    shared: tuple[SharedUplink, ...]
    tried: int
    """Placements of single jobs that were priced."""


def placed_together(jobs: Sequence[PlacedJob], free: FreeGpus) -> JobsPlaced:
    """Place several jobs on free GPUs. Raises InputError for jobs of different clusters, and for more ranks than free
    GPUs."""
    require_alike(jobs)
    world = sum(job.strategy.world for job in jobs)
    free.require(world, f"{len(jobs)} jobs have {world} ranks", "place fewer of them")
    local = [replace(job, cluster=free.cluster) for job in jobs]
    t = free.topology
    empty = [place(job, t, np.arange(t.gpus)) for job in local]
    others = np.setdiff1d(np.arange(t.gpus), free.free)
    deal = _Deal(local, empty, t, others)
    order = sorted(range(len(local)), key=lambda i: -local[i].strategy.world)
    dealt: list[dict[int, Placed]] = [{}]
    for i in order:
        more = [{**some, i: own} for some in dealt for own in deal.tries(i, some, free.free)]
        dealt = sorted(more, key=deal.score)[:_BEAM]
    best = min((deal.repriced(some) for some in dealt), key=deal.score)
    answers = [PlaceAnswer(local[i], free, best[i], empty[i], ()) for i in range(len(local))]
    return JobsPlaced(tuple(answers), tuple(deal.shared(best)), deal.tried)


def require_alike(jobs: Sequence[PlacedJob]) -> None:
    """Require that jobs can be on one cluster: few enough, and planned for nodes of one kind. Raises InputError."""
    if len(jobs) > MOST_JOBS:
        raise InputError(
            "plan", len(jobs), f"plans are more than are placed at once, {MOST_JOBS}", "place some of them"
        )
    kinds = {(job.cluster.device.name, job.cluster.ranks_per_node) for job in jobs}
    if len(kinds) > 1:
        said = " and ".join(f"{gpus} x {name}" for name, gpus in sorted(kinds))
        raise InputError("plan", None, f"plans are of unlike nodes: {said}", "place the jobs of one kind at once")


class _Deal:
    """The jobs to place, with the facts and caches that all answers share."""

    def __init__(self, jobs: Sequence[PlacedJob], empty: Sequence[Placed], t: Topology, busy: Ints) -> None:
        self.jobs, self.empty, self.topology, self.busy = jobs, empty, t, busy
        self.tried = 0
        self._carvings: dict[int, Carvings] = {}
        self._known: dict[tuple[int, bytes, bytes], Placed] = {}

    def tries(self, i: int, some: Mapping[int, Placed], free: Ints) -> Iterator[Placed]:
        """Yield placements of job `i`, given the placements of `some` other jobs."""
        taken = [own.placement.gpu for own in some.values()]
        busy = np.concatenate([self.busy, *taken])
        for domain in _domains(self.topology, np.setdiff1d(free, busy), self.jobs[i].strategy.world):
            key = (i, domain.tobytes(), np.sort(busy).tobytes())
            if key not in self._known:
                self._known[key] = place(self.jobs[i], self.topology, domain, busy, self._carvings.setdefault(i, {}))
                self.tried += self._known[key].tried
            yield self._known[key]

    def repriced(self, some: Mapping[int, Placed]) -> dict[int, Placed]:
        """Return the same placements, each with the GPUs of all others in use."""
        gpus = {i: own.placement.gpu for i, own in some.items()}
        result = {}
        for i, own in some.items():
            busy = np.concatenate([self.busy, *(other for j, other in gpus.items() if j != i)])
            seconds = float(self.jobs[i].seconds(self.topology, gpus[i][None], busy)[0])
            result[i] = replace(own, seconds=seconds, bound_s=min(own.bound_s, seconds))
        return result

    def score(self, some: Mapping[int, Placed]) -> tuple[float, int, int]:
        """Return (sum of the jobs' steps over those on the empty cluster, shared uplinks, blocks in use)."""
        slower = sum(placed.seconds / self.empty[i].seconds for i, placed in some.items())
        rows, gpus = self.topology.blocks[:-1], [placed.placement.gpu for placed in some.values()]
        blocks = sum(len(np.unique(row[of_job])) for of_job in gpus for row in rows)
        return round(slower, 4), sum(len(uplink.jobs) - 1 for uplink in self.shared(some)), blocks

    def shared(self, some: Mapping[int, Placed]) -> Iterator[SharedUplink]:
        """Yield the blocks of hosts whose uplink several jobs use, from the innermost tier outwards."""
        t = self.topology
        for row in t.blocks[:-1]:
            across: dict[int, list[int]] = {}
            for i, own in some.items():
                blocks = np.unique(row[own.placement.gpu]).tolist()
                for block in blocks if len(blocks) > 1 else ():
                    across.setdefault(block, []).append(i)
            for block, jobs in across.items():
                hosts = [t.hosts[h] for h in np.unique(t.host[row == block]).tolist()]
                if len(jobs) > 1:
                    yield SharedUplink(tuple(hosts), tuple(sorted(jobs)))


def _domains(topology: Topology, free: Ints, world: int) -> Iterator[Ints]:
    """Yield the parts of the free GPUs on which a job of `world` ranks is tried: all, and for each tier the fewest
    blocks that hold it, those with the fewest spare GPUs first."""
    if len(free) < world:
        return
    yielded = {free.tobytes()}
    yield free
    for row in topology.blocks[:-1]:
        blocks, rooms = np.unique(row[free], return_counts=True)
        by_room = np.argsort(-rooms, kind="stable")
        fewest = int(np.searchsorted(np.cumsum(rooms[by_room]), world)) + 1
        for skipped in range(min(_SPARE, len(blocks) - fewest + 1)):
            full = by_room[skipped : skipped + fewest - 1]
            lacking = world - int(rooms[full].sum())
            last = [b for b in by_room[::-1] if rooms[b] >= lacking and b not in full]
            for each in _unlike(last, rooms)[: _SPARE if fewest == 1 else 1]:
                domain = free[np.isin(row[free], blocks[[*full, each]])]
                if domain.tobytes() not in yielded:
                    yielded.add(domain.tobytes())
                    yield domain


def _unlike(order: Sequence[int], rooms: Ints) -> list[int]:
    """Return the first block of each number of free GPUs."""
    return list({int(rooms[b]): int(b) for b in reversed(order)}.values())[::-1]
