"""Reading torch.distributed's operations, as a dispatch mode sees them: operation, group, bytes, peer.

Bytes as in schedule/event.py: all-reduce and broadcast the buffer; all-gather and reduce-scatter the gathered buffer;
all-to-all the send buffer; messages the payload. One call with many tensors (coalesced) is one collective.
Source of the schemas: torch 2.13, torch/csrc/distributed/c10d/Ops.cpp (c10d) and Functional.cpp (_c10d_functional).
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from phalanx.observation.recorder.operations import tensors

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


@dataclass(frozen=True)
class Collective:
    """One call: an operation over a group. `buffers`: tensors whose sizes count; `peer`: global rank of the other
    end."""

    op: str
    group: ProcessGroup
    buffers: tuple[Tensor, ...]
    peer: int | None = None

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.buffers)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffers[0].dtype if self.buffers else torch.uint8

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self.group))


_SUFFIXES = re.compile("^_|_$|_coalesced|_base|_into_tensor|_tensor|_out|_single|_any_source")
"""Parts of names that say how buffers are passed."""
# name without these parts: (operation, index of the argument that counts, index of the group)
_C10D = {
    "allreduce": ("all_reduce", 0, 1),
    "broadcast": ("broadcast", 0, 1),
    "reduce": ("reduce", 0, 1),
    "allgather": ("all_gather", 0, 2),
    "reduce_scatter": ("reduce_scatter", 1, 2),
    "alltoall": ("all_to_all", 1, 2),
    "gather": ("gather", 1, 2),
    "scatter": ("scatter", 0, 2),
    "send": ("send", 0, 1),
    "recv": ("recv", 0, 1),
}
# name without these parts: (operation, whether the argument's bytes count once for each rank of the group)
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", False),
    "broadcast": ("broadcast", False),
    "all_gather": ("all_gather", True),
    "reduce_scatter": ("reduce_scatter", False),
    "all_to_all": ("all_to_all", False),
    "shard_dim_alltoall": ("all_to_all", False),
}


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Collective, ...]:
    """Return the collectives that a call of an operation in NAMESPACES issues: none for waits and barriers."""
    name = func._schema.name.split("::")[1]
    plain = _SUFFIXES.sub("", name)
    if func.namespace == "c10d":
        if plain not in _C10D:
            return ()
        op, counts, at = _C10D[plain]
        group = _group(args[at])
        peer = None
        if name in ("send", "recv_"):
            peer = dist.get_global_rank(group, args[2])
        return (Collective(op, group, tuple(tensors(args[counts])), peer),)
    given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    if name == "batch_p2p_ops":
        group = _group(given["group_name"])
        return tuple(
            Collective("send" if op == "isend" else "recv", group, (t,), dist.get_global_rank(group, peer))
            for op, peer, t in zip(given["op_list"], given["peer_list"], given["tensors"], strict=True)
        )
    if name in ("isend", "irecv"):
        group = _group(given["group_name"])
        peer = dist.get_global_rank(group, given["dst" if name == "isend" else "src"])
        return (Collective(name[1:], group, (given["tensor"],), peer),)
    if plain not in _FUNCTIONAL:
        return ()
    op, gathered = _FUNCTIONAL[plain]
    group = _group(given["group_name"])
    buffers = tuple(tensors(given["input"] if "input" in given else given["inputs"]))
    return (Collective(op, group, buffers * (group.size() if gathered else 1)),)


def _group(value: Any) -> ProcessGroup:
    if isinstance(value, str):
        return torch._C._distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
    if isinstance(value, ProcessGroup):
        return value
    return ProcessGroup.unbox(value)
