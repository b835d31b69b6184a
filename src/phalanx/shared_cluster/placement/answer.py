"""The placement of a plan's ranks on free GPUs, compared with an empty cluster and with other strategies on the same
GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from phalanx.answers.precision import products_in
from phalanx.frameworks.launchers.export import documents
from phalanx.planning.placement import Placement
from phalanx.schedule.pipeline.stages import check
from phalanx.shared_cluster.placement import free_gpus, kueue, torchrun
from phalanx.shared_cluster.placement.alternatives import PlacedAlternative, alternatives
from phalanx.shared_cluster.placement.price import PlacedJob
from phalanx.shared_cluster.placement.search import Carvings, Placed, place
from phalanx.shared_cluster.topology import slurm
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files import plan as plans
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED


@dataclass(frozen=True, eq=False)
class PlaceAnswer:
    """A plan's placement on free GPUs."""

    job: PlacedJob
    free: free_gpus.FreeGpus
    placed: Placed
    empty: Placed
    """The same job on the same cluster with every GPU free."""
    others: tuple[PlacedAlternative, ...]
    """Strategies of the search for these GPUs, the fastest as placed first."""
    no_others: str = ""
    """Why there are no others, if there are none."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the placed job."""
        return self.job.job.global_batch * self.job.job.seq / self.placed.seconds


def job_of_plan(path: Path, line: str | None, stack: str | None) -> PlacedJob:
    """Return the job of a plan.json or a run's folder; `line` replaces its strategy. Raises InputError."""
    plan = plans.read(path / "plan.json" if path.is_dir() else path)
    strategy = make_strategy(line) if line else plan.strategy
    assert strategy is not None
    check(strategy, plan.model, plan.job, None)
    planned = str(plan.choices.get("stack", "phalanx"))
    name = stack or planned
    products = products_in(str(plan.choices.get("precision")))
    options = plan.options if name == planned else AS_RELEASED
    return PlacedJob(plan.model, plan.cluster, plan.job, strategy, name, products, options)


def answer(
    job: PlacedJob, free: Path, leaves: Mapping[str, Sequence[str]] | None = None, search: bool = True
) -> PlaceAnswer:
    """Place a job on the GPUs that the file `free` names; `leaves`: the nodes of each leaf switch, in place of the
    file's; `search`: also look for better strategies there. Raises InputError."""
    available = free_gpus.read(free, job.cluster, leaves)
    local = replace(job, cluster=available.cluster)
    if job.strategy.world > len(available.free):
        raise InputError(
            "free",
            str(free),
            f"has {len(available.free)} free GPUs, but {job.strategy} has {job.strategy.world} ranks",
            f"plan for at most {len(available.free)} GPUs, or free more",
        )
    carvings: Carvings = {}
    placed = place(local, available.topology, available.free, carvings=carvings)
    everything = np.arange(available.topology.gpus)
    empty = place(local, available.topology, everything)
    others: tuple[PlacedAlternative, ...] = ()
    reason = ""
    if search:
        try:
            others = tuple(alternatives(local, available.topology, available.free, carvings))
        except InputError as error:
            reason = str(error)
    return PlaceAnswer(local, available, placed, empty, others, reason)


LAUNCHERS = ("slurm", "torchrun", "kueue")


def launch_files(launcher: str, p: Placement) -> dict[str, str]:
    """Return the files, by name, with which a launcher starts each rank where it is placed. Raises InputError for an
    unknown launcher, or one that cannot."""
    hosts = [p.topology.hosts[int(host)] for host in p.topology.host[p.gpu]]
    gpus = p.topology.index[p.gpu].tolist()
    leaves = len({int(block) for block in p.topology.blocks[-2][p.gpu]}) if len(p.cluster.tiers) > 2 else 1
    if launcher == "slurm":
        return {"hostfile": slurm.host_file(hosts), "launch.sbatch": slurm.launch(hosts, gpus, leaves, "hostfile")}
    if launcher == "torchrun":
        return {"launch.sh": torchrun.commands(hosts, gpus)}
    if launcher == "kueue":
        per_node = {len(ranks) for _, ranks in p.ranks_by_host()}
        if len(per_node) > 1:
            reason = f"its pods are equal, but nodes have {min(per_node)} to {max(per_node)} ranks"
            raise InputError("for", launcher, reason, "use --for slurm, which places ranks one by one")
        name = "phalanx-job"
        flavor = kueue.resource_flavor(name, p.cluster.device.name)
        pods = kueue.job(name, p.world // (each := per_node.pop()), each, leaves)
        return {"kueue.yaml": documents(kueue.topology(name), flavor, pods)}
    raise InputError("for", launcher, "is not a launcher", nearest(launcher, LAUNCHERS))
