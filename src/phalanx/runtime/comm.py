"""Communication: every collective of a step goes through here, and is recorded above the transport.

A collective is named by mesh axis; over an axis of one rank it is nothing, and no event. Issue order is the same
on every rank of a group: that is the caller's duty, and what the recorder lets tests check.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.runtime import world as worlds
from phalanx.runtime.record import Recorder
from phalanx.runtime.status import StatusPage
from phalanx.runtime.world import World
from phalanx.schedule.event import Event, Phase
from phalanx.spec.mesh import Mesh

DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        return None


DONE = _Done()


class Comm:
    """The collectives of one rank of a mesh. Transport: native (torch.distributed's own)."""

    def __init__(self, world: World, mesh: Mesh) -> None:
        self.world, self.mesh = world, mesh
        self.recorder = Recorder()
        self.status = StatusPage(world.rank, mesh.coordinates(world.rank))
        self._sizes: dict[str, int] = {}

    def size(self, axis: str) -> int:
        """Ranks along an axis; the empty name is an axis that dropped out."""
        if axis not in self._sizes:
            self._sizes[axis] = self.mesh.size(axis) if axis else 1
        return self._sizes[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        return worlds.group(self.mesh.group_of(self.world.rank, axis))

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed flat memory for communication; a transport may place it."""
        return torch.zeros(numel, dtype=dtype, device=self.world.device)

    def all_reduce(
        self, tensor: Tensor, axis: str, *, unit: str, phase: Phase, micro_batch: int | None = None
    ) -> Handle:
        """Start summing `tensor` in place over an axis."""
        ranks = self.size(axis)
        if ranks == 1:
            return DONE
        self.recorder.collective(
            Event(
                "collective",
                "all_reduce",
                phase,
                unit,
                axis,
                ranks,
                dtype=DTYPE_NAMES[tensor.dtype],
                micro_batch=micro_batch,
                bytes=tensor.nbytes,
            )
        )
        self.status.now(f"all_reduce of {unit} over {axis} ({tensor.nbytes} bytes)")
        return dist.all_reduce(tensor, group=self.group(axis), async_op=True)  # type: ignore[no-any-return]

    def broadcast(self, tensor: Tensor, axis: str) -> None:
        """Give every rank of an axis its first rank's tensor. Outside of a step: not recorded."""
        if self.size(axis) > 1:
            dist.broadcast(tensor, group=self.group(axis), group_src=0)

    def barrier(self) -> None:
        """Wait for every rank of the world. Outside of a step: not recorded."""
        if self.world.size > 1:
            # A tensor of the host: Gloo keeps the host waiting, where NCCL would only queue.
            dist.all_reduce(torch.zeros(1), group=self.group("world"))
