"""The processes of a run: who am I, how many are we, on which device.

The same code runs alone, under Phalanx's own launcher, under torchrun and under Slurm's srun: each says in the
environment which rank this is.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class World:
    """`local_size`: ranks on this host. A rank alone has no process group."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")


ALONE = World(0, 1, 0, 1)


def external() -> World | None:
    """The world that torchrun or srun made this process a rank of; None where nobody did."""
    env = os.environ
    try:
        return _external(env)
    except ValueError as error:
        raise InputError("environment of torchrun or srun", None, f"is not what they set ({error})") from None


def _external(env: MutableMapping[str, str]) -> World | None:
    if "RANK" in env and "WORLD_SIZE" in env:
        size = int(env["WORLD_SIZE"])
        return World(int(env["RANK"]), size, int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1)))
    # SLURM_STEP_NUM_TASKS stands only in what srun starts; in a bare batch script there is one process.
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        from hostlist import expand_hostlist

        hosts = expand_hostlist(env["SLURM_STEP_NODELIST"])
        env.setdefault("MASTER_ADDR", hosts[0])
        env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 20000))
        size = int(env["SLURM_STEP_NUM_TASKS"])
        return World(int(env["SLURM_PROCID"]), size, int(env["SLURM_LOCALID"]), -(-size // len(hosts)))
    return None


def join(world: World, timeout_s: float) -> None:
    """Meet the other ranks: one process group, Gloo for CPU tensors and NCCL for CUDA ones."""
    global _timeout_s
    _timeout_s = timeout_s
    if world.size == 1:
        return
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(world.device)
    if "MASTER_ADDR" not in os.environ:
        raise InputError("environment MASTER_ADDR", None, "is missing", "start with phalanx train, torchrun or srun")
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )


def leave() -> None:
    """Part from the other ranks."""
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
_timeout_s = 300.0


def timeout_s() -> float:
    """How long a collective may wait for a peer."""
    return _timeout_s


def group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of these ranks, created once.

    torch names a group by its ranks and by how many groups its maker had: so every rank must ask for its groups
    in the same order of axes.
    """
    if ranks not in _groups:
        if ranks == tuple(range(dist.get_world_size())):
            _groups[ranks] = dist.group.WORLD
        else:
            _groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _groups[ranks]


def tell(words: list[str | None]) -> list[str | None]:
    """Rank 0's words, on every rank."""
    box = list(words)
    dist.broadcast_object_list(box, src=0)
    return box


def gather(words: object, size: int) -> list[Any]:
    """Every rank's words, on rank 0; nothing on the others."""
    if size == 1:
        return [words]
    box: list[Any] = [None] * size
    first = dist.get_rank() == 0
    dist.gather_object(words, box if first else None, dst=0, group=group(tuple(range(size))))
    return box if first else []
