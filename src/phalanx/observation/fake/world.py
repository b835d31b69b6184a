"""A fake world with a single real rank: its environment, process group and GPUs, and the answers of other ranks.

Collectives are recorded and complete at once. Where a program reads what other ranks sent, they sent what this rank
did: an object gathered from all is this rank's, n times.
"""

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.fsdp import _init_utils as fsdp1
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg

from phalanx.observation.fake import autocast as gpu_autocast
from phalanx.observation.fake import device as gpu
from phalanx.observation.fake.calls import agreeing_ranks
from phalanx.observation.recorder.places import innermost, shortened
from phalanx.spec.errors import InputError

_BACKENDS = {"nccl", "gloo", "mpi", "ucc", "xccl", "fake", "undefined", "hccl"}


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Keep garbage collections, which many small tensors trigger often, from scanning the objects that exist now.
    Does nothing where the program has frozen objects itself, which would be unfrozen too."""
    if _frozen_before():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@cache
def _frozen_before() -> bool:
    """Whether this program has frozen objects itself: cached, since counting visits every object."""
    return gc.get_freeze_count() > 0


@contextmanager
def process_group(rank: int = 0, world: int = 1) -> Iterator[None]:
    """Give the process a process group whose collectives do nothing, unless it has a group."""
    if dist.is_initialized():
        yield
        return
    with patch.object(sys, "excepthook", sys.excepthook):  # torch installs its own
        dist.init_process_group(dist.Backend.FAKE, store=fake_pg.FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Post(Protocol):
    """Carries objects between observed ranks."""

    def send(self, to: int, objects: list[Any]) -> None:
        """Send objects to a rank."""

    def receive(self, sender: int) -> list[Any]:
        """Wait for the next objects from a rank."""


@contextmanager
def one_rank(
    rank: int,
    world: int,
    per_node: int,
    note: Callable[[str], None],
    post: Post | None = None,
) -> Iterator[None]:
    """Make this process a rank of a world with `per_node` ranks on each node. `note` receives a line about each call
    that is answered or skipped; `post` carries objects to and from other observed ranks."""
    local = rank % per_node
    environment = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": min(per_node, world),
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": -(-world // per_node),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "phalanx",
    }
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {k: str(v) for k, v in environment.items()}))
        stack.enter_context(process_group(rank, world))
        answers = _answers(world, note)
        if post is not None:
            answers |= _messages(post)
        for name, function in answers.items():
            for module in (dist, distributed_c10d, device_mesh):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, function))
        stack.enter_context(patch.object(dist.ProcessGroup, "_get_backend", _backend_of_host(dist.ProcessGroup)))
        stack.enter_context(patch.object(_fsdp_param, "_chunk_with_empty", _chunks))
        stack.enter_context(agreeing_ranks())
        stack.enter_context(patch.object(torch.multiprocessing, "spawn", _spawned(local, environment, note)))
        for name, value in _started(local, environment, note).items():
            stack.enter_context(patch.object(BaseProcess, name, value))
        # Releases of torch after 2.13 have it, and torchtitan 0.3 calls it.
        stack.enter_context(patch.object(dist, "set_timeout", answers["_set_pg_timeout"], create=True))
        yield


def _spawned(local: int, environment: Mapping[str, Any], note: Callable[[str], None]) -> Callable[..., None]:
    """Return torch.multiprocessing.spawn, which runs this rank alone, in this process."""
    ranks = environment["LOCAL_WORLD_SIZE"]

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> None:
        if nprocs != ranks:
            raise InputError(
                "spawn", nprocs, f"is not the {ranks} ranks of a node", f"observe it with --world {nprocs}"
            )
        note("torch.multiprocessing.spawn: this rank runs in this process, and no other")
        fn(local, *args)

    return spawn


def _started(local: int, environment: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """Return the replacements of a process that a program starts for each of its ranks, whose number is the first
    argument: this rank's runs here, at its start, and the others have ended."""

    def start(process: Any) -> None:
        rank, *_ = process._args or (None,)
        if type(rank) is not int or not 0 <= rank < environment["LOCAL_WORLD_SIZE"]:
            reason = "is a process that the program starts itself, and whose rank is not its first argument"
            remedy = "leave it out of this run, or let torchrun start the ranks"
            raise InputError("process", process.name, reason, remedy)
        note("processes that the program starts are its ranks: this one runs in this process, and no other")
        if rank == local:
            process._target(*process._args, **process._kwargs)

    def ended(process: Any, timeout: float | None = None) -> None:
        return None

    return {"start": start, "join": ended, "terminate": ended, "is_alive": lambda process: False, "exitcode": 0}


