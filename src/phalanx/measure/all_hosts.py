"""Measurement of a cluster from ranks started by torchrun or srun on one or several hosts: all ranks call `measure`.

All hosts work at the same time, with groups of ranks side by side, as in a run. Hosts are assumed to be equal.
"""

from dataclasses import asdict

from phalanx.measure import collectives
from phalanx.measure.kernels import Ladder
from phalanx.measure.links import BETWEEN, INSIDE, RealWire, TierLines, measure_tier, partner
from phalanx.measure.this_machine import describe, fingerprint
from phalanx.measure.worker import agreed_choices, kernel_rates, levels, measure_figures, measure_host, table_rows
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.environment import World
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.job import DType
from phalanx.spec.strategy.mesh import Mesh, mesh
from phalanx.spec.strategy.spec import Strategy


def measure(world: World, dtype: DType, threads: int) -> ClusterSpec | None:
    """Measure a cluster; return it as a ClusterSpec on rank 0, and None on the others.

    The world must have been joined. Raises InputError if hosts have different numbers of ranks.
    """
    local, hosts = world.local_size, world.size // world.local_size
    if hosts * local != world.size:
        raise InputError("torchrun", f"{world.size} ranks", f"are not {local} on every host", "start as many on each")
    grid = _grid(hosts, local)
    comm = Comm(world, grid, collectives.SHARED)
    _make_groups(comm)
    wire = RealWire(comm)
    tiers: list[TierLines] = []
    fits: list[CollectiveFit] = []
    # Links, tier by tier.
    if local > 1:
        comm.status.now("measuring links inside a host")
        tiers.append(measure_tier(wire, INSIDE, local // 2))
    if hosts > 1:
        comm.status.now("measuring links between hosts")
        tiers.append(measure_tier(wire, BETWEEN, local))
        # Collectives, then kernels with the collectives chosen from them.
        comm.status.now("measuring collectives")
        for axis in ("dp_shard", "dp_replicate", "world") if local > 1 else ("world",):
            fits += collectives.measure_collectives(comm, axis)
        everyone = mesh(Strategy(dp=world.size))
        together = Comm(world, everyone, agreed_choices(fits, Comm(world, everyone)))
        over = [fit for fit in fits if (fit.op, fit.group_size) == ("all_reduce", world.size)]
        comm.status.now("measuring kernels")
        rates = kernel_rates(together, Ladder(dtype, world.device), threads, local, over, rounds=6)
        rows = table_rows([rates], fits, measure_figures(comm, dtype))
    else:
        rows = measure_host(Comm(world, mesh(Strategy(dp=local))), dtype, threads, levels(local))
    if world.rank:
        return None
    # On rank 0: the cluster from its rows.
    tables = describe(fingerprint(), local, dtype, rows)
    shape = {INSIDE: local, BETWEEN: world.size}
    measured = [asdict(lines.tier(shape[lines.name])) for lines in tiers]
    name = f"{hosts} x {local} x {tables['device']['name']}"
    tables |= {"name": name, "nodes": hosts, "tiers": measured or tables["tiers"]}
    return build(ClusterSpec, tables, "cluster")


def _grid(hosts: int, local: int) -> Mesh:
    """Return a mesh with replicas across hosts and shards inside them."""
    world = hosts * local
    return mesh(Strategy(dp=world, zero=2, shard=local) if local > 1 else Strategy(dp=world))


def _make_groups(comm: Comm) -> None:
    """Create all process groups, the same number in the same order on every rank (see world.group)."""
    w = comm.world
    if w.size == 1:
        return
    first = w.rank // w.local_size * w.local_size
    groups: list[tuple[int, ...]] = [tuple(range(first, first + w.local_size))]
    groups.append(tuple(range(w.rank % w.local_size, w.size, w.local_size)))
    for tier in (INSIDE, BETWEEN):
        other = partner(tier, w.rank, w.local_size, w.size)
        groups.append((w.rank,) if other is None else tuple(sorted((w.rank, other))))
    for ranks in groups:
        worlds.group(ranks)
