"""Checks that this machine can run a number of ranks, and that it is the cluster of a job."""

from collections.abc import Callable

from phalanx.measure.this_machine import fingerprint
from phalanx.runtime.process.environment import SHARE_GPUS, gpus_are_shared
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import JobFile

Announce = Callable[[str], None]  # prints a line of progress or a note

_RANKS_PER_CORE = 16


def require_local(ranks: int, field: str = "cluster.ranks") -> None:
    """Require that this machine can run `ranks` ranks: up to 16 per core, and one per GPU, unless the user lets ranks
    share these. Raises InputError."""
    if ranks < 1:
        raise InputError(field, ranks, "must be at least 1")
    machine = fingerprint()
    gpus = len(machine["gpus"])
    if gpus and not gpus_are_shared():
        most, have = gpus, f"{gpus} GPU{'s' * (gpus > 1)}"
        remedy = f"use at most {most}, or set {SHARE_GPUS}=1: ranks then share GPUs, and send through the host"
    else:
        most = _RANKS_PER_CORE * machine["cores"]
        have, remedy = f"{machine['cores']} cores ({_RANKS_PER_CORE} ranks each at most)", f"use at most {most}"
    if ranks > most:
        raise InputError(field, ranks, f"is too many for this machine with {have}", remedy)


def share_gpus(ranks: int) -> bool:
    """Whether `ranks` ranks on this machine share GPUs, and so send through the host."""
    gpus = len(fingerprint()["gpus"])
    return gpus_are_shared() and 0 < gpus < ranks


def require_this_machine(file: JobFile) -> None:
    """Require that a job's cluster is this machine. Raises InputError."""
    if file.cluster.preset != "local":
        if file.cluster.preset:
            clusters.preset(file.cluster.preset, file.cluster.nodes)
        remedy = "start under torchrun or srun there, or use preset = 'local'"
        raise InputError("cluster", file.cluster.preset or file.cluster.file, "is not this machine", remedy)
