"""All launchers by name."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.frameworks.launchers import jobset, pytorchjob, skypilot, slurm, torchrun, trainjob
from phalanx.frameworks.launchers.task import Task
from phalanx.spec.errors import InputError, nearest

LAUNCHERS: dict[str, Callable[[Task], dict[str, str]]] = {
    "torchrun": torchrun.files,
    "slurm": slurm.files,
    "pytorchjob": pytorchjob.files,
    "trainjob": trainjob.files,
    "jobset": jobset.files,
    "skypilot": skypilot.files,
}


def launcher(name: str) -> Callable[[Task], dict[str, str]]:
    """Return what writes a launcher's files. Raises InputError for an unknown name."""
    if name not in LAUNCHERS:
        raise InputError("--launcher", name, "is not a launcher that Phalanx knows", nearest(name, LAUNCHERS))
    return LAUNCHERS[name]
