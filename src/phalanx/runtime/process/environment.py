"""Rank and world size of this process, read from the environment: alone, under Phalanx's own launcher, under torchrun
or under Slurm's srun. Imports no torch, since launchers read it too."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.spec.errors import InputError

if TYPE_CHECKING:
    import torch

SHARE_GPUS = "PHALANX_SHARE_GPUS"
"""Variable by which a user allows more ranks than GPUs; they then send through the host (comm/staged.py)."""


@dataclass(frozen=True)
class World:
    """A rank among `size` ranks, `local_size` of them on this host. A rank alone has no process group."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def device(self) -> torch.device:
        """The GPU of this rank's local number, or else the CPU."""
        import torch

        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")


ALONE = World(0, 1, 0, 1)


def gpus_are_shared() -> bool:
    """Whether the user lets ranks share GPUs; as with PyTorch's variables, 0 means no."""
    return os.environ.get(SHARE_GPUS, "") not in ("", "0")


def external_world() -> World | None:
    """Return the world that torchrun or srun started this rank in, or None without either. Raises InputError."""
    env = os.environ
    try:
        return _external(env)
    except ValueError as error:
        raise InputError("environment of torchrun or srun", None, f"cannot be understood ({error})") from None


def _external(env: MutableMapping[str, str]) -> World | None:
    if "RANK" in env and "WORLD_SIZE" in env:
        size = int(env["WORLD_SIZE"])
        return World(int(env["RANK"]), size, int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1)))
    # Only srun sets SLURM_STEP_NUM_TASKS; a bare batch script is one process.
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        from hostlist import expand_hostlist  # type: ignore[import-untyped]

        hosts = expand_hostlist(env["SLURM_STEP_NODELIST"])
        env.setdefault("MASTER_ADDR", hosts[0])
        env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 20000))
        size = int(env["SLURM_STEP_NUM_TASKS"])
        return World(int(env["SLURM_PROCID"]), size, int(env["SLURM_LOCALID"]), -(-size // len(hosts)))
    return None
