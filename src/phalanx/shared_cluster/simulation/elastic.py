"""Elastic width: jobs that can run on fewer GPUs start narrower, release GPUs to waiting jobs, and widen again.

Every change of width of a running job costs it `restart_s`.
"""

from collections.abc import Sequence

from phalanx.shared_cluster.simulation.cluster_state import Chosen, ClusterState
from phalanx.shared_cluster.simulation.nodes import HeldGpus
from phalanx.shared_cluster.simulation.policy import MOST_SHRUNK


def narrower(cluster: ClusterState, number: int) -> tuple[Chosen, float]:
    """Return (nodes, speed) of the widest width below the job's own that can start now; ([], 0) if none can."""
    for width, speed in reversed(cluster.jobs[number].widths):
        if width < cluster.jobs[number].gpus:
            chosen = cluster.nodes.choose(width, cluster.policy.rule)
            if chosen:
                return chosen, speed
    return [], 0.0


def shrink_for(cluster: ClusterState, number: int) -> tuple[Chosen, float]:
    """Shrink running elastic jobs so that a waiting job can start; return its (nodes, speed), or ([], 0) if that does
    not suffice. The job gets the widest of its widths that can start, from as few others as possible, the last
    submitted first."""
    job = cluster.jobs[number]
    worth = (n for n in cluster.shrinkable if _worth_shrinking(cluster, number, n))
    others = sorted(worth, reverse=True)[:MOST_SHRUNK]
    for width, speed in ((job.gpus, 1.0), *reversed(job.widths)):
        for count in range(1, len(others) + 1):
            for narrowest in (False, True):
                chosen = _shrunk(cluster, width, others[:count], narrowest)
                if chosen:
                    return chosen, speed
    return [], 0.0


def _worth_shrinking(cluster: ClusterState, number: int, other: int) -> bool:
    """Return whether a running job releases GPUs to a waiting one: not if it has a higher priority, or would end
    before it could restart."""
    job, state = cluster.jobs[other], cluster.running[other]
    return job.priority <= cluster.jobs[number].priority and state.end - cluster.now > cluster.policy.restart_s


def _shrunk(cluster: ClusterState, width: int, shrinking: Sequence[int], narrowest: bool) -> Chosen:
    """Shrink all of these jobs, to their next or to their narrowest width, if another job of `width` GPUs then fits;
    return its nodes, or [] without a change."""
    to: list[tuple[int, int, float]] = []
    for job in shrinking:
        narrower = [w for w in cluster.jobs[job].widths if w[0] < cluster.running[job].width]
        to.append((job, *(narrower[0] if narrowest else narrower[-1])))
    freed = sum(cluster.running[n].width - w for n, w, _ in to)
    if cluster.nodes.count + freed < width:
        return []
    before = [cluster.running[n].gpus for n in shrinking]
    for gang in before:
        cluster.nodes.give_back(gang)
    taken: list[HeldGpus] = []
    places: list[Chosen] = []
    for gpus in (width, *(w for _, w, _ in to)):
        nodes = cluster.nodes.choose(gpus, cluster.policy.rule)
        if not nodes:
            break
        places.append(nodes)
        taken.append(cluster.nodes.take(nodes))
    for gang in taken:
        cluster.nodes.give_back(gang)
    for gang in before:
        cluster.nodes.retake(gang)
    if len(places) <= len(to):
        return []
    for job, _, _ in to:
        cluster.leave(job)
    for (job, _, speed), nodes in zip(to, places[1:], strict=True):
        cluster.active[job].left += cluster.policy.restart_s
        cluster.history.resized[job] += 1
        cluster.start(job, nodes, speed)
    return places[0]


def widen(cluster: ClusterState) -> None:
    """Let elastic jobs that run narrower than they asked for use free GPUs, the longest waiting first."""
    for number in sorted(n for n, s in cluster.running.items() if s.width < cluster.jobs[n].gpus):
        state, job = cluster.running[number], cluster.jobs[number]
        if not cluster.nodes.count:
            return
        left = state.end - cluster.now
        for width, speed in reversed((*job.widths, (job.gpus, 1.0))):
            if width <= state.width or width - state.width > cluster.nodes.count:
                continue
            if (left * state.speed + cluster.policy.restart_s) / speed >= left:
                continue  # it would lose more than it gains
            cluster.nodes.give_back(state.gpus)
            chosen = cluster.nodes.choose(width, cluster.policy.rule)
            cluster.nodes.retake(state.gpus)
            if chosen:
                cluster.leave(number)
                state.left += cluster.policy.restart_s
                cluster.history.resized[number] += 1
                cluster.start(number, chosen, speed)
                break
