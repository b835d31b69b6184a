"""A world of which one rank exists: its environment, its process group, and what other ranks would answer.

Collectives are recorded and complete at once. Where a program reads what other ranks sent, they sent what this rank
did: an object gathered from all is this rank's, n times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg

from phalanx.observation.fake import autocast as autocast_of_gpu
from phalanx.observation.fake import device as gpu
from phalanx.observation.fake.libraries import checks_of_libraries
from phalanx.observation.recorder.position import place_outside, relative
from phalanx.spec.errors import InputError

_KNOWN = {"nccl", "gloo", "mpi", "ucc", "xccl", "fake", "undefined", "hccl"}


@contextmanager
def one_rank(
    rank: int,
    world: int,
    per_node: int,
    note: Callable[[str], None],
    send_object: Callable[[int, list[Any]], None] | None = None,
    receive_object: Callable[[int], list[Any]] | None = None,
) -> Iterator[None]:
    """Be `rank` of a world, with `per_node` ranks on each node; `note` is given what was answered or skipped."""
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
        dist.init_process_group(dist.Backend.FAKE, store=fake_pg.FakeStore(), rank=rank, world_size=world)
        stack.callback(_destroy)
        answers = _answers(rank, world, note)
        if send_object is not None and receive_object is not None:
            answers |= _messages(send_object, receive_object)
        for name, function in answers.items():
            for module in (dist, distributed_c10d, device_mesh):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, function))
        stack.enter_context(patch.object(dist.ProcessGroup, "_get_backend", _backend_of_host(dist.ProcessGroup)))
        stack.enter_context(patch.object(_fsdp_param, "_chunk_with_empty", _chunks))
        stack.enter_context(checks_of_libraries())
        # Releases of torch after 2.13 have it, and torchtitan 0.3 calls it.
        stack.enter_context(patch.object(dist, "set_timeout", answers["_set_pg_timeout"], create=True))
        yield


def _backend_of_host(group: Any) -> Callable[..., Any]:
    """Return ProcessGroup._get_backend with the host's backend for the imagined GPU, of which groups know nothing."""
    of = group._get_backend

    def get_backend(self: Any, device: torch.device) -> Any:
        return of(self, torch.device("cpu") if device.type == gpu.NAME else device)

    return get_backend


def _chunks(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """Return the shards of a parameter under `fully_shard`, which reads one of them. Torch makes an empty tensor for
    every rank without rows, of every parameter: thousands in large worlds. Here they are one."""
    shards = list(torch.chunk(tensor, count, dim=dim))
    missing = count - len(shards)
    return shards + [shards[0].new_empty(0)] * missing if missing else shards


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _answers(rank: int, world: int, note: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """Return the functions of torch.distributed that are replaced, by name."""
    asked = ["nccl"]
    helper = distributed_c10d._new_process_group_helper
    backend_of = distributed_c10d.get_backend

    def known(call: str, backend: object) -> set[str]:
        """Return the backends that are asked for. Raises InputError for one that is not torch's."""
        names = {part.rpartition(":")[2] for part in str(backend or "nccl").lower().split(",")}
        if names - _KNOWN:
            place = place_outside()
            where = f" (at {relative(place[0])}:{place[1]})" if place else ""
            raise InputError(
                call, backend, f"is a backend that sends by itself{where}", "observe the program with nccl or gloo"
            )
        return names

    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: object = None,
        world_size: int = -1,
        rank: int = -1,
        *args: object,
        **kwargs: object,
    ) -> None:
        names = known("init_process_group", backend)
        if world_size not in (-1, world):
            raise InputError(
                "init_process_group", world_size, f"is not the world of {world} ranks", "--world must agree with it"
            )
        asked[0] = names.pop() if len(names) == 1 else str(backend)
        note(f"process group {backend or 'of the default backend'}: collectives are recorded and not sent")

    def new_helper(size: int, index: int, ranks: object, backend: object, *args: Any, **kwargs: Any) -> Any:
        known("new_group", backend)
        kwargs.pop("backend_options", None)
        kwargs.pop("device_id", None)
        return helper(size, index, ranks, "fake", *args[:2], **{k: v for k, v in kwargs.items() if k in _KEPT})

    def get_backend(group: Any = None) -> str:
        name = backend_of(group)
        return asked[0] if name == "fake" else name

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
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "broadcast_object_list": unchanged,
        "scatter_object_list": scatter_object_list,
        "monitored_barrier": unchanged,
        "_set_pg_timeout": unchanged,
    }


def _messages(
    send_object: Callable[[int, list[Any]], None], receive_object: Callable[[int], list[Any]]
) -> dict[str, Callable[..., Any]]:
    """Return the functions that send objects from rank to rank."""

    def end(rank: int | None, group: Any, in_group: int | None) -> int:
        return dist.get_global_rank(group or dist.group.WORLD, in_group) if rank is None else rank  # type: ignore

    def send_object_list(
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: object = None,
        group_dst: int | None = None,
        use_batch: bool = False,
    ) -> None:
        send_object(end(dst, group, group_dst), list(object_list))

    def recv_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: object = None,
        group_src: int | None = None,
        use_batch: bool = False,
    ) -> int:
        sender = end(src, group, group_src)
        object_list[:] = receive_object(sender)
        return sender

    return {"send_object_list": send_object_list, "recv_object_list": recv_object_list}


_KEPT = ("group_name", "timeout", "pg_tag", "group_desc")


@contextmanager
def imagined_gpus(per_node: int, redirected: Callable[[], None]) -> Iterator[gpu.Module]:
    """Let a program find `per_node` GPUs under torch.cuda."""
    module = gpu.register()
    autocast_of_gpu.register()
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
        generators = tuple(gpu.Generator() for _ in range(per_node))
        stack.enter_context(patch.object(torch.cuda, "default_generators", generators))
        stack.enter_context(patch.object(torch.cuda.nccl, "version", lambda: (2, 27, 5)))
        # Torch looks at the stream's type before a mode is asked.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
            stack.enter_context(patch.object(torch.cuda.nvtx, name, lambda *args, **kwargs: 0))
        stack.enter_context(patch.object(device_mesh.DeviceMesh, "__init__", mesh))
        stack.enter_context(patch.object(torch.amp.autocast_mode.autocast, "__init__", autocast))
        stack.enter_context(autocast_of_gpu.cached())
        hooked: Callable[..., None] = DistributedDataParallel._check_comm_hook

        def checked(self: Any, hook: Any) -> None:
            """DDP has its bf16 hook on CUDA with NCCL alone."""
            with (
                patch.object(torch.version, "cuda", "12.8"),
                patch.object(dist, "is_nccl_available", lambda: True),
            ):
                hooked(self, hook)

        stack.enter_context(patch.object(DistributedDataParallel, "_check_comm_hook", checked))
        redirect = gpu.Redirect(redirected)
        for calls in (torch.autograd, torch.autograd.graph):
            stack.enter_context(patch.object(calls, "_engine_run_backward", _under(redirect)))
        stack.enter_context(redirect)
        yield module


def _under(redirect: gpu.Redirect) -> Callable[..., Any]:
    """Return torch's call of the autograd engine, under the redirection.

    torch.overrides takes a mode off while it handles a call such as `backward()`, and the engine's threads get the
    modes of that moment: what a backward pass computes again (checkpoints) would run without it."""
    run = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with redirect:
            return run(*args, **kwargs)

    return run_backward
