"""What this machine can run: how many ranks, and which clusters."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.measure.this_machine import fingerprint
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import JobFile

Announce = Callable[[str], None]  # prints a line of progress or a note

_RANKS_PER_CORE = 16


def require_local(ranks: int, field: str = "cluster.ranks") -> None:
    """Require that this machine can run `ranks` ranks: one per GPU, or up to 16 per core. Raises InputError."""
    if ranks < 1:
        raise InputError(field, ranks, "must be at least 1")
    machine = fingerprint()
    gpus = len(machine["gpus"])
    most = gpus or _RANKS_PER_CORE * machine["cores"]
    if ranks > most:
        have = f"{gpus} GPUs" if gpus else f"{machine['cores']} cores ({_RANKS_PER_CORE} ranks each at most)"
        raise InputError(field, ranks, f"is too many for this machine with {have}", f"use at most {most}")


def require_this_machine(file: JobFile) -> None:
    """Require that a job's cluster is this machine. Raises InputError."""
    if file.cluster.preset != "local":
        if file.cluster.preset:
            clusters.preset(file.cluster.preset, file.cluster.nodes)
        raise InputError(
            "cluster",
            file.cluster.preset or file.cluster.file,
            "is not this machine",
            "start under torchrun or srun there, or use preset = 'local'",
        )
