"""The world of a run: its process group, the groups of its axes, and what its ranks agree on.

Rank and world size come from the environment (environment.py).
"""

import os
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: torch.optim imports it, and its defaults would keep the group alive
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from phalanx.runtime.process import gpus
from phalanx.runtime.process.agent import STORE_VARIABLE
from phalanx.runtime.process.environment import World
from phalanx.runtime.process.objects import broadcast_object, gather_objects
from phalanx.spec.errors import InputError


def join(world: World, timeout_s: float) -> None:
    """Join the other ranks in one process group: Gloo for CPU tensors, NCCL for CUDA ones. Ranks that share a GPU use
    Gloo alone (comm/staged.py).

    Ranks of a local launcher meet in a file of its private folder, others in the store of torchrun or of rank 0.
    Collectives time out after `timeout_s` seconds. Raises InputError if the environment has no MASTER_ADDR,
    or this host not the GPUs (gpus.py).
    """
    global _timeout_s
    _timeout_s = timeout_s
    host = gpus.this_host()
    gpus.require(host, world.local_size, world.size)
    if world.size == 1:
        return
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(world.device)
        if STORE_VARIABLE in os.environ:  # torchrun and srun bind ranks themselves
            gpus.stay_near(torch.cuda.current_device())
    if STORE_VARIABLE not in os.environ and "MASTER_ADDR" not in os.environ:
        raise InputError("environment MASTER_ADDR", None, "is missing", "start with phalanx train, torchrun or srun")
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_gpu and not gpus.shares_gpu(host, world.local_size) else "gloo",
        store=_store(world, timeout_s),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )


def _store(world: World, timeout_s: float) -> Store | None:
    """Return the store in which the ranks meet; None lets torch open one on rank 0, at MASTER_ADDR."""
    local = os.environ.get(STORE_VARIABLE)
    if local:
        return FileStore(local, world.size)
    return _rendezvous(world, timeout_s) if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else None


def _rendezvous(world: World, timeout_s: float) -> Store:
    """Return a part of the elastic agents' store that holds nothing of earlier attempts.

    The agents keep one store for all restarts, in which torch would find the addresses of dead ranks. So rank 0 opens
    a round under a new name. The others read that name, write their own nonce there, and wait until rank 0 has copied
    it: in the round of an earlier attempt it never would. Raises TimeoutError.
    """
    within = timedelta(seconds=timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore("phalanx", TCPStore(address, port, is_master=False, timeout=within))
    nonce = uuid.uuid4().hex
    if world.rank == 0:
        store.set("round", nonce)
        common = PrefixStore(nonce, store)
        for rank in range(1, world.size):
            common.set(f"seen-{rank}", common.get(f"here-{rank}").decode())
        return common
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        common = PrefixStore(store.get("round").decode(), store)
        common.set(f"here-{world.rank}", nonce)
        time.sleep(0.05)
        if common.check([f"seen-{world.rank}"]) and common.get(f"seen-{world.rank}").decode() == nonce:
            return common
    raise TimeoutError(f"timed out after {timeout_s:g} s waiting for the rendezvous with rank 0")


def launchers() -> list[str]:
    """Return the processes that started the ranks, each once, as "host pid start-time". Collective once joined. After
    an elastic restart at least one of them is an earlier one: the agents that are left restart the ranks."""
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat")
    start_ticks = stat.read_text().rsplit(")", 1)[1].split()[19] if stat.exists() else ""  # as pids are reused
    mine = f"{os.uname().nodename} {parent} {start_ticks}"
    if not dist.is_initialized():
        return [mine]
    everyone = gather_objects(mine, group(tuple(range(dist.get_world_size()))))
    _nodes[:] = [launcher.split()[0] for launcher in everyone]
    return sorted(set(everyone))


_nodes: list[str] = []  # the host name of every rank, once `launchers` has gathered them


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks in words, which also names the hosts all of whose ranks are in it."""
    words = ", ".join(f"rank {rank}" for rank in ranks)
    gone = [n for n in dict.fromkeys(_nodes) if {r for r, name in enumerate(_nodes) if name == n} <= set(ranks)]
    return f"{words} (all of host {', '.join(gone)})" if gone else words


def absent_ranks(world: World, ranks: Sequence[int], within_s: float = 3.0) -> tuple[int, ...]:
    """Return the ranks that have not arrived at a collective that timed out. Every rank that arrived calls this;
    ranks that do not within `within_s` seconds are absent. Ranks meet through the store of the process group, since
    collectives can no longer be trusted. Empty if it cannot be determined."""
    missing: list[int] = []
    if not dist.is_initialized():
        return ()

    def check() -> None:
        try:
            poll()
        except dist.DistError:  # the process that holds the store is gone: unknown
            missing.clear()

    def poll() -> None:
        store = PrefixStore("absent", dist.distributed_c10d._get_default_store())
        store.set(str(world.rank), "here")
        deadline = time.monotonic() + within_s
        names = {rank: str(rank) for rank in ranks}
        missing.extend(names)
        while missing and time.monotonic() < deadline:
            missing[:] = [rank for rank in missing if not store.check([names[rank]])]
            time.sleep(0.05)

    # The process that holds the store may itself hang: unknown too.
    checking = threading.Thread(target=check, daemon=True)
    checking.start()
    checking.join(within_s + 1)
    return () if checking.is_alive() else tuple(missing)


def leave() -> None:
    """Leave the world: destroy all process groups."""
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
_timeout_s = 300.0


def timeout_s() -> float:
    """Return how many seconds a collective may wait for a peer."""
    return _timeout_s


def group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group of these ranks, created once.

    torch names a group by its ranks and by the number of groups that its creator already had. So every rank must
    create its groups in the same order of axes (Comm does so for the groups of a pipeline).
    """
    if ranks not in _groups:
        if ranks == tuple(range(dist.get_world_size())):
            everyone = dist.group.WORLD
            assert everyone is not None
            _groups[ranks] = everyone
        else:
            _groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _groups[ranks]


def broadcast_words(words: list[str | None]) -> list[str | None]:
    """Broadcast rank 0's words: return them on every rank."""
    return list(broadcast_object(words)) if dist.is_initialized() else list(words)
