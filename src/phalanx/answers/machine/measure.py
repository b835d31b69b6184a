"""Measurements of this machine or of a cluster, by Phalanx or nccl-tests: what `phalanx measure` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.answers.answer import Answer, plain
from phalanx.answers.machine.this_machine import Announce, require_local
from phalanx.measure.this_machine import default_ranks, local_cluster
from phalanx.planning.auto import transport
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit
from phalanx.spec.documents import read_text
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import compute_type

if TYPE_CHECKING:
    from phalanx.runtime.process.environment import World


@dataclass(frozen=True)
class Measurement(Answer):
    """A cluster with its measured rates and links."""

    cluster: ClusterSpec


@plain.register
def _(value: Measurement) -> dict[str, Any]:
    return asdict(value.cluster)


def local_collectives(
    op: str, ranks: int, announce: Announce
) -> tuple[tuple[CollectiveFit, ...], tuple[Choice, ...]]:
    """Return (fits of a collective between `ranks` ranks of this machine, the transport and algorithm chosen for each
    size). Raises InputError."""
    if ranks < 2:
        raise InputError("ranks", ranks, "is too few to communicate", "use 2 or more")
    require_local(ranks)
    cluster = local_cluster(ranks, "float32", 1, announce=announce)
    fits = tuple(cluster.fits(op, ranks))
    if not fits:
        ops = sorted({f.op for f in cluster.collectives})
        raise InputError("op", op, "is not measured between local ranks", nearest(op, ops))
    return fits, transport.choose(fits)


def measure(ranks: int | None, dtype: str, threads: int, quick: bool, announce: Announce) -> ClusterSpec:
    """Measure this machine anew, with `ranks` ranks (None: one per GPU or core) of `threads` threads each.

    `quick`: in few rounds, less exactly. Raises InputError, RankFailure.
    """
    compute = compute_type(dtype, "dtype")
    count = ranks if ranks is not None else default_ranks()
    if count < 1 or threads < 1:
        raise InputError("ranks" if count < 1 else "threads", min(count, threads), "must be at least 1")
    require_local(count, "ranks")
    return local_cluster(count, compute, threads, anew=True, quick=quick, announce=announce)


def measure_ranks(world: World, dtype: str, threads: int) -> ClusterSpec | None:
    """Measure a cluster with the ranks that torchrun or srun started; all of them call this.

    Returns the cluster on rank 0 and None on the others. Raises InputError, RankFailure.
    """
    import torch

    from phalanx.measure.all_hosts import measure as measure_all
    from phalanx.runtime.process import world as worlds
    from phalanx.runtime.process.rank import naming_rank

    compute = compute_type(dtype, "dtype")
    torch.set_num_threads(threads)
    with naming_rank(world):
        worlds.join(world, 600)
        cluster = measure_all(world, compute, threads)
        worlds.leave()
    return cluster


def from_nccl_tests(files: Sequence[Path], preset: str, op: str) -> ClusterSpec:
    """Return a cluster preset with the collectives that nccl-tests measured on it, one file each. Raises InputError.

    `op` names the operation where a file does not.
    """
    from phalanx.measure.nccl_tests import device, read

    texts = {str(file): read_text(file, "FILE") for file in files}
    fits = [read(text, name, op) for name, text in texts.items()]
    cluster = clusters.preset(preset, max(fit.hosts for fit in fits))
    own = clusters.chip_of(cluster.device.name)
    for name, text in texts.items():
        if own and (chip := clusters.chip_of(device(text))) and chip != own:
            remedy = (
                f"--preset {like}" if (like := clusters.named(chip)) else "name one with such GPUs, or a file of it"
            )
            raise InputError(
                "preset", preset, f"has GPUs of {own}, and {name} was measured on {device(text)}", remedy
            )
    return replace(cluster, collectives=tuple(fits))
