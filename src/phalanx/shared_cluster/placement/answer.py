"""The placement of a plan's ranks on free GPUs, compared with an empty cluster and with other strategies on the same
GPUs.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from phalanx.answers.question.precision import products_in
from phalanx.schedule.pipeline.stages import check
from phalanx.shared_cluster.placement.alternatives import PlacedAlternative, alternatives
from phalanx.shared_cluster.placement.free_gpus import FreeGpus
from phalanx.shared_cluster.placement.price import PlacedJob
from phalanx.shared_cluster.placement.search import Carvings, Placed, place
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED


@dataclass(frozen=True, eq=False)
class PlaceAnswer:
    """A plan's placement on free GPUs."""

    job: PlacedJob
    free: FreeGpus
    placed: Placed
    empty: Placed
    """The same job on the same cluster with every GPU free."""
    others: tuple[PlacedAlternative, ...]
    """Strategies of the search for these GPUs, the fastest as placed first."""
    no_others: str = ""
    """Why there are none, else ""."""

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


def answer(job: PlacedJob, free: FreeGpus, search: bool = True) -> PlaceAnswer:
    """Place a job on free GPUs. `search`: whether to look for better strategies on them. Raises InputError for more
    ranks than free GPUs."""
    world = job.strategy.world
    free.require(world, f"{job.strategy} has {world} ranks", f"plan for at most {len(free.free)} GPUs, or free more")
    local = replace(job, cluster=free.cluster)
    carvings: Carvings = {}
    placed = place(local, free.topology, free.free, carvings=carvings)
    empty = place(local, free.topology, np.arange(free.topology.gpus))
    others: tuple[PlacedAlternative, ...] = ()
    reason = ""
    if search:
        try:
            others = tuple(alternatives(local, free.topology, free.free, carvings))
        except InputError as error:
            reason = str(error)
    return PlaceAnswer(local, free, placed, empty, others, reason)
