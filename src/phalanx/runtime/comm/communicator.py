"""Communication: every collective of a step goes through here, and is recorded above the transport.

A collective is named by its mesh axis; over an axis of one rank it does nothing and records no event. All ranks must
issue their collectives in the same order over all groups together: the caller is responsible for that, and the
recorder lets tests check it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.runtime.comm import native, shm, staged
from phalanx.runtime.comm.dtypes import DTYPE_NAMES
from phalanx.runtime.comm.handles import OrderedHandle, ReleasedHandle, UnissuedHandle
from phalanx.runtime.comm.p2p import P2P
from phalanx.runtime.comm.recorder import Recorder
from phalanx.runtime.comm.timeline import CommTimeline
from phalanx.runtime.comm.transport import DONE, Call, Handle, same_place
from phalanx.runtime.process import gpus, objects, status
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.environment import World
from phalanx.schedule.event import Event, Phase, Reduction
from phalanx.spec.cluster.collective_choice import Choice, pick
from phalanx.spec.job import Transport
from phalanx.spec.strategy.mesh import Mesh


class Comm:
    """The collectives of one rank of a mesh.

    `choices` say which transport and algorithm serve which collective; without them all are native. With `null` there
    are no peers: collectives are checked and recorded but not issued (used for verification).
    """

    def __init__(self, world: World, mesh: Mesh, choices: Sequence[Choice] = (), null: bool = False) -> None:
        self.world, self.mesh, self.null = world, mesh, null
        self.choices = tuple(choices) if world.size > 1 else ()
        self.recorder = Recorder()
        self.timeline = CommTimeline(possible=world.device.type == "cpu")
        self.status = status.page(world.rank)
        self.status.stand(mesh.coordinates(world.rank))
        self._groups: dict[str, tuple[int, ...]] = {}
        shared = any(c.transport == "shm" or c.algorithm == "hierarchical" for c in self.choices)
        self._shm = shm.attach() if shared and world.device.type == "cpu" else None
        several = world.size > 1 and not null
        self._staged = several and gpus.shares_gpu(gpus.this_host(), world.local_size)
        self.wire = staged if self._staged else native
        """Sends and receives without recording."""
        self._p2p = P2P(world.local_size, self._shm.arena if self._shm is not None else None)
        if not null and world.size > 1 and self.size("pp") > 1:
            self._create_groups()
        self.unawaited: dict[int, UnissuedHandle] = {}
        """Collectives over the null transport that have not been waited for yet."""

    def _create_groups(self) -> None:
        """Create all process groups of a pipeline, in the same order on every rank. If groups were created at first
        use, their order would differ by rank: one begins with a message between stages, another with a collective of
        its layers."""
        m = self.mesh
        replicas = m.name("dp_replicate", "dp_shard", "cp", "tp")
        for axis in (
            m.gradient_axis,
            m.shard_axis,
            m.step_axis,
            m.name("dp_local") if "dp_local" in dict(m.axes) else "",
            "dp_replicate",
            "cp",
            "ring",
            "ulysses",
            "tp",
            "pp",
            "edp",
            "ep",
            "etp",
            "ep+etp",
            "tokens",
            replicas,
            "embed",
        ):
            ranks = self.ranks(axis)
            # Ranks of the middle stages have no `embed` group: they create a group of one rank, to keep the order.
            if len(ranks) > 1 or axis == "embed":
                worlds.group(ranks)

    def ranks(self, axis: str) -> tuple[int, ...]:
        """Return the global ranks of this rank's group along an axis; an empty name means this rank alone."""
        if axis not in self._groups:
            self._groups[axis] = self.mesh.group_of(self.world.rank, axis) if axis else (self.world.rank,)
        return self._groups[axis]

    def index(self, axis: str) -> int:
        """Return this rank's index in its group along an axis."""
        return self.ranks(axis).index(self.world.rank)

    def size(self, axis: str) -> int:
        """Return the number of ranks in this rank's group along an axis."""
        return len(self.ranks(axis))

    def buffer(self, numel: int, dtype: torch.dtype, zeroed: bool = True) -> Tensor:
        """Return a flat tensor (numel,) for communication, in shared memory if a transport uses that."""
        if self._shm is not None and self._shm.arena is not None and numel:
            try:
                return self._shm.arena.buffer(numel, dtype, zeroed)
            except OSError:
                pass  # the arena is full: ordinary memory works too, at the price of a copy
        make = torch.zeros if zeroed else torch.empty
        return make(numel, dtype=dtype, device=self.world.device)

    def all_reduce(
        self,
        tensor: Tensor,
        axis: str,
        *,
        unit: str,
        phase: Phase,
        micro_batch: int | None = None,
        reduction: Reduction = "sum",
    ) -> Handle:
        """Start reducing `tensor`, of any shape, in place over an axis."""
        flat = tensor.view(-1)
        return self._record("all_reduce", axis, flat, flat, tensor.nbytes, unit, phase, micro_batch, reduction)

    def all_gather(
        self, target: Tensor, source: Tensor, axis: str, *, unit: str, phase: Phase, micro_batch: int | None = None
    ) -> Handle:
        """Start gathering every rank's `source` (n,) into `target` (ranks x n,); source may be part of target."""
        return self._record("all_gather", axis, source, target, target.nbytes, unit, phase, micro_batch)

    def reduce_scatter(
        self,
        target: Tensor,
        source: Tensor,
        axis: str,
        *,
        unit: str,
        phase: Phase,
        micro_batch: int | None = None,
        reduction: Reduction = "sum",
    ) -> Handle:
        """Start reducing `source` (ranks x n,) and leaving this rank's part of the result in `target` (n,). Target
        may be a view of that part of source. The rest of source is undefined afterwards."""
        return self._record(
            "reduce_scatter", axis, source, target, source.nbytes, unit, phase, micro_batch, reduction
        )

    def all_to_all(
        self,
        target: Tensor,
        source: Tensor,
        axis: str,
        *,
        unit: str,
        phase: Phase,
        micro_batch: int | None = None,
        sends: Sequence[int] = (),
        receives: Sequence[int] = (),
    ) -> Handle:
        """Start sending part j of `source` to rank j of the axis and receiving the others' parts in `target`. Parts
        are equal, or have `sends[j]` and `receives[j]` elements."""
        parts = tuple(sends), tuple(receives)
        return self._record("all_to_all", axis, source, target, source.nbytes, unit, phase, micro_batch, parts=parts)

    def exchange(
        self,
        target: Tensor,
        source: Tensor,
        axis: str,
        *,
        unit: str,
        phase: Phase,
        micro_batch: int | None = None,
    ) -> Handle:
        """Start sending `source` to the next rank of an axis, a ring, and receiving `target` from the previous one.
        Records two events. Always uses torch's own sends and receives."""
        ranks = self.ranks(axis)
        p, me = len(ranks), ranks.index(self.world.rank)
        if p == 1:
            target.copy_(source)
            return DONE
        to, source_index = (me + 1) % p, (me - 1) % p
        dtype = DTYPE_NAMES[source.dtype]
        sends, receives = (
            Event("p2p", op, phase, unit, axis, p, ranks[peer], dtype, micro_batch=micro_batch, bytes=source.nbytes)
            for op, peer in (("send", to), ("recv", source_index))
        )
        self.recorder.collective(sends)
        self.recorder.collective(receives)
        label = f"{unit} over {axis}"
        what = f"exchange of {label} ({source.nbytes} bytes, to rank {ranks[to]}, from rank {ranks[source_index]})"
        self.status.arrive(what, axis, ranks)
        flight = self.timeline.issue(receives)
        if self.null:
            return self._unissued(label, "exchange", (source,), (target,))
        handle: Handle = self.wire.exchange(ranks, to, source_index, source.detach(), target.detach(), flight)
        return self.timeline.issued(flight, handle if self._shm is None else OrderedHandle(handle, self._shm))

    def send(self, tensor: Tensor, peer: int, phase: Phase, chunk: int, micro_batch: int) -> Handle:
        """Start sending a chunk's output (or input gradient) to the rank at index `peer` of the pipeline. Always uses
        torch's own sends."""
        return self._message("send", tensor, peer, phase, chunk, micro_batch)

    def receive(self, tensor: Tensor, peer: int, phase: Phase, chunk: int, micro_batch: int) -> Handle:
        """Start receiving the input (or output gradient) that a pass through a chunk needs, from index `peer`."""
        return self._message("recv", tensor, peer, phase, chunk, micro_batch)

    def _message(self, op: str, tensor: Tensor, peer: int, phase: Phase, chunk: int, micro_batch: int) -> Handle:
        ranks, sends = self.ranks("pp"), op == "send"
        event = Event(
            "p2p",
            op,
            phase,
            f"chunk.{chunk}",
            "pp",
            len(ranks),
            ranks[peer],
            DTYPE_NAMES[tensor.dtype],
            chunk=chunk,
            micro_batch=micro_batch,
            bytes=tensor.nbytes,
        )
        self.recorder.collective(event)
        # Both ends label a message by the chunk that produced it: a forward pass needs the previous chunk's output.
        source = chunk + (not sends) * (-1 if phase == "F" else 1)
        label = f"{phase} of chunk {source}, micro-batch {micro_batch}"
        ends = (self.world.rank, ranks[peer]) if sends else (ranks[peer], self.world.rank)
        what = f"message {label} ({tensor.nbytes} bytes, rank {ends[0]} to rank {ends[1]})"
        self.status.arrive(what, "pp", sorted(ends))
        flight = self.timeline.issue(event)
        if self.null:
            return self._unissued(label, op, (tensor,) * sends, (tensor,) * (not sends))
        tag = native.FREE_TAG + 2 * (micro_batch * 2**10 + source) + (phase == "F")
        handle = self.wire.message(ranks, peer, tensor.detach(), sends, tag, flight)
        return self.timeline.issued(flight, handle if self._shm is None else OrderedHandle(handle, self._shm))

    def _record(
        self,
        op: str,
        axis: str,
        source: Tensor,
        target: Tensor,
        size: int,
        unit: str,
        phase: Phase,
        micro_batch: int | None,
        reduction: Reduction = "sum",
        parts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> Handle:
        ranks = self.ranks(axis)
        if len(ranks) == 1:
            if not same_place(target, source):
                target.copy_(source)
            return DONE
        dtype = DTYPE_NAMES[source.dtype]
        event = Event(
            "collective", op, phase, unit, axis, len(ranks), dtype=dtype, micro_batch=micro_batch, bytes=size
        )
        self.recorder.collective(event)
        label = f"{unit} over {axis}"
        self.status.arrive(f"{op} of {label} ({size} bytes)", axis, ranks)
        me = ranks.index(self.world.rank)
        flight = self.timeline.issue(event)
        call = Call(op, ranks, me, source.detach(), target.detach(), reduction, *parts, label=label, watch=flight)
        if self.null:
            overwrites = op in ("all_reduce", "reduce_scatter")
            return self._unissued(label, op, (source,) * (not overwrites), (target, *[source] * overwrites))
        # Ranks do not know each other's uneven sizes: all choose as for the largest size.
        chosen = pick(self.choices, op, len(ranks), 2**62 if parts[0] else size, self.hosts(ranks))
        start = partial(self.start, call, chosen.transport, chosen.algorithm)
        # NCCL drops its references when its handle is waited for.
        keeps = self.recorder.keeping and not call.source.is_cuda
        return self.timeline.issued(flight, ReleasedHandle(call, start) if keeps else start())

    def start(self, call: Call, transport: Transport = "native", algorithm: str = "") -> Handle:
        """Issue a call over a transport without recording it, as measurements do. If shared memory cannot serve the
        group, for example over several hosts, all its ranks use native instead."""
        if self.null:
            self._unrecorded(str(call))
            return DONE
        if transport == "shm":
            if self.shares(call.ranks):
                assert self._shm is not None
                return self._shm.start(call)
            transport = "native"
        here = staged.on_host(call) if self._staged else call
        handle = self._p2p.start(here, algorithm) if transport == "p2p" else native.start(here)
        if self._staged:
            return staged.StagedHandle(handle, here.target, call.target)
        return handle if self._shm is None else OrderedHandle(handle, self._shm)

    def shares(self, ranks: tuple[int, ...]) -> bool:
        """Whether shared memory serves a group. The first call for a group is collective."""
        return self._shm is not None and self.hosts(ranks) == 1 and self._shm.reaches(ranks, self.world.rank)

    def hosts(self, ranks: tuple[int, ...]) -> int:
        """Return the number of hosts on which these ranks run."""
        return len({rank // self.world.local_size for rank in ranks})

    def broadcast(self, tensor: Tensor, axis: str) -> None:
        """Overwrite `tensor` on every rank of an axis with that of the first. Not recorded: not for use in a step."""
        ranks = self.ranks(axis)
        if self.null:
            self._unrecorded(f"broadcast over {axis}")
        elif len(ranks) > 1:
            self._settle()
            self.status.arrive(f"broadcast over {axis} ({tensor.nbytes} bytes)", axis, ranks)
            self.start(
                Call("broadcast", ranks, ranks.index(self.world.rank), tensor.view(-1), tensor.view(-1))
            ).wait()

    def gather_objects(self, mine: Any, axis: str) -> list[Any]:
        """Gather a picklable object from every rank of an axis, in order. Not recorded: not for use in a step."""
        ranks = self.ranks(axis)
        if self.null:
            self._unrecorded(f"gather_objects over {axis}")
        if len(ranks) == 1 or self.null:
            return [mine] * len(ranks)
        self._settle()
        self.status.arrive(f"the object gather after {self.status.work}", axis, ranks)
        return objects.gather_objects(mine, worlds.group(ranks))

    def barrier(self) -> None:
        """Wait for every rank of the world. Not recorded: not for use in a step."""
        if self.null:
            self._unrecorded("barrier")
        elif self.world.size > 1:
            self._settle()
            # A CPU tensor goes over Gloo, which blocks the host; NCCL would only queue the operation.
            token = torch.zeros(1)
            ranks = tuple(range(self.world.size))
            self.status.arrive(f"the barrier after {self.status.work}", "world", ranks)
            native.start(Call("all_reduce", ranks, self.world.rank, token, token)).wait()

    def _unissued(self, label: str, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Handle:
        """Return a handle over the null transport, listed as unawaited until its `wait`."""
        handle = UnissuedHandle(self.unawaited, f"{op} of {label}", reads, writes)
        self.unawaited[id(handle)] = handle
        return handle

    def _unrecorded(self, what: str) -> None:
        """Raise RuntimeError inside a recorded step, where all communication must be recorded."""
        if self.recorder.keeping:
            raise RuntimeError(f"{what} is issued inside a step but not recorded")

    def _settle(self) -> None:
        if self._shm is not None:
            self._shm.settle()
