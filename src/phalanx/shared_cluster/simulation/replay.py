"""The replay of a trace under scheduling policies, with its plans priced: what `phalanx cluster simulate` does.

Events at one time are handled in the order: ends, arrivals, changes of queue, reserved starts; then waiting jobs are
scheduled. A job that is stopped keeps its work, and loses `restart_s`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from phalanx.planning.lookup import require_plausible
from phalanx.planning.search.planner import best_on
from phalanx.shared_cluster.placement.answer import job_of_plan
from phalanx.shared_cluster.placement.price import PlacedJob
from phalanx.shared_cluster.placement.search import place
from phalanx.shared_cluster.simulation import backfill
from phalanx.shared_cluster.simulation.cluster_state import (
    END,
    RESERVED,
    ActiveJob,
    ClusterState,
    JobHistory,
    SpeedOf,
)
from phalanx.shared_cluster.simulation.events import handle
from phalanx.shared_cluster.simulation.nodes import RULES, HeldGpus, Nodes
from phalanx.shared_cluster.simulation.policy import POLICIES, SchedulingPolicy
from phalanx.shared_cluster.simulation.trace import PlanFacts, Trace, TraceJob, read
from phalanx.spec.cluster.presets import PRESETS, named, preset, resized
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.cluster.topology import Topology, of_cluster, of_leaves
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files.cluster_toml import cluster_from_toml


def simulate(
    jobs: Sequence[TraceJob], nodes: Nodes, policy: SchedulingPolicy, speed_of: SpeedOf | None = None
) -> JobHistory:
    """Run the jobs of a trace, which must fit the empty cluster, in the order of their submission."""
    cluster = ClusterState(jobs, nodes, policy, speed_of)
    order = sorted(range(len(jobs)), key=lambda n: (jobs[n].submit, n))
    i, events = 0, cluster.events
    while i < len(order) or events:
        arrival = jobs[order[i]].submit if i < len(order) else float("inf")
        time = min(arrival, events[0][0]) if events else arrival
        cluster.history.fragmented += cluster.stuck * (time - cluster.now)
        cluster.now = time
        handle(cluster, END)
        if cluster.early:  # after all jobs that end now have freed their GPUs
            backfill.bring_forward(cluster)
        while i < len(order) and jobs[order[i]].submit == time:
            _arrive(cluster, order[i])
            i += 1
        handle(cluster, RESERVED)
        if cluster.timelines is None:
            _schedule(cluster)
        head = cluster.first()
        cluster.stuck = 0
        if head is not None and jobs[head].gpus <= nodes.count:
            cluster.stuck = jobs[head].gpus
    return cluster.history


def _arrive(cluster: ClusterState, number: int) -> None:
    cluster.active[number] = ActiveJob(cluster.jobs[number].duration, cluster.now)
    if cluster.timelines is not None:
        backfill.promise(cluster, number)
    else:
        cluster.wait(number)


def _schedule(cluster: ClusterState) -> None:
    """Start the waiting jobs that the policy lets start now."""
    name = cluster.policy.name
    if name == "easy":
        backfill.easy(cluster)
    else:
        backfill.in_order(cluster, passing=name != "fifo")


@dataclass(frozen=True)
class SharedCluster:
    """Nodes by size and leaf switch; `described`: their links, where plans are to be priced on them."""

    sizes: tuple[int, ...]
    leaf: tuple[int, ...]
    described: ClusterSpec | None

    @property
    def title(self) -> str:
        """The nodes in words."""
        counts = {size: self.sizes.count(size) for size in dict.fromkeys(self.sizes)}
        nodes = " and ".join(f"{n} nodes of {size} GPUs" for size, n in counts.items())
        leaves = len(set(self.leaf))
        return nodes + (f" under {leaves} leaf switches" if leaves > 1 else "")


def cluster_of(text: str, nodes: int | None, leaf: int | None) -> SharedCluster:
    """Return the cluster that --cluster, --nodes and --leaf describe: a preset, a TOML file, or node counts and sizes
    such as 231x8,321x2. Raises InputError."""
    if leaf is not None and leaf < 1:
        raise InputError("leaf", leaf, "must be at least 1 node")
    described: ClusterSpec | None = None
    if re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}(,[0-9]{1,9}x[0-9]{1,9})*", text):
        pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        if any(n < 1 or not 1 <= size <= 256 for n, size in pairs) or sum(n for n, _ in pairs) > 100_000:
            raise InputError("cluster", text, "needs 1 to 100,000 nodes of 1 to 256 GPUs")
        sizes = tuple(size for n, size in pairs for _ in range(n))
        if nodes is not None:
            raise InputError("nodes", nodes, f"is already given by --cluster {text}", "leave it out")
    else:
        if text.lower().endswith(".toml"):
            described = cluster_from_toml(Path(text))
            require_plausible(described)
            described = resized(described, nodes) if nodes else described
        elif named(text):
            if nodes is None:
                raise InputError("nodes", None, "is missing", f"say how many nodes of {text} the cluster has")
            described = preset(text, nodes)
        else:
            raise InputError("cluster", text, "is not a cluster", f"{nearest(text, PRESETS)}, or write 60x8")
        sizes = (described.ranks_per_node,) * described.nodes
    leaves = tuple(i // leaf for i in range(len(sizes))) if leaf else (0,) * len(sizes)
    return SharedCluster(sizes, leaves, described)


@dataclass(frozen=True, eq=False)
class _Prices:
    """Prices of the plans of a trace on a shared cluster."""

    cluster: ClusterSpec
    topology: Topology

    def facts(self, path: str, fewest: int) -> PlanFacts:
        """Return a plan's facts, placed on the empty cluster; `fewest`: its least GPUs if it is elastic, else 0.
        Raises InputError."""
        job, room = self.job(path), self.topology.gpus
        if job.strategy.world > room:
            raise InputError("plan", path, f"has {job.strategy.world} ranks, and the cluster {room} GPUs")
        step = self.step_s(path, tuple(range(self.topology.gpus)))
        widths: list[tuple[int, float]] = []
        width = job.strategy.world // 2
        while fewest and width >= fewest:
            best = best_on(job.question(job.cluster), width)
            if best is not None:
                widths.append((width, min(1.0, step / best.seconds)))
            width //= 2
        return PlanFacts(job.strategy.world, step, job.job.global_batch * job.job.seq, tuple(sorted(widths)))

    @cache  # noqa: B019 - one instance a command
    def job(self, path: str) -> PlacedJob:
        """Return the job of a plan, on this cluster."""
        return replace(job_of_plan(Path(path), None, None), cluster=self.cluster)

    @cache  # noqa: B019
    def step_s(self, path: str, gpus: tuple[int, ...]) -> float:
        """Return the seconds of a step on the best of these GPUs, with all others in use."""
        return place(self.job(path), self.topology, np.array(gpus, dtype=np.int64)).seconds

    def speed(self, job: TraceJob, held: HeldGpus) -> float:
        """Return a job's speed on GPUs over its speed on the empty cluster; like placements are priced once."""
        if sum(bits.bit_count() for _, bits in held) != job.gpus:
            return 1.0  # at another width, the speed is from the trace
        gpus = self._alike(tuple((node, bits.bit_count()) for node, bits in held))
        best = self.step_s(job.plan, tuple(range(self.topology.gpus)))
        return min(1.0, best / self.step_s(job.plan, gpus))

    def _alike(self, parts: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """Return GPUs that represent all placements with the same numbers of GPUs per node and leaf."""
        leaf_of, node = self.topology.blocks[-2] if len(self.cluster.tiers) > 2 else None, self.cluster.ranks_per_node
        by_leaf: dict[int, list[int]] = {}
        for host, n in parts:
            by_leaf.setdefault(0 if leaf_of is None else int(leaf_of[host * node]), []).append(n)
        groups = [sorted(counts, reverse=True) for counts in by_leaf.values()]
        groups.sort(key=lambda counts: (len(counts), counts), reverse=True)  # the most nodes on the largest leaf
        gpus: list[int] = []
        if leaf_of is None:
            starts = [list(range(len(self.topology.hosts)))]
        else:
            hosts = leaf_of[::node]
            leaves = sorted(set(hosts.tolist()), key=lambda leaf: -int(np.sum(hosts == leaf)))
            starts = [np.flatnonzero(hosts == leaf).tolist() for leaf in leaves]
        for counts, hosts_under in zip(groups, starts, strict=False):
            for n, host in zip(counts, hosts_under, strict=False):
                gpus += range(host * node, host * node + n)
        return tuple(gpus)


def read_trace(
    path: Path, shared: SharedCluster, oversubscription: float, skip_bad: bool
) -> tuple[Trace, SpeedOf | None]:
    """Return (a trace for a cluster, function for the speeds of its plans by placement; None if the cluster's links
    are not known). Raises InputError."""
    nodes = Nodes(shared.sizes, shared.leaf)
    if oversubscription > 1 and (shared.described is None or len(set(shared.leaf)) < 2):
        reason = "is of the uplinks of leaf switches, which this cluster has not"
        raise InputError("oversubscription", oversubscription, reason, "name a preset or a file, and --leaf")
    if shared.described is None:

        def refuse(plan: str, fewest: int) -> PlanFacts:
            raise InputError("plan", plan, "needs a cluster with links", "name a preset or a file as --cluster")

        return read(path, nodes.widest(), refuse, skip_bad), None
    names = [f"node{i}" for i in range(len(shared.sizes))]
    if len(set(shared.leaf)) > 1:
        cluster, topology = of_leaves(shared.described, names, shared.leaf, oversubscription)
    else:
        cluster, topology = shared.described, of_cluster(shared.described)
    prices = _Prices(cluster, topology)
    return read(path, nodes.widest(), prices.facts, skip_bad), prices.speed


def default_policies(trace: Trace, elastic: bool) -> list[str]:
    """Return the names of the policies that can run a trace: `conservative` has no elastic jobs and no priorities."""
    ordered = all(job.priority == trace.jobs[0].priority for job in trace.jobs)
    return [name for name in POLICIES if name != "conservative" or (ordered and not elastic)]


def policies_of(
    names: Sequence[str], rules: Sequence[str], elastic: bool, restart_s: float, preempt: bool = False
) -> list[SchedulingPolicy]:
    """Return every policy with every placement rule. Raises InputError for a name that is neither."""
    for name in names:
        if name not in POLICIES:
            raise InputError("policy", name, "is not a policy", nearest(name, POLICIES))
    for rule in rules:
        if rule not in RULES:
            raise InputError("placement", rule, "is not a placement rule", nearest(rule, RULES))
    if elastic and "conservative" in names:
        raise InputError("elastic", None, "widths cannot change under reservations", "leave out conservative")
    if "scatter" in rules and {"conservative", "las"} & set(names):
        remedy = "use first-fit, best-fit or topology"
        raise InputError("placement", "scatter", "is for fifo, easy and smallest", remedy)
    if not 0 <= restart_s < float("inf"):
        raise InputError("restart_s", restart_s, "must be 0 or more seconds")
    if preempt and "conservative" in names:
        raise InputError("preempt", None, "reservations cannot be kept", "leave out conservative")
    return [SchedulingPolicy(name, rule, elastic, restart_s, preempt) for name in names for rule in rules]


def run(trace: Trace, shared: SharedCluster, policy: SchedulingPolicy, speed_of: SpeedOf | None) -> JobHistory:
    """Simulate a trace under a policy. Raises InputError for one that cannot run it."""
    if policy.name not in default_policies(trace, policy.elastic):
        reason = "reserves in the order of arrival, but jobs of the trace have priorities"
        raise InputError("policy", policy.name, reason, "use another policy")
    return simulate(trace.jobs, Nodes(shared.sizes, shared.leaf), policy, speed_of)
