"""The start of waiting jobs: in order, past jobs that cannot start, or behind a reservation.

EASY backfilling (Lifka 1995): the first waiting job has a reservation for the earliest time at which its GPUs are
free, by the planned ends of running jobs. Other jobs pass it if they end before then, or leave it enough GPUs.

Conservative backfilling (Mu'alem and Feitelson 2001): every job gets a reservation when it arrives, for the earliest
time at which it fits between all reservations, so no later job delays it. When a job ends before its limit, waiting
jobs are brought forward in their order.
"""

import heapq
from collections.abc import Iterator

from phalanx.shared_cluster.simulation import elastic, stopping
from phalanx.shared_cluster.simulation.cluster_state import END, RESERVED, Chosen, ClusterState
from phalanx.shared_cluster.simulation.events import handle
from phalanx.shared_cluster.simulation.policy import DEPTH, Key
from phalanx.shared_cluster.simulation.reservations import earliest
from phalanx.shared_cluster.simulation.trace import TraceJob


def start_if_able(cluster: ClusterState, number: int) -> bool:
    """Start a waiting job if it can start now; return whether it did."""
    gpus, speed = cluster.nodes.choose(cluster.jobs[number].gpus, cluster.policy.rule), 1.0
    if not gpus and cluster.policy.elastic and cluster.jobs[number].widths:
        gpus, speed = elastic.narrower(cluster, number)
    if not gpus and stopping.may_stop_any(cluster, number):
        gpus, speed = stopping.stop_for(cluster, number), 1.0
    if not gpus and cluster.shrinkable:
        gpus, speed = elastic.shrink_for(cluster, number)
    if not gpus:
        return False
    cluster.unwait(number)
    cluster.start(number, gpus, speed)
    return True


def in_order(cluster: ClusterState, passing: bool) -> None:
    """Start jobs in their order. Jobs pass one that cannot start only with `passing`, and if of another width."""
    for number in _first_waiting(cluster):
        if not start_if_able(cluster, number) and not passing:
            return


def _first_waiting(cluster: ClusterState) -> Iterator[int]:
    """Yield the first waiting job repeatedly, skipping widths whose first job did not start, unless elastic jobs of
    one width may differ."""
    closed: set[int] = set()
    while True:
        best: tuple[Key, int] | None = None
        for width, queue in cluster.waiting.items():
            if queue and width not in closed and (best is None or queue[0] < best):
                best = queue[0]
        if best is None:
            return
        yield best[1]
        width = cluster.jobs[best[1]].gpus
        queue = cluster.waiting[width]
        if queue and queue[0][1] == best[1]:
            closed.add(width)


def easy(cluster: ClusterState) -> None:
    """Start jobs in their order; reserve for the first that cannot start, and let others pass it."""
    while (head := cluster.first()) is not None and start_if_able(cluster, head):
        if head != cluster.reserved_for:  # it came before the job with the reservation, which must be made again
            cluster.reserved_for = -1
    if head is not None:
        _reserve(cluster, head)
        if cluster.nodes.count:
            _backfill(cluster, head)


def _reserve(cluster: ClusterState, head: int) -> None:
    if cluster.reserved_for != head:
        ends = ((time, cluster.running[n].gpus) for time, n in cluster.ends)
        gpus = cluster.jobs[head].gpus
        cluster.reservation = earliest(cluster.nodes, gpus, cluster.policy.rule == "scatter", ends)
        cluster.reserved_for = head
        cluster.history.promised[head] = cluster.reservation.time


def _backfill(cluster: ClusterState, head: int) -> None:
    """Start jobs behind the first if they end before its reservation or leave the reserved GPUs free."""
    reservation = cluster.reservation
    assert reservation is not None
    for width in sorted(cluster.waiting):
        queue, position, seen = cluster.waiting[width], 0, 0
        room = True  # whether jobs of this width may still find GPUs that are not reserved
        while position < len(queue) and seen < DEPTH:
            gpus = cluster.nodes.choose(width, cluster.policy.rule)
            if not gpus:
                break
            number = queue[position][1]
            job = cluster.jobs[number]
            seen += 1
            speed = cluster.speed(number, gpus)
            late = cluster.now + job.planned / speed > reservation.time
            if late and room and number != head:
                gpus = _alongside(cluster, job)
                room = bool(gpus)
            if number == head or (late and not room):
                position += 1
                continue
            if late:
                speed = cluster.speed(number, gpus)
                reservation.use(gpus)
            cluster.unwait(number)
            cluster.start(number, gpus, 1.0, speed)


def _alongside(cluster: ClusterState, job: TraceJob) -> Chosen:
    """Return nodes for a job that ends after the reservation."""
    reservation = cluster.reservation
    assert reservation is not None
    if reservation.anywhere is not None:
        enough = reservation.anywhere >= job.gpus
        return cluster.nodes.choose(job.gpus, cluster.policy.rule) if enough else []
    shape = cluster.nodes.shape(job.gpus)
    each = cluster.nodes.largest if shape.entire else shape.part
    return cluster.nodes.choose(job.gpus, cluster.policy.rule, lambda node: reservation.allows(node, each))


def promise(cluster: ClusterState, number: int) -> None:
    """Start a job now, or reserve the earliest time at which it fits between all reservations."""
    assert cluster.timelines is not None
    job = cluster.jobs[number]
    if not cluster.promises:
        chosen = cluster.nodes.choose(job.gpus, cluster.policy.rule)
        if chosen:
            _start_now(cluster, number, chosen)
            return
    start, chosen, planned = _find(cluster, number)
    if start <= cluster.now:
        _start_now(cluster, number, chosen)
    else:
        _reserve_for(cluster, number, start, chosen, start + planned)
        cluster.history.promised[number] = start


def _start_now(cluster: ClusterState, number: int, chosen: Chosen) -> None:
    cluster.start(number, chosen, 1.0)
    handle(cluster, END)  # a job that takes no time ends at once: in the timelines its GPUs are free already


def _find(cluster: ClusterState, number: int) -> tuple[float, Chosen, float]:
    """Return the earliest start of a job, its nodes, and the seconds that it is planned to take on them."""
    assert cluster.timelines is not None
    job, speed = cluster.jobs[number], 1.0
    while True:
        start, chosen = cluster.timelines.find(job.gpus, job.planned / speed, cluster.now)
        placed = cluster.speed(number, chosen)
        if placed >= speed:
            return start, chosen, job.planned / speed
        speed = placed


def _reserve_for(cluster: ClusterState, number: int, start: float, chosen: Chosen, end: float) -> None:
    assert cluster.timelines is not None
    cluster.timelines.change(chosen, start, end, -1)
    cluster.promises[number] = (start, chosen, end)
    state = cluster.active[number]
    state.version += 1
    heapq.heappush(cluster.events, (start, RESERVED, number, state.version))


def bring_forward(cluster: ClusterState) -> None:
    """Give waiting jobs, in their order, an earlier start where an early end has made one possible."""
    assert cluster.timelines is not None
    cluster.early = False
    for number in sorted(cluster.promises)[:DEPTH]:
        start, chosen, end = cluster.promises.pop(number)
        cluster.timelines.change(chosen, start, end, 1)
        sooner, elsewhere, planned = _find(cluster, number)
        if sooner <= cluster.now:
            _start_now(cluster, number, elsewhere)
        elif sooner < start:
            _reserve_for(cluster, number, sooner, elsewhere, sooner + planned)
        else:
            _reserve_for(cluster, number, start, chosen, end)