def _backend_of_host(group: Any) -> Callable[..., Any]:
    """Return ProcessGroup._get_backend with the host's backend for the fake GPU, which groups do not know."""
    backend_of = group._get_backend

    def get_backend(self: Any, device: torch.device) -> Any:
        return backend_of(self, torch.device("cpu") if device.type == gpu.NAME else device)

    return get_backend


def _chunks(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """Return the shards of a parameter under `fully_shard`, which reads one of them. Torch makes an empty tensor for
    every rank without rows, of every parameter: thousands in large worlds. Here all share one."""
    shards = list(torch.chunk(tensor, count, dim=dim))
    missing = count - len(shards)
    return shards + [shards[0].new_empty(0)] * missing if missing else shards


def _answers(world: int, note: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """Return the replacements of functions of torch.distributed, by name."""
    requested = "nccl"
    helper = distributed_c10d._new_process_group_helper
    backend_of = distributed_c10d.get_backend
    initialise = distributed_c10d.init_process_group
    default_of = distributed_c10d.get_default_backend_for_device

    def known(call: str, backend: object) -> set[str]:
        """Return the backends in a request. Raises InputError for one that is not torch's."""
        names = {part.rpartition(":")[2] for part in str(backend or "nccl").lower().split(",")}
        if names - _BACKENDS:
            site = innermost()
            where = f" (at {shortened(site)})" if site else ""
            raise InputError(
                call, backend, f"is a backend that sends by itself{where}", "observe the program with nccl or gloo"
            )
        return names

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        nonlocal requested
        given = inspect.signature(initialise).bind(*args, **kwargs).arguments
        backend, world_size = given.get("backend"), given.get("world_size", -1)
        names = known("init_process_group", backend)
        if world_size not in (-1, world):
            remedy = "observe it at that world size"
            raise InputError("init_process_group", world_size, f"is not the world of {world} ranks", remedy)
        requested = names.pop() if len(names) == 1 else str(backend)
        note(f"process group {backend or 'of the default backend'}: collectives are recorded and not sent")

    def new_helper(size: int, index: int, ranks: object, backend: object, *args: Any, **kwargs: Any) -> Any:
        known("new_group", backend)
        return helper(
            size, index, ranks, "fake", *args[:2], **{k: v for k, v in kwargs.items() if k in _GROUP_ARGUMENTS}
        )

    def get_backend(group: Any = None) -> str:
        name = backend_of(group)
        return requested if name == "fake" else name

    def get_default_backend_for_device(device: str | torch.device) -> str:
        kind = torch.device(device).type
        return "nccl" if kind in ("cuda", gpu.NAME) else default_of(device)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)
        note("all_gather_object: every rank's object is this rank's")

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(
        output: list[Any], objects: Sequence[Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        output[0] = objects[0] if objects else None

    def unchanged(*args: Any, **kwargs: Any) -> None:
        return None

    return {
        "init_process_group": init_process_group,
        "destroy_process_group": unchanged,
        "_new_process_group_helper": new_helper,
        "_verify_params_across_processes": unchanged,
        "get_backend": get_backend,
        "get_default_backend_for_device": get_default_backend_for_device,
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "broadcast_object_list": unchanged,
        "scatter_object_list": scatter_object_list,
        "monitored_barrier": unchanged,
        "_set_pg_timeout": unchanged,
    }


def _messages(post: Post) -> dict[str, Callable[..., Any]]:
    """Return the replacements of functions that send objects from rank to rank."""

    def other_end(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        if (rank := given.get(name)) is not None:
            return int(rank)
        group: Any = given.get("group") or dist.GroupMember.WORLD
        return dist.get_global_rank(group, given[f"group_{name}"])

    send, receive = dist.send_object_list, dist.recv_object_list

    def send_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        post.send(other_end(send, "dst", (object_list, *args), kwargs), list(object_list))

    def recv_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> int:
        sender = other_end(receive, "src", (object_list, *args), kwargs)
        object_list[:] = post.receive(sender)
        return sender

    return {"send_object_list": send_object_list, "recv_object_list": recv_object_list}


_GROUP_ARGUMENTS = ("group_name", "timeout", "pg_tag", "group_desc")


@contextmanager
def fake_gpus(per_node: int, redirected: Callable[[], None] = lambda: None) -> Iterator[gpu.FakeCuda]:
    """Provide `per_node` GPUs under torch.cuda. `redirected` is called for each use of device "cuda"."""
    module = gpu.register()
    gpu_autocast.register()
    module.count = per_node
    mesh_made, autocast_made = device_mesh.DeviceMesh.__init__, torch.amp.autocast_mode.autocast.__init__

    def mesh(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        mesh_made(self, gpu.NAME if device_type == "cuda" else device_type, *args, **kwargs)

    def autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast_made(self, gpu.NAME if device_type == "cuda" else device_type, *args, **kwargs)

    with ExitStack() as stack:
        for name in dir(module):
            if name == "_lazy_init" or (not name.startswith("__") and name not in ("count", "waits", "live")):
                value = getattr(module, name)
                for place in (torch.cuda, torch.cuda.random, torch.cuda.memory):
                    if hasattr(place, name):
                        stack.enter_context(patch.object(place, name, value))
        generators = tuple(gpu.FakeGenerator() for _ in range(per_node))
        stack.enter_context(patch.object(torch.cuda, "default_generators", generators))
        stack.enter_context(patch.object(torch.cuda.nccl, "version", lambda: (2, 27, 5)))
        # torch.tensor(x, device=...) then makes its tensor on the host first, where dispatch modes see the copy; by
        # itself torch does so only where it finds no CUDA.
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        # Torch looks at the stream's type before it asks a mode.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
            stack.enter_context(patch.object(torch.cuda.nvtx, name, lambda *args, **kwargs: 0))
        stack.enter_context(patch.object(device_mesh.DeviceMesh, "__init__", mesh))
        stack.enter_context(patch.object(torch.amp.autocast_mode.autocast, "__init__", autocast))
        stack.enter_context(gpu_autocast.autocast_cache())
        hooked: Callable[..., None] = DistributedDataParallel._check_comm_hook

        def checked(self: Any, hook: Any) -> None:
            """DDP accepts its bf16 hook only on CUDA with NCCL."""
            available = patch.object(dist, "is_nccl_available", lambda: True)
            with patch.object(torch.version, "cuda", "12.8"), available:
                hooked(self, hook)

        stack.enter_context(patch.object(DistributedDataParallel, "_check_comm_hook", checked))
        numbered = fsdp1._get_device_from_device_id

        def named(given: Any, *args: Any) -> Any:
            """FSDP1 compares `device_id` with where parameters are; a rank has one GPU, whatever its number."""
            device = numbered(given, *args)
            return redirect.device if device is not None and device.type in ("cuda", gpu.NAME) else device

        stack.enter_context(patch.object(fsdp1, "_get_device_from_device_id", named))
        redirect = gpu.Redirect(redirected)
        for calls in (torch.autograd, torch.autograd.graph):
            stack.enter_context(patch.object(calls, "_engine_run_backward", _under(redirect)))
        stack.enter_context(redirect)
        yield module


def _under(redirect: gpu.Redirect) -> Callable[..., Any]:
    """Return torch's call of the autograd engine, under the redirection.

    torch.overrides takes a mode off while it handles a call such as `backward()`, and the engine's threads get the
    modes of that moment: operations that a backward pass recomputes (checkpoints) would run without it."""
    run = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with redirect:
            return run(*args, **kwargs)

    return run_backward
