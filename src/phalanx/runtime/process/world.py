"""The processes of a run: who am I, how many are we, on which device.

The same code runs alone, under Phalanx's own launcher, under torchrun and under Slurm's srun: each says in the
environment which rank this is.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

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
        store=_meet(world, timeout_s) if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else None,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )


def _meet(world: World, timeout_s: float) -> dist.Store:
    """A part of the elastic agents' store in which nothing is old.

    The agents keep one store for all restarts, and torch would find the addresses of dead ranks there. Rank 0 opens
    a round under a new name; the others go where it points, say who they are, and wait until rank 0 has seen just
    them: in the round of an earlier attempt nobody does.
    """
    within = timedelta(seconds=timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("phalanx", dist.TCPStore(address, port, is_master=False, timeout=within))
    me = uuid.uuid4().hex
    if world.rank == 0:
        store.set("round", me)
        met = dist.PrefixStore(me, store)
        for rank in range(1, world.size):
            met.set(f"seen-{rank}", met.get(f"here-{rank}"))
        return met
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        met = dist.PrefixStore(store.get("round").decode(), store)
        met.set(f"here-{world.rank}", me)
        time.sleep(0.05)
        if met.check([f"seen-{world.rank}"]) and met.get(f"seen-{world.rank}").decode() == me:
            return met
    raise TimeoutError(f"timed out after {timeout_s:g} s waiting for rank 0 to meet this rank")


def launchers() -> list[str]:
    """The processes that started the ranks, each once; all ranks of a world that has been joined ask together.
    An elastic restart finds at least one of them among those of before: whoever is left starts the ranks again."""
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat")
    began = stat.read_text().rsplit(")", 1)[1].split()[19] if stat.exists() else ""  # for numbers are used again
    mine = f"{os.uname().nodename} {parent} {began}"
    if not dist.is_initialized():
        return [mine]
    told = [mine] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    _nodes[:] = [launcher.split()[0] for launcher in told]
    return sorted(set(told))


_nodes: list[str] = []  # of every rank, once they have told their launchers


def described(ranks: Sequence[int]) -> str:
    """Ranks, and the hosts that have no others: a host that is gone rather than its ranks."""
    words = ", ".join(f"rank {rank}" for rank in ranks)
    gone = [n for n in dict.fromkeys(_nodes) if {r for r, name in enumerate(_nodes) if name == n} <= set(ranks)]
    return f"{words} (all of host {', '.join(gone)})" if gone else words


def absent(world: World, ranks: Sequence[int], within_s: float = 3.0) -> tuple[int, ...]:
    """Which of these ranks, of a collective that has timed out, do not ask the same within a moment: they have not
    arrived. Asked through the store of the process group, as no collective can be trusted any more."""
    missing: list[int] = []
    if not dist.is_initialized():
        return ()

    def ask() -> None:
        try:
            look()
        except dist.DistError:  # who holds the store is gone: nobody can tell
            missing.clear()

    def look() -> None:
        store = dist.PrefixStore("absent", dist.distributed_c10d._get_default_store())
        store.set(str(world.rank), "here")
        deadline = time.monotonic() + within_s
        names = {rank: str(rank) for rank in ranks}
        missing.extend(names)
        while missing and time.monotonic() < deadline:
            missing[:] = [rank for rank in missing if not store.check([names[rank]])]
            time.sleep(0.05)

    # The process that holds the store may itself be the one that hangs: nobody can tell either.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(within_s + 1)
    return () if asking.is_alive() else tuple(missing)


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
    in the same order of axes (Comm does for those of a pipeline).
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
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box
